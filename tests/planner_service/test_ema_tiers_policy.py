"""Policy `ema_tiers` against traces computed by hand."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightjar.errors import InvalidRequest
from planner_service.context import Context, Outcome
from planner_service.own_sums import OwnSums
from planner_service.policies import BUILT_IN
from planner_service.policies.ema_tiers import State
from planner_service.policies.policy import Choice, Policy, check_choice, check_table
from planner_service.policies.tiers import DEFAULT_TIERS, Tier, parse
from planner_service.session import Session, pack, unpack
from planner_service.sums import NOTHING, Stats
from planner_service.trial import try_out

RNG = random.Random(0)


def made(**parameters: Any) -> Policy:
    """The policy with some parameters."""
    return BUILT_IN["ema_tiers"].build({k: str(v) for k, v in parameters.items()})[0]


def ran(batch_size: int, gamma: int, steps: int, accepted: float) -> Outcome:
    """Steps in which each row accepted so many drafts on average."""
    rows = batch_size * steps
    reached, taken = [], []
    for position in range(gamma):
        reached.append(
            round(rows * max(0.0, min(1.0, accepted - position + 1))) if position else rows
        )
        taken.append(round(rows * max(0.0, min(1.0, accepted - position))))
    emitted = rows + sum(taken)
    return Outcome(
        steps,
        steps,
        1000 * steps,
        emitted,
        rows,
        emitted,
        reached=tuple(reached),
        accepted=tuple(taken),
    )


class Stream:
    """One worker, which runs each decision for its hold or longer."""

    def __init__(self, policy: Policy, **limits: Any) -> None:
        self.policy, self.limits = policy, limits
        self.stats, self.session = NOTHING, Session()
        self.gamma = 0

    def decide(self, batch_size: int, **fields: Any) -> Choice:
        """Ask."""
        at = Context(batch_size, **{**self.limits, **fields})
        choice, self.session = self.policy.select(at, self.stats, self.session, RNG)
        assert not check_choice(choice, at)
        assert not check_table(choice.table, at.max_gamma)
        self.gamma = choice.gamma
        return choice

    def run(self, batch_size: int, steps: int, accepted: float) -> None:
        """Run steps with the gamma of the last decision."""
        self.learn(batch_size, self.gamma, ran(batch_size, self.gamma, steps, accepted))
        self.session = self.session.after_steps(batch_size, steps)

    def learn(self, batch_size: int, gamma: int, outcome: Outcome) -> None:
        """Learn from steps of any worker."""
        at = Context(batch_size, **self.limits)
        self.stats = self.stats.plus(self.policy.update(self.stats, at, gamma, outcome))

    def average(self, batch_size: int) -> float:
        """The average of the tier that was asked for at this batch size."""
        return self.session.numbers[batch_size][2]


def test_one_row_follows_the_trace_computed_by_hand() -> None:
    """Candidates {1, 3, 5, 7}, hysteresis -0.25; the average moves by 1 - 0.8^5 = 0.67232 each 5.

    It starts at 3 with an average of 2; warm-up are 10 steps, so the first move is after 15.
    """
    stream = Stream(made())
    assert (stream.decide(1).gamma, stream.decide(1).hold_steps) == (3, 5)
    expected = [
        # accepted, average after 5 such steps, gamma then
        (3, 0.32768 * 2 + 0.67232 * 3, 3),  # 2.6723, warm-up
        (3, 2.892626, 3),  # .32768 * 2.67232 + .67232 * 3, warm-up
        (3, 2.964816, 5),  # above 3 - .5, up; not above 5 - .5
        (5, 4.333111, 5),  # neither <= 3 - .5 - .25 nor > 4.5
        (5, 4.781474, 7),  # above 4.5, up
        (0, 1.566793, 3),  # <= 5 - .75, <= 3 - .75, not <= 1 - .75: two down, and no way up
        (1, 1.185727, 3),  # .32768 * 1.566793 + .67232; between .25 and 2.5
        (0, 0.388539, 3),  # above .25: stays
        (0, 0.127316, 1),  # <= .25: the least candidate
        (0, 0.041719, 1),
        (1, 0.685990, 3),  # above 1 - .5: up
    ]
    for accepted, average, gamma in expected:
        stream.run(1, 5, accepted)
        choice = stream.decide(1)
        assert stream.average(1) == pytest.approx(average, abs=1e-6)
        assert (choice.gamma, choice.hold_steps, choice.explored) == (gamma, 5, False)


def test_at_zero_a_tier_stays_for_an_interval_and_then_probes() -> None:
    """Candidates {0, 1, 3}: to 0 at an average of at most 0.5, back after 5 steps, up above 0.5."""
    stream = Stream(made())
    assert stream.decide(8).gamma == 3
    for _ in range(2):
        stream.run(8, 5, 0)
        assert stream.decide(8).gamma == 3  # warm-up
    stream.run(8, 5, 0)
    assert stream.decide(8).gamma == 0  # 2 * .8^15 = .0704: <= .5 twice
    stream.run(8, 5, 0)
    assert stream.decide(8).gamma == 1  # probes, whatever the average
    assert stream.average(8) == pytest.approx(2 * 0.8**15)  # steps at 0 say nothing
    stream.run(8, 5, 0.25)
    assert stream.decide(8).gamma == 0  # .32768 * .0704 + .67232 * .25 = .1911 <= .5
    stream.run(8, 5, 0)
    assert stream.decide(8).gamma == 1
    stream.run(8, 5, 1)
    choice = stream.decide(8)  # .32768 * .1911 + .67232 = .7350 > .5: up, but not above 2.5
    assert choice.gamma == 3
    assert stream.average(8) == pytest.approx(0.734953, abs=1e-6)


def test_a_tier_that_starts_at_zero_probes_with_a_neutral_average() -> None:
    """Without a step that drafted, the average of a probe of 2 is 1, one below."""
    stream = Stream(made(tiers="1:0/2", initial_gamma=0))
    assert stream.decide(4).gamma == 0
    assert stream.average(4) == -1
    stream.run(4, 15, 0)
    assert stream.decide(4).gamma == 2
    assert stream.average(4) == 1


def test_tiers_have_their_own_candidates_state_and_bucket() -> None:
    """One decision tells all tiers; one batch size of a tier moves the others of it alone."""
    stream = Stream(made())
    choice = stream.decide(1)
    assert choice.grid is not None
    assert choice.grid.batch_size_edges == (8, 32, 64)
    # {0, 1} has no 3: its middle candidate is 1. {0} never drafts.
    assert {bucket: row[0] for bucket, row in choice.table.items()} == {0: 3, 1: 3, 2: 1, 3: 0}
    stream.run(9, 8, 0)  # on the table, at gamma 3
    stream.run(30, 8, 0)
    choice = stream.decide(12)
    assert (choice.gamma, choice.table[0][0]) == (3, 3)  # the first decision of the tier counts 16
    assert choice.hold_steps == 4  # to 20 steps
    stream.run(31, 4, 0)
    assert stream.decide(8).gamma == 3  # 2 * .8^4 = .82: above .5
    stream.run(31, 5, 0)
    assert stream.decide(8).gamma == 0  # 2 * .8^9 = .27
    assert stream.decide(64).gamma == 0
    assert stream.decide(4096, max_batch_size=4096).gamma == 0
    choice = stream.decide(2)
    assert [row[0] for row in choice.table.values()] == [3, 0, 1, 0]


def test_steps_past_the_interval_count_in_the_next() -> None:
    """7 steps instead of 5 weigh 1 - 0.8^7, and 3 are left of the next interval."""
    stream = Stream(made(warmup=0))
    stream.decide(1)
    stream.run(1, 7, 3)
    choice = stream.decide(1)
    assert stream.average(1) == pytest.approx(2 + (1 - 0.8**7))  # 2.790
    assert (choice.gamma, choice.hold_steps) == (5, 3)
    assert stream.decide(1).hold_steps == 3  # asking again changes nothing


def test_candidates_are_cut_to_what_the_worker_runs() -> None:
    """With a largest gamma of 5 there is no 7; with 2 the candidates are 1 and 2."""
    stream = Stream(made(warmup=0), max_gamma=5, feasible_max_gamma=5)
    stream.decide(1)
    for _ in range(8):
        stream.run(1, 5, 5)
        assert stream.decide(1).gamma <= 5
    assert stream.gamma == 5
    small = Stream(made(warmup=0), max_gamma=2, feasible_max_gamma=2)
    assert small.decide(1).gamma == 2  # {1, 2}: no 3, so the middle one
    small.run(1, 20, 0)
    assert small.decide(1).gamma == 1


def test_what_is_not_feasible_now_is_no_reason_to_forget() -> None:
    """At feasible 0 nothing runs and nothing moves; at feasible 1 the drafts of 1 are averaged."""
    stream = Stream(made(warmup=0))
    assert stream.decide(1, feasible_max_gamma=0).gamma == 0
    before = stream.session.numbers
    choice = stream.decide(1, feasible_max_gamma=0)
    assert (choice.exploit_gamma, stream.session.numbers) == (3, before)
    off = Context(1, feasible_max_gamma=0)
    assert stream.policy.update(NOTHING, off, 0, ran(1, 0, 1, 0)) is NOTHING
    assert stream.decide(1, feasible_max_gamma=1).gamma == 1
    stream.run(1, 5, 1)
    assert stream.decide(1).gamma == 3
    assert stream.average(1) == pytest.approx(0.32768 * 2 + 0.67232)


def test_other_workers_count_at_the_same_tier_and_gamma_only() -> None:
    """The mean is the profile's: rows of others weigh in, those of another gamma do not."""
    stream = Stream(made(warmup=0))
    stream.decide(1)
    stream.learn(1, 5, ran(1, 5, 500, 0))
    stream.learn(40, 3, ran(40, 3, 500, 0))
    stream.run(1, 5, 3)
    stream.learn(2, 3, ran(2, 3, 5, 0))  # ten rows beside five
    stream.decide(1)
    assert stream.average(1) == pytest.approx(0.32768 * 2 + 0.67232 * 1)


def test_another_replica_goes_on_where_the_first_left_off() -> None:
    """Through bytes each decision is as without, once the steps of its hold ran."""
    here, there = Stream(made()), Stream(made())
    for accepted in (3, 3, 3, 5, 5, 0, 0, 0, 0, 1):
        choice = here.decide(5)
        moved = there.decide(5)
        assert moved == choice
        here.run(5, choice.hold_steps, accepted)
        there.run(5, choice.hold_steps, accepted)
        packed = pack(there.session._replace(ran={}), "v", 5, choice.hold_steps)
        there.session = unpack(packed, "v")
    assert here.average(5) == pytest.approx(there.average(5))


def test_sums_that_are_behind_teach_nothing() -> None:
    """A replica that knows less than the one before keeps the average, and never goes below 0."""
    stream = Stream(made(warmup=0))
    stream.decide(1)
    stream.run(1, 5, 3)
    stream.decide(1)
    average = stream.average(1)
    stream.stats = NOTHING
    stream.session = stream.session.after_steps(1, 5)
    assert stream.decide(1).gamma == 5
    assert stream.average(1) == average
    short = Stats(own={"ema_tiers/1-7": OwnSums((1.0,))})
    choice, _ = made().select(Context(1), short, Session(), RNG)
    assert choice.gamma == 3


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "not of the form"),
        ("8:1/3", "not at batch size 1"),
        ("1:1/3,1:0", "does not start in"),
        ("1:1/3,4097:0", "does not start in"),
        ("1:3/1", "do not ascend"),
        ("1:1/1", "do not ascend"),
        ("1:1/9", "do not ascend within"),
        ("1:", "not of the form"),
        ("1:1/3:nan", "not of the form"),
        ("1:1/3:-99", "not of the form"),
        ("1:1/3,", "not of the form"),
        (",".join(f"{i}:0/1" for i in range(1, 18)), "at most 16 tiers"),
        ("1:0," * 300, "at most 1024 characters"),
    ],
)
def test_bad_tiers_are_refused_naming_the_field(text: str, problem: str) -> None:
    """Form, order and limits are refused in words, with the parameter's name."""
    with pytest.raises(InvalidRequest, match=problem) as refused:
        made(tiers=text)
    assert "parameters.tiers" in str(refused.value)


def test_the_default_tiers_are_those_that_ship() -> None:
    """From 1, 8, 32 and 64 rows on; the first has a hysteresis of its own."""
    assert parse(DEFAULT_TIERS) == (
        Tier(1, (1, 3, 5, 7), -0.25),
        Tier(8, (0, 1, 3), 0),
        Tier(32, (0, 1), 0),
        Tier(64, (0,), 0),
    )
    policy, parameters = BUILT_IN["ema_tiers"].build({})
    assert BUILT_IN["ema_tiers"].build(parameters)[1] == parameters
    assert not try_out(policy, [NOTHING])


NUMBERS = st.one_of(st.integers(-3, 12), st.floats(-2, 12), st.sampled_from([1e15, -1e15]))


@given(rows=st.dictionaries(st.integers(0, 80), st.lists(NUMBERS, min_size=5, max_size=7)))
def test_hostile_numbers_never_lead_out_of_range(rows: dict[int, list[float]]) -> None:
    """What could not be our own state gives a fresh tier; the rest gives an answer in range."""
    packed = pack(Session(0, {key: tuple(numbers) for key, numbers in rows.items()}), "v", 9, 5)
    stream = Stream(made(), max_gamma=5, feasible_max_gamma=5)
    stream.session = unpack(packed, "v")
    for batch_size in (0, 1, 9, 40, 70):
        stream.decide(batch_size)
        stream.run(batch_size, 5, stream.gamma / 2)
    for numbers in stream.session.numbers.values():
        assert State.read(numbers) is not None
        assert all(math.isfinite(number) for number in numbers)


@given(
    steps=st.lists(
        st.tuples(st.integers(0, 90), st.integers(0, 8), st.integers(0, 30), st.floats(0, 8)),
        max_size=40,
    ),
    max_gamma=st.integers(0, 8),
    warmup=st.integers(0, 12),
    moved=st.booleans(),
)
def test_answers_are_always_feasible(
    steps: list[tuple[int, int, int, float]], max_gamma: int, warmup: int, moved: bool
) -> None:
    """Whatever ran, each answer is within limits and one of the tier's candidates."""
    stream = Stream(made(warmup=warmup), max_gamma=max_gamma)
    for batch_size, feasible, num_steps, accepted in steps:
        choice = stream.decide(batch_size, feasible_max_gamma=feasible)
        first = max(f for f in (0, 8, 32, 64) if f <= batch_size)
        candidates = {0: (1, 3, 5, 7), 8: (0, 1, 3), 32: (0, 1), 64: (0,)}[first]
        assert choice.exploit_gamma in {min(c, max_gamma) for c in candidates}
        if moved:
            at = min(batch_size, 256)
            stream.session = unpack(pack(stream.session, "v", at, choice.hold_steps), "v")
        if num_steps and batch_size and feasible:
            stream.run(batch_size, num_steps, min(accepted, stream.gamma))
