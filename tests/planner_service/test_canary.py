"""Canaries, probes and floors over real gRPC, with the planner in this process."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from typing import Any

import pytest
from planner_harness import PROFILE, Worker, comes_true, context, report, running_planner

from nightjar.v1 import planner_pb2 as pb
from planner_service.context import Context, Outcome
from planner_service.ledger import Ledger
from planner_service.planner import Planner, Report, Stream
from planner_service.policies import BUILT_IN
from planner_service.policies.bins import Bin
from planner_service.server_messages import profile
from planner_service.session import steps_of
from planner_service.slices import SLICE_STEPS, Probes, has_slice, steps_left_of_slice
from planner_service.versions import EVERYONE, Book, Floor, Scope

GAMMAS = {"1-fixed": 3, "2-fixed": 1}


async def activate(stub: Any, name: str, share: float = 0.0, **fields: Any) -> str:
    """Make a version; its id."""
    scope = pb.PolicyScope(canary_share=share)
    request = pb.ActivatePolicyRequest(name=name, scope=scope, **fields)
    return str((await stub.ActivatePolicy(request)).version.version)


async def run_hold(worker: Worker, batch_size: int = 1) -> tuple[str, int, int]:
    """Run the decision's whole hold and ask again; version, gamma and steps that ran."""
    decision, gamma = worker.decision, worker.gamma
    done = report(gamma, batch_size, decision.hold_steps, decision_id=decision.decision_id)
    await worker.ask(batch_size, done)
    return decision.policy_version, gamma, decision.hold_steps


async def test_a_canary_gets_its_share_in_whole_slices() -> None:
    """Over 60 slices of each of 4 workers; no hold reaches past a slice's end."""
    ran: Counter[str] = Counter()
    async with running_planner(policy="fixed") as stub:
        canary = await activate(stub, "fixed", 0.25, parameters={"gamma": "1"})
        for name in ("a", "b", "c", "d"):
            worker, steps = Worker(stub, name), 0
            await worker.ask(hello=True)
            while steps < 60 * SLICE_STEPS:
                version, gamma, hold = await run_hold(worker)
                assert gamma == GAMMAS[version]
                assert steps // SLICE_STEPS == (steps + hold - 1) // SLICE_STEPS
                expected = has_slice(0.25, name, steps, 2)
                assert version == (canary if expected else "1-fixed")
                ran[version] += hold
                steps += hold
        listed = await stub.ListPolicies(pb.ListPoliciesRequest())
        shown = {v.version: (v.active, v.scope.canary_share) for v in listed.versions}
        assert shown == {"1-fixed": (True, 0.0), "2-fixed": (True, 0.25)}
        state = await stub.GetPolicyState(pb.GetPolicyStateRequest())
        assert state.version.version == "1-fixed"
    assert ran[canary] / ran.total() == pytest.approx(0.25, abs=0.1)


async def test_another_replica_keeps_the_slice() -> None:
    """The count of steps travels in the session; what the decision's hold has left does not run."""
    async with running_planner(policy="fixed") as one, running_planner(policy="fixed") as two:
        for stub in (one, two):
            await activate(stub, "fixed", 0.5, parameters={"gamma": "1"})
        steps = SLICE_STEPS * next(
            i for i in range(99) if has_slice(0.5, "w", i * 200, 2) != has_slice(0.5, "w", 0, 2)
        )
        worker = Worker(one, "w")
        await worker.ask(hello=True)
        while steps_of(worker.decision.session) < steps + 70:
            await run_hold(worker)
        version, session = worker.decision.policy_version, worker.decision.session
        count = steps_of(session)
        moved = Worker(two, "w")
        await moved.ask(hello=True, session=session)
        assert moved.decision.policy_version == version
        assert steps_of(moved.decision.session) == count
        fresh = Worker(two, "w")
        await fresh.ask(hello=True)
        assert fresh.decision.policy_version != version


async def test_a_hold_left_in_another_bucket_ends_with_its_slice() -> None:
    """Steps reported under a version whose slice is over are answered by the one that is due."""
    async with running_planner(policy="fixed") as stub:
        await activate(stub, "fixed", 0.5, parameters={"gamma": "1"})
        worker = Worker(stub, "w")
        await worker.ask(1, hello=True)
        first = worker.decision.policy_version
        turns = [has_slice(0.5, "w", i * SLICE_STEPS, 2) for i in range(50)]
        border = turns.index(not turns[0]) * SLICE_STEPS
        while steps_of(worker.decision.session) < border - 60:
            await run_hold(worker)
        held = worker.decision
        left = border - steps_of(held.session)
        await worker.ask(2)
        # A question of another bucket came in between; then the first bucket runs on.
        done = report(1, 1, left + 3, decision_id=held.decision_id)
        await worker.send(reports=[done])
        decision = await worker.next()
        assert decision.policy_version != first
        assert decision.bucket == 1


async def test_unary_clients_have_slices_too() -> None:
    """By name or by the session they return, a hold counts as run once it was handed out."""
    async with running_planner(policy="fixed") as stub:
        await activate(stub, "fixed", 0.5, parameters={"gamma": "1"})
        ask = pb.SelectGammaRequest(profile=PROFILE, context=context(1), client_id="c")
        steps, seen = 0, set()
        while steps < 10 * SLICE_STEPS:
            decision = (await stub.SelectGamma(ask)).decision
            expected = "2-fixed" if has_slice(0.5, "c", steps, 2) else "1-fixed"
            assert decision.policy_version == expected
            seen.add(expected)
            steps += decision.hold_steps
            assert steps_of(decision.session) == steps
        assert len(seen) == 2


async def test_probes_get_their_share_and_nothing_else_changes() -> None:
    """Gamma 0 in 2 % of the steps, said in the decision's id; the version stays the policy's."""
    share, steps = 0.02, 0
    probes, ran = Probes(share), Counter[bool]()
    async with running_planner(policy="fixed", probe_share=share) as stub:
        worker = Worker(stub, "w")
        await worker.ask(hello=True)
        while steps < 40 * probes.frame_steps:
            decision = worker.decision
            is_probe, left = probes.at("w", steps)
            assert decision.decision_id.endswith("-probe") == is_probe
            row = decision.table[0]
            assert (row.gamma, row.exploit_gamma) == (0 if is_probe else 3, 3)
            assert all(row.gamma == 0 for row in decision.table) == is_probe
            assert (decision.explored, decision.propensity) == (is_probe, 1.0)
            assert decision.policy_version == "1-fixed"
            assert decision.hold_steps <= left
            _, _, hold = await run_hold(worker)
            ran[is_probe] += hold
            steps += hold
        state = await stub.GetPolicyState(pb.GetPolicyStateRequest())
    assert ran[True] / steps == pytest.approx(share, rel=0.1)
    (known,) = state.profiles
    assert known.num_baseline_steps == ran[True]
    # Fixed 3 emits 2.5 tokens a step of 10 ms, plain decoding 1.
    weighted = (2.5 * ran[False] + ran[True]) / steps
    assert known.net_benefit == pytest.approx(weighted - 1, abs=0.01)
    assert state.version.net_benefit == pytest.approx(1.5, abs=0.01)
    assert state.version.num_baseline_steps == ran[True]


@pytest.mark.parametrize(
    ("settings", "feasible"),
    [
        ({"policy": "off", "probe_share": 0.5}, 5),
        ({"policy": "fixed", "probe_share": 0.5}, 0),
        ({"policy": "fixed", "probe_share": 0}, 5),
    ],
)
async def test_nothing_is_probed_that_would_not_speculate(
    settings: dict[str, Any], feasible: int
) -> None:
    """Policy off, batches that cannot speculate, and a share of 0 have no probes."""
    async with running_planner(**settings) as stub:
        worker = Worker(stub, "w")
        await worker.ask(hello=True)
        for _ in range(50):
            await worker.send(
                reports=[report(0, 1, 5, decision_id=worker.decision.decision_id)],
                ask=context(1, feasible),
            )
            assert not (await worker.next()).decision_id.endswith("-probe")
        state = await stub.GetPolicyState(pb.GetPolicyStateRequest())
        assert state.profiles[0].HasField("net_benefit")  # gamma 0 ran, by whatever reason


@pytest.mark.parametrize(("probe_share", "canary_share"), [(0.1, 0.0), (0.0, 0.5)])
def test_a_policy_goes_on_after_a_probe_or_a_canary_as_if_it_had_not_been(
    probe_share: float, canary_share: float
) -> None:
    """A bin of `nightjar` that they fall into keeps its arm, and none of its steps is lost."""
    book = Book().activate("nightjar", {"gamma_max": "5"}, EVERYONE, 0, "default")
    if canary_share:
        canary = Scope(canary_share=canary_share)
        book = book.activate("fixed", {"gamma": "2"}, canary, 0, "operator")
    planner, _ = planner_with(book, [0.0], probe_share=probe_share)
    stream = Stream(profile(PROFILE, "profile"), "w")
    planner.register(stream.profile)
    held: list[tuple[int, float, int]] = []  # arm, propensity and steps of each decision
    num_within = 0
    for _ in range(600):
        decision = planner.decide(stream, Context(1))
        choice = decision.choice
        is_probe = decision.decision_id.endswith("-probe")
        left = steps_left_of_slice(stream.num_steps)
        if probe_share:
            left = planner.probes.at("w", stream.num_steps)[1]
        if not is_probe and decision.version == "1-nightjar":
            if held and held[-1][2] > 0:  # the bin that was cut
                num_within += 1
                assert held[-1][:2] == (choice.gamma, choice.propensity)
                assert choice.hold_steps == min(held[-1][2], left)
            at = Bin(*stream.sessions["1-nightjar"].numbers[1])  # type: ignore[arg-type]
            left = at.length - at.position - choice.hold_steps
            held.append((choice.gamma, choice.propensity, left))
        done = outcome(choice.hold_steps, 1.0 + choice.gamma / 4)
        planner.learn(stream, Report(Context(1), choice.gamma, decision.decision_id, done))
    assert num_within > (20 if probe_share else 5)


def planner_with(book: Book, clock: list[float], **settings: Any) -> tuple[Planner, list[Any]]:
    """A planner with a clock of ours, and what it withdraws."""
    withdrawn: list[Any] = []
    planner = Planner(
        registry=BUILT_IN,
        ledger=Ledger(stored=False),
        incarnation="t",
        rng=random.Random(1),
        clock=lambda: clock[0],
        now_ms=lambda: int(clock[0] * 1000),
        on_withdraw=lambda *what: withdrawn.append(what),
        **settings,
    )
    planner.set_book(book)
    return planner, withdrawn


def outcome(steps: int, tokens_a_step: float) -> Outcome:
    """Steps of 10 ms."""
    tokens = round(steps * tokens_a_step)
    return Outcome(steps, steps, steps * 10_000, tokens, tokens, tokens)


def test_a_floor_withdraws_its_version_and_no_other() -> None:
    """A canary that is slower than plain decoding goes; what it cost stands in the reason."""
    book = Book().activate("fixed", {"gamma": "3"}, EVERYONE, 0, "default")
    floor = Floor(min_net_benefit=-0.05, for_s=30.0)
    book = book.activate(
        "fixed", {"gamma": "5"}, Scope(canary_share=0.5), 0, "operator", floor=floor
    )
    clock = [1000.0]
    planner, withdrawn = planner_with(book, clock, probe_share=0.05)
    stream = Stream(profile(PROFILE, "profile"), "w")
    planner.register(stream.profile)
    tokens = {0: 1.0, 3: 1.5, 5: 0.8}
    started = clock[0]
    while not withdrawn:
        assert clock[0] < started + 120
        decision = planner.decide(stream, Context(1))
        gamma, hold = decision.choice.gamma, decision.choice.hold_steps
        clock[0] += hold * 0.01
        done = Report(Context(1), gamma, decision.decision_id, outcome(hold, tokens[gamma]))
        planner.learn(stream, done)
    assert 30 <= clock[0] - started <= 65
    ((version, because, at_ms),) = withdrawn
    assert (version, at_ms) == ("2-fixed", int(clock[0] * 1000))
    assert re.match(r"net benefit -(19|20)\..% stayed below its floor of -5.0% for 3. s", because)
    assert planner.num_policy_faults == 0
    gone = planner.book.versions[1]
    assert (gone.live, gone.withdrawn_because, gone.withdrawn_at_ms) == (False, because, at_ms)
    assert planner.due_version(stream) == "1-fixed"
    assert planner.net_benefit("2-fixed") is None
    benefit = planner.net_benefit("1-fixed")
    assert benefit is not None
    assert benefit.net == pytest.approx(0.5, abs=0.01)


async def test_a_floor_over_the_wire(store: str) -> None:
    """It is shown with its version; missed, workers go back, and other planners hear why."""
    settings: dict[str, Any] = {"policy": "off", "probe_share": 0.2, "store": store}
    async with running_planner(**settings) as stub, running_planner(**settings) as other:
        worker = Worker(stub, "w")
        await worker.ask(hello=True)
        floor = pb.NetBenefitFloor(min_net_benefit=0.0, for_s=0.3)
        assert await activate(stub, "fixed", floor=floor) == "2-fixed"
        assert (await worker.next()).policy_version == "2-fixed"
        listed = await stub.ListPolicies(pb.ListPoliciesRequest())
        assert listed.versions[0].floor == floor
        slow = {"step_us": 10**7}
        async with asyncio.timeout(20):
            while worker.decision.policy_version == "2-fixed":
                decision, gamma = worker.decision, worker.gamma
                fields = {"decision_id": decision.decision_id, **(slow if gamma else {})}
                await worker.ask(1, report(gamma, 1, decision.hold_steps, **fields))
        assert worker.decision.policy_version == "1-off"
        listed = await stub.ListPolicies(pb.ListPoliciesRequest())
        gone = listed.versions[0]
        assert (gone.version, gone.active) == ("2-fixed", False)
        assert "stayed below its floor of +0.0%" in gone.withdrawn_because
        assert gone.withdrawn_at_ms > gone.activated_at_ms

        async def heard() -> bool:
            shown = (await other.ListPolicies(pb.ListPoliciesRequest())).versions[0]
            return bool(shown.withdrawn_because == gone.withdrawn_because)

        await comes_true(heard)
        state = await stub.GetPolicyState(pb.GetPolicyStateRequest())
        assert (state.version.version, state.num_policy_faults) == ("1-off", 0)
