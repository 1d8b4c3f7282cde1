"""The step loop with its planner and its memory agent, over a channel that records."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest
from engine_bench import TEXT, Bench, answer, decision, submit
from engine_rig import params, prompt

from nightjar.buckets import BucketGrid
from worker.engine.plan import StepResult
from worker.messages import (
    AgentLink,
    Decision,
    Grant,
    GrantAnswer,
    PlannerLink,
    Pressure,
    Reports,
    RequestRefused,
    Status,
    TransitionDone,
    TransitionRequest,
)

pytestmark = pytest.mark.usefixtures("every_depth")


def test_the_planner_is_asked_obeyed_and_told() -> None:
    """Gamma 0 until a decision comes; then its gamma for its hold, sums, and a new question."""
    bench = Bench(planned=True)
    bench.give(submit(1, TEXT, max_tokens=120))
    bench.turn(4 + bench.depth)
    assert bench.channel.of(Reports) == []  # no stream: sums wait
    bench.give(PlannerLink(connected=True))
    bench.turn()
    (first,) = bench.channel.of(Reports)
    assert first.ask is not None
    assert first.ask.feasible_max_gamma == 5
    assert sum(sums.num_steps for sums in first.reports) == 4
    assert {(sums.gamma, sums.decision_id) for sums in first.reports} == {(0, "")}
    bench.give(decision("a", 4))
    bench.turn(5 + bench.depth)
    told = [s for r in bench.channel.of(Reports)[1:] for s in r.reports]
    mine = [s for s in told if s.decision_id == "a"]
    assert {s.gamma for s in mine} == {4}
    assert sum(s.num_steps for s in mine) == 5
    assert sum(s.num_emitted for s in mine) == 25
    assert bench.channel.of(Reports)[-1].ask is not None  # the hold of five steps is over
    assert bench.channel.of(Reports)[-1].session == b"a"
    bench.turn(2)  # the table serves until the answer comes
    assert bench.engine.planner.gamma == 4
    bench.give(decision("b", 0, policy_version="2-off"))
    bench.turn(1 + bench.depth)
    assert bench.engine.planner.gamma == 0
    bench.give(PlannerLink(connected=False))
    bench.finish()
    assert bench.channel.tokens(1) == answer(bench, params(max_tokens=120))
    assert bench.channel.end(1).usage.policy_version == "2-off"


def test_reports_tell_the_contexts_that_each_decision_was_about(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Coarse grids of two versions, tables with gaps: every step counts where it ran."""
    bench, rng = Bench(planned=True, num_base_blocks=40), random.Random(4)
    bench.give(PlannerLink(connected=True))
    grids = [BucketGrid((2, 3), (40, 90, 160)), BucketGrid((1, 4), (60, 100))]
    decisions: dict[str, tuple[Decision, BucketGrid]] = {}
    ran: Counter[tuple[int, int]] = Counter()
    report = bench.engine.planner.report

    def count(done: StepResult) -> None:
        if done.plan.context is not None:
            ran[done.plan.context.batch_size, done.plan.gamma] += 1
        report(done)

    monkeypatch.setattr(bench.engine.planner, "report", count)
    num_seen, num_requests, owed = 0, 0, None
    for turn in range(600):
        if turn < 500 and rng.random() < 0.2:
            num_requests += 1
            text = prompt(rng, rng.randint(5, 40))
            bench.give(submit(num_requests, text, max_tokens=rng.randint(5, 60)))
        if owed is not None and rng.random() < 0.8:
            grid = grids[turn // 97 % 2]
            bucket = grid.bucket(owed.batch_size, owed.num_kv_tokens)
            table = {b: (rng.randint(0, 5),) * 2 for b in (bucket, bucket - 1, bucket + 3)}
            answer = decision(
                f"d{turn}",
                0,
                policy_version=f"{turn // 97}-x",
                batch_size_edges=grid.batch_size_edges,
                kv_token_edges=grid.kv_token_edges,
                table=table,
                bucket=bucket,
                num_extra_drafts=rng.choice([0, 0, 2]),
            )
            decisions[answer.decision_id] = answer, grid
            bench.give(answer)
            owed = None
        bench.turn()
        for message in bench.channel.of(Reports)[num_seen:]:
            num_seen += 1
            owed = message.ask or owed
    bench.finish()
    bench.channel.now += 1.0
    bench.turn()
    told = [s for message in bench.channel.of(Reports) for s in message.reports]
    reported: Counter[tuple[int, int]] = Counter()
    for sums in told:
        context = sums.context
        reported[context.batch_size, sums.gamma] += sums.num_steps
        assert sums.num_timed_rows == context.batch_size * sums.num_timed_steps
        if sums.decision_id:
            given, grid = decisions[sums.decision_id]
            bucket = grid.bucket(context.batch_size, context.num_kv_tokens)
            assert sums.bucket == bucket
            assert sums.gamma <= given.table[bucket][0]
            assert len(sums.reached) <= sums.gamma + given.num_extra_drafts
    assert reported == ran
    by_decision = {s.decision_id for s in told}
    assert len(by_decision) > 60
    assert len({decisions[d][0].policy_version for d in by_decision if d}) > 4
    assert "" in by_decision  # the tables had gaps


@pytest.mark.parametrize("gamma", [-1, 6, 10**6])
def test_a_wrong_decision_is_cut_to_what_is_possible(gamma: int) -> None:
    """Whatever the planner says, the step runs and the answer stays."""
    bench = Bench(planned=True)
    bench.give(PlannerLink(connected=True), decision("wild", gamma, hold_steps=1000))
    bench.give(submit(1, TEXT, max_tokens=60))
    bench.turn(5)
    assert bench.engine.planner.gamma == (0 if gamma < 0 else 5)
    bench.finish()
    assert bench.channel.tokens(1) == answer(bench, params(max_tokens=60))


def test_steps_without_a_resident_draft_hold_no_decision() -> None:
    """While the draft is away a hold does not run down, and its arm is not charged."""
    bench = Bench(planned=True)
    bench.give(PlannerLink(connected=True), AgentLink(connected=True))
    bench.give(decision("a", 3, hold_steps=8), submit(1, TEXT, max_tokens=60))
    bench.turn(3)
    bench.give(TransitionRequest(request_id=1, kind="expand"))
    bench.turn(20)
    assert bench.elastic.residency == "offloaded"
    away = [s for r in bench.channel.of(Reports) for s in r.reports if s.gamma == 0]
    assert sum(s.num_steps for s in away) >= 15
    assert {(s.decision_id, s.num_timed_steps) for s in away} == {("", 0)}
    assert not any(s.context.draft_resident for s in away)
    assert bench.engine.planner.last.held
    mine = [s for r in bench.channel.of(Reports) for s in r.reports if s.decision_id == "a"]
    assert sum(s.num_steps for s in mine) == 2


def test_memory_goes_and_comes_back_while_requests_run() -> None:
    """Expand, grow into the tail, contract by grants, reload: answers and acceptance stay."""
    bench = Bench(num_base_blocks=16, num_extra_blocks=6)
    texts = {n: prompt(random.Random(n), 40) for n in range(4)}
    bench.give(*(submit(n, text, max_tokens=50) for n, text in texts.items()))
    bench.give(AgentLink(connected=True), TransitionRequest(request_id=1, kind="expand"))
    bench.until(lambda: bool(bench.scheduler.blocks.live_tail_blocks()))
    assert bench.channel.of(TransitionDone)[0].residency == "offloaded"
    bench.turn(3)

    def contract() -> bool:
        bench.give(TransitionRequest(request_id=2, kind="contract"))
        seen = len(bench.channel.of(Grant)) + len(bench.channel.of(RequestRefused))
        bench.turn()
        return len(bench.channel.of(Grant)) + len(bench.channel.of(RequestRefused)) > seen and bool(
            bench.channel.of(Grant)
        )

    bench.until(contract)
    answered = 0
    while bench.elastic.residency != "resident":
        for grant in bench.channel.of(Grant)[answered:]:
            moves = dict(zip(grant.source_ids, grant.destination_ids, strict=True))
            bench.target.copy_blocks(moves)
            bench.give(GrantAnswer(grant_id=grant.grant_id, ok=True))
            answered += 1
        bench.turn()
    assert [grant.kind for grant in bench.channel.of(Grant)] == ["copy", "load"]
    bench.give(submit(9, TEXT, max_tokens=40))
    bench.finish()
    for request_id, text in texts.items():
        assert bench.channel.tokens(request_id) == answer(bench, params(max_tokens=50), text)
    assert bench.channel.tokens(9) == answer(bench, params(max_tokens=40))
    usage = bench.channel.end(9).usage
    assert usage.num_accepted_tokens == usage.num_draft_tokens > 0
    bench.turn(5)
    status = bench.channel.of(Status)[-1]
    assert (status.num_expansions, status.num_contractions, status.expanded) == (1, 1, False)


def test_pressure_tells_the_choice_without_exploration() -> None:
    """The agent goes by exploit_gamma, not by the arm that is being tried."""
    bench = Bench(planned=True)
    bench.give(PlannerLink(connected=True), decision("a", 3, table={0: (3, 0)}))
    bench.give(submit(1, TEXT, max_tokens=40))
    bench.finish()
    assert bench.channel.of(Pressure)[-1].exploit_gamma == 0
    assert bench.channel.end(1).usage.num_draft_tokens > 0
    sequences = [pressure.sequence for pressure in bench.channel.of(Pressure)]
    assert sequences == list(range(1, len(sequences) + 1))


def test_the_tail_changes_hands_only_with_nothing_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The draft is dropped, and comes back, between steps: none is on its way then."""
    bench = Bench()
    seen = []

    def look(name: str) -> Callable[[], None]:
        method = getattr(bench.draft, name)

        def call() -> None:
            seen.append(name)
            assert bench.scheduler._num_launched == bench.scheduler._num_retired
            method()

        return call

    for name in ("drop", "restore"):
        monkeypatch.setattr(bench.draft, name, look(name))
    bench.give(submit(1, TEXT, max_tokens=120), AgentLink(connected=True))
    bench.turn(5)
    bench.give(TransitionRequest(request_id=1, kind="expand"))
    bench.turn(3)
    bench.give(TransitionRequest(request_id=2, kind="contract"))
    bench.until(lambda: bool(bench.channel.of(Grant)))
    bench.give(GrantAnswer(grant_id=bench.channel.of(Grant)[0].grant_id, ok=True))
    bench.until(lambda: bench.elastic.residency == "resident")
    bench.finish()
    assert seen == ["drop", "restore"]
    assert bench.channel.tokens(1) == answer(bench, params(max_tokens=120))
    assert bench.channel.end(1).usage.num_draft_tokens > 0
