"""The switches of policy `nightjar`, discount and restart, against figures computed by hand."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nightjar.errors import InvalidRequest
from planner_service.context import Context, Outcome
from planner_service.observation import observe
from planner_service.own_sums import OwnSums
from planner_service.policies import BUILT_IN
from planner_service.policies.bins import Bin
from planner_service.policies.policy import Choice, Policy, check_choice, check_table
from planner_service.policies.remembered import CHANCE, MIN_CHANGE, MIN_REPORTS, WINDOWS, Remembered
from planner_service.session import Session, pack, unpack
from planner_service.store import RedisStore, connect
from planner_service.sums import NOTHING, Stats, from_fields
from planner_service.trial import try_out

AT = Context(1, max_gamma=1)


def made(**parameters: Any) -> Policy:
    """The policy with some parameters."""
    return BUILT_IN["nightjar"].build({k: str(v) for k, v in parameters.items()})[0]


def steps(gamma: int, us: int, emitted: int = 1, count: int = 1, rows: int = 1) -> Outcome:
    """The outcome of some steps: microseconds and tokens of all of them."""
    return Outcome(count, count, us, emitted, count * rows, emitted)


def taught(policy: Policy, *ran: tuple[int, Outcome], known: Stats = NOTHING) -> Stats:
    """What is known after these steps at batch size 1."""
    for gamma, outcome in ran:
        known = known.plus(policy.update(known, AT, gamma, outcome))
    return known


def exploit(policy: Policy, stats: Stats, bin_of_1: Bin, at: Context = AT) -> Choice:
    """The choice of a bin that draws .99: it does not explore, unless it must."""

    class Never(random.Random):
        def random(self) -> float:
            return 0.99

    return policy.select(at, stats, Session(1, {1: bin_of_1}), Never(0))[0]


def test_a_discount_forgets_by_the_step() -> None:
    """10 ms, then 20 ms, at a discount of 1/2: (5 + 20) / 1.5 = 16.7 ms a token, not 15."""
    ran = ((0, steps(0, 16_000)), (1, steps(1, 10_000)), (1, steps(1, 20_000)))
    plain, halved = made(gamma_max=1), made(gamma_max=1, discount=0.5)
    assert exploit(plain, taught(plain, *ran), Bin(4, 2)).gamma == 1
    stats = taught(halved, *ran)
    sums = stats.own["nightjar/arm@0.5:1:1"]
    assert (sums.half_life, sums.at) == (1, 2)
    assert sums.values[:3] == (1.5, 25_000, 1.5)
    assert exploit(halved, stats, Bin(4, 2)).gamma == 0
    # The mean of ratios forgets alike.
    assert exploit(made(gamma_max=1, discount=0.5, estimator="mean_of_ratios"), stats, Bin(4, 2))
    assert Remembered(0.5, restart=False).arms(stats, 1)[1].seconds_per_token(
        "mean_of_ratios"
    ) == pytest.approx(25 / 1.5 / 1000)


def test_what_was_known_before_counts_until_an_arm_ran_again() -> None:
    """A version that forgets starts from the plain sums, and replaces them arm by arm."""
    plain, forgetting = made(gamma_max=1), made(gamma_max=1, discount=0.9)
    known = taught(plain, (0, steps(0, 9_000)), (1, steps(1, 5_000)))
    assert exploit(forgetting, known, Bin(4, 2)).gamma == 1
    known = taught(forgetting, (1, steps(1, 30_000)), known=known)
    assert exploit(forgetting, known, Bin(4, 2)).gamma == 0  # 30 ms, not 17.5


def test_by_default_nothing_of_its_own_is_kept() -> None:
    """Without discount and restart, `update` is the common one, to the field."""
    outcome = steps(1, 10_000)
    assert made().update(NOTHING, AT, 1, outcome) == observe(AT, 1, outcome)
    assert made().update(NOTHING, AT, 1, outcome).own == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("discount", text) for text in ("0", "1.01", "nan", "-0.5", "")),
        *(("restart", "maybe"), ("restart", ""), ("switching_cost", "1")),
    ],
)
def test_senseless_switches_are_refused(name: str, value: str) -> None:
    """A discount lies in (0, 1]; the others are words of a list."""
    with pytest.raises(InvalidRequest, match=name):
        BUILT_IN["nightjar"].build({name: value})


def jump(before: int, after: int, at: int = 64, upto: int = 200) -> list[tuple[int, Outcome]]:
    """Steps of gamma 1 that take `before` us more and less 1 ms in turn, then `after` us."""
    costs = [before + (1000 if i % 2 else -1000) for i in range(at)]
    costs += [after + (1000 if i % 2 else -1000) for i in range(at, upto)]
    return [(1, steps(1, us)) for us in costs]


def restarts(policy: Policy, ran: list[tuple[int, Outcome]]) -> tuple[list[int], Stats]:
    """Steps, counted from 0, at which batch size 1 began anew, and what is known at the end."""
    stats, found, since = NOTHING, [], 0.0
    for index, (gamma, outcome) in enumerate(ran):
        stats = taught(policy, (gamma, outcome), known=stats)
        mark = stats.own.get("nightjar/restart@1.0:1")
        if mark is not None and mark.at != since:
            since = mark.at
            found.append(index)
    return found, stats


def test_a_jump_is_found_at_the_step_computed_by_hand() -> None:
    """64 steps of 10 +- 1 ms, then of 20 +- 1 ms: the second of them restarts, the first does not.

    The last 8, weighted by (7 / 9)^age, are worth v = 8 equal steps. With the first step of 19 ms
    n = 65, rho = 10138, s = 1499, their mean x 1959, the bound 1499 * 4.45 * sqrt(1/8 + 1/65) =
    2499; with the second, of 21 ms, rho = 10303, s = 2000, their mean x 3773, the bound 3332.
    """
    assert math.sqrt(2 * math.log(2 / CHANCE)) == pytest.approx(4.45, abs=0.005)
    found, stats = restarts(made(gamma_max=1, restart="test"), jump(10_000, 20_000))
    assert found == [65]
    mark = stats.own["nightjar/restart@1.0:1"]
    assert mark.at == found[0]  # the clock before that step
    assert mark.values[:2] == (1, found[0] + 1)
    kept = Remembered(1, restart=True)
    assert kept.visits(stats, 1) == 200 - found[0] - 1
    arm = kept.arms(stats, 1)[1]
    assert arm.steps == 200 - found[0] - 1
    assert arm.seconds_per_token() == pytest.approx(0.020, abs=2e-5)


def naive(ran: list[tuple[int, Outcome]]) -> int:
    """Index of the first report whose test fails, from lists and the definition; -1 if none."""
    counts = [outcome.num_steps for _, outcome in ran]
    us = [outcome.step_us * outcome.num_timed_rows / outcome.num_steps**2 for _, outcome in ran]
    tokens = [outcome.num_timed_emitted / outcome.num_steps for _, outcome in ran]
    for n in range(MIN_REPORTS, len(ran) + 1):
        rho = sum(us[:n]) / sum(tokens[:n])
        x = [a - rho * b for a, b in zip(us[:n], tokens[:n], strict=True)]
        s = math.sqrt(sum(v * v for v in x) / (n - 1))
        for w in WINDOWS:
            if sum(counts[:n]) < 2 * w:
                continue
            weights = [((w - 1) / (w + 1)) ** sum(counts[i : n - 1]) for i in range(n)]
            mean = sum(a * v for a, v in zip(weights, x, strict=True)) / sum(weights)
            recent = sum(a * k for a, k in zip(weights, counts, strict=False)) / sum(weights)
            shorter = max(1.0, sum(counts[:n]) / n / recent)
            v = 2 * sum(weights) - 1
            bound = s * math.sqrt(shorter * 2 * math.log(2 / CHANCE) * (1 / v + 1 / n))
            if abs(mean) > max(bound, MIN_CHANGE * sum(us[:n]) / n):
                return n - 1
    return -1


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("count", [1, 3])
def test_the_additive_test_is_the_one_of_the_definition(seed: int, count: int) -> None:
    """The first restart is where the definition, over all steps since the first, has it."""
    rng = random.Random(seed)
    rows = rng.choice((1, 4))
    ran = []
    for i in range(90):
        mean_us, k = (9000 if i < 60 else 9000 + 2500 * seed), rng.randint(1, count)
        tokens = sum(1 + (rng.random() < 0.8) for _ in range(rows * k))
        ran.append((1, steps(1, round(rng.gauss(mean_us, 300)) * k, tokens, k, rows)))
    found, _ = restarts(made(gamma_max=1, restart="test"), ran)
    assert found[:1] == [at for at in [naive(ran)] if at >= 0]
    assert found or seed < 4


@pytest.mark.parametrize("rows", [1, 8])
def test_without_a_change_there_is_no_restart(rows: int) -> None:
    """20,000 steps of random lengths and acceptance, in reports of any size: none."""
    rng, policy, at = random.Random(rows), made(restart="test"), Context(rows)
    stats, done = NOTHING, 0
    while done < 20_000:
        count = rng.choice((1, 1, 2, 9))
        tokens = sum(1 + (rng.random() < 0.7) for _ in range(rows * count))
        outcome = Outcome(
            count, count, round(rng.gauss(9000, 900) * count), tokens, count * rows, tokens
        )
        stats = stats.plus(policy.update(stats, at, 1, outcome))
        done += count
    assert not [name for name in stats.own if "restart" in name]


def test_equal_steps_are_no_change() -> None:
    """Where nothing varies, rounding is not taken for a change, and 1 % more is none either."""
    found, _ = restarts(made(gamma_max=1, restart="test"), [(1, steps(1, 9_999, 3))] * 200)
    assert found == []
    barely = [(1, steps(1, 10_000))] * 100 + [(1, steps(1, 10_100))] * 100
    assert restarts(made(gamma_max=1, restart="test"), barely)[0] == []


@pytest.mark.parametrize("discount", [1.0, 0.99])
def test_a_restart_forgets_the_arms_and_begins_at_the_first_block(discount: float) -> None:
    """Unseen arms come first again, the largest before all; other batch sizes stay as they were."""
    policy = made(gamma_max=1, restart="test", discount=discount)
    stats = taught(policy, *[(0, steps(0, 12_000))] * 30, *jump(10_000, 20_000, upto=64))
    other = Context(2, max_gamma=1)
    stats = stats.plus(policy.update(stats, other, 1, steps(1, 8_000, 2, rows=2)))
    at = Bin(7, 3, 2, 1, 0, 0.9)
    held = exploit(policy, stats, at)
    assert (held.gamma, held.hold_steps) == (1, at.length - 2)
    name = f"nightjar/restart@{discount!r}:1"
    stats = taught(policy, *[(1, steps(1, 20_000))] * 2, known=stats)
    session = Session(1, {1: at, 2: at})
    choice, after = policy.select(AT, stats, session, random.Random(1))
    assert (choice.explored, choice.hold_steps) == (True, 1)  # block 1, bin 1
    assert after.numbers[1][:2] == (1, 1)
    assert after.numbers[2] == tuple(at)
    assert choice.table[2] == (1, 0)
    assert choice.exploit_gamma == 1  # unseen, as is 0
    stats = taught(policy, (1, steps(1, 20_000)), known=stats)
    assert exploit(policy, stats, Bin(4, 2, since=stats.own[name].at)).gamma == 0  # unseen
    stats = taught(policy, (0, steps(0, 12_000)), known=stats)
    assert exploit(policy, stats, Bin(4, 2, since=stats.own[name].at)).gamma == 0  # 12 against 20
    arms = Remembered(discount, restart=True).arms(stats, 1)
    assert arms[0].seconds_per_token() == pytest.approx(0.012)
    assert arms[1].seconds_per_token() == pytest.approx(0.020)


def test_a_bin_survives_the_wire_with_its_restart() -> None:
    """Another replica goes on with the bin; one of before a restart gives way."""
    policy = made(gamma_max=1, restart="test")
    _, stats = restarts(policy, jump(10_000, 20_000))
    choice, session = policy.select(AT, stats, Session(), random.Random(3))
    again = unpack(pack(session, "v", 1, choice.hold_steps), "v")
    assert again.numbers == session.numbers
    _, moved = policy.select(AT, stats, again, random.Random(3))
    assert moved.numbers[1][6] == stats.own["nightjar/restart@1.0:1"].at


@given(st.integers(0, 2**32), st.sampled_from([1.0, 0.97]))
@settings(max_examples=20)
def test_what_two_replicas_learned_adds_up_in_any_order(seed: int, discount: float) -> None:
    """Deltas with restarts among them, shuffled and grouped, leave the same arms counting."""
    rng, policy = random.Random(seed), made(gamma_max=1, restart="test", discount=discount)
    stats, deltas = NOTHING, []
    for _, outcome in jump(10_000, 20_000, upto=100) + jump(9_000, 5_000, upto=100):
        delta = policy.update(stats, AT, 1, outcome)
        deltas.append(delta)
        stats = stats.plus(delta)
    rng.shuffle(deltas)
    parts = [NOTHING, NOTHING]
    for delta in deltas:
        side = rng.random() < 0.5
        parts[side] = parts[side].plus(delta)
    merged = parts[0].plus(parts[1])
    merged = from_fields(merged.fields().items())[0]
    kept = Remembered(discount, restart=True)
    assert kept.since(merged, 1) == kept.since(stats, 1) > 0
    assert kept.visits(merged, 1) == kept.visits(stats, 1)
    assert kept.arms(merged, 1)[1] == pytest.approx(kept.arms(stats, 1)[1], rel=1e-6)


async def test_a_restart_survives_the_store(store: str) -> None:
    """Two processes flush what was learned in turns; whoever reads it sees the same arms."""
    policy = made(gamma_max=1, restart="test", discount=0.97)
    stats, halves = NOTHING, [NOTHING, NOTHING]
    for index, (_, outcome) in enumerate(jump(10_000, 20_000)):
        delta = policy.update(stats, AT, 1, outcome)
        stats = stats.plus(delta)
        halves[index % 2] = halves[index % 2].plus(delta)
    for half in reversed(halves):
        client = RedisStore(connect(store), f"process {halves.index(half)}")
        await client.flush("g", 1, 0, half.fields())
        fields, _, _ = await client.read("g")
        await client.close()
    stored, num_unknown = from_fields(fields.items())
    assert num_unknown == 0
    kept = Remembered(0.97, restart=True)
    assert kept.since(stored, 1) == kept.since(stats, 1) > 0
    assert kept.visits(stored, 1) == kept.visits(stats, 1)
    assert kept.arms(stored, 1)[1] == pytest.approx(kept.arms(stats, 1)[1], rel=1e-6)


def test_an_operator_can_activate_every_switch() -> None:
    """The trial grid finds no fault, with nothing known and with a restart behind."""
    policy = made(restart="test", discount=0.97, switching_cost="table")
    stats = taught(policy, *jump(10_000, 20_000))
    assert not try_out(policy, [NOTHING, stats])


def test_of_two_marks_the_later_stays_and_of_equal_clocks_the_mean() -> None:
    """Replicas that find a change at once do not subtract it twice."""
    policy = made(gamma_max=1, restart="test")
    _, stats = restarts(policy, jump(10_000, 20_000))
    name = "nightjar/restart@1.0:1"
    mark = stats.own[name]
    kept = Remembered(1, restart=True)
    twice = stats.plus(Stats(own={name: mark}))
    assert kept.since(twice, 1) == mark.at
    assert kept.arms(twice, 1)[1] == pytest.approx(kept.arms(stats, 1)[1])
    early = stats.plus(Stats(own={name: mark._replace(at=mark.at - 1)}))
    assert early.own[name] == mark


@given(st.data())
@settings(max_examples=60)
def test_senseless_sums_from_the_store_give_no_senseless_answer(data: st.DataObject) -> None:
    """Whatever stands under our names, answers are in range and steps can be learned."""
    numbers = st.floats(-1e12, 1e12) | st.integers(-2, 40)
    policy = made(gamma_max=1, restart="test", discount=0.9)
    stats = taught(policy, *jump(10_000, 10_000, upto=70))
    own = dict(stats.own)
    for name in [*own, "nightjar/restart@0.9:1", "nightjar/restart@1.0:1"]:
        values = tuple(data.draw(st.lists(numbers, min_size=1, max_size=40)))
        half_life = own[name].half_life if name in own else 2.0**-11
        own[name] = OwnSums(values, half_life, data.draw(st.floats(0, 1e6)))
    stats = stats._replace(own=own)
    choice, _ = policy.select(AT, stats, Session(), random.Random(0))
    assert not check_choice(choice, AT)
    assert not check_table(choice.table, 1)
    stats = taught(policy, (1, steps(1, 10_000)), (0, steps(0, 10_000)), known=stats)
    assert not check_choice(policy.select(AT, stats, Session(), random.Random(0))[0], AT)


@given(
    seed=st.integers(0, 2**32),
    ran=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5), st.integers(1, 9)), max_size=40),
    discount=st.sampled_from([1.0, 0.9]),
    switching_cost=st.sampled_from(["measured", "table", "none"]),
)
def test_answers_are_always_feasible(
    seed: int, ran: list[tuple[int, int, int]], discount: float, switching_cost: str
) -> None:
    """With every switch, whatever ran before, each answer is in range."""
    policy = made(restart="test", discount=discount, switching_cost=switching_cost)
    rng, stats, session = random.Random(seed), NOTHING, Session()
    for batch_size, feasible, count in ran:
        stale = rng.randrange(99)
        at = Context(
            batch_size,
            max_stale_tokens=stale,
            sum_stale_tokens=stale * batch_size,
            feasible_max_gamma=feasible,
            max_gamma=5,
        )
        choice, session = policy.select(at, stats, session, rng)
        assert not check_choice(choice, at)
        assert not check_table(choice.table, 5)
        rows = batch_size * count
        outcome = Outcome(
            count,
            count,
            rng.randrange(1, 10**5),
            rows,
            rows,
            rows,
            catch_up_us=rng.randrange(10**4),
            num_catch_up_tokens=stale,
            num_catch_up_steps=int(stale > 0),
        )
        stats = stats.plus(policy.update(stats, at, choice.gamma, outcome))
        session = session.after_steps(at.bucket, count)
