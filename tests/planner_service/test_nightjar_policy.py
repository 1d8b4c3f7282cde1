"""Policy `nightjar` against traces and figures computed by hand."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner_service.context import Context, Outcome
from planner_service.policies import BUILT_IN
from planner_service.policies.bins import MAX_BLOCK, Bin
from planner_service.policies.policy import Choice, Policy, check_choice, check_table
from planner_service.session import Session, pack, unpack
from planner_service.sums import NOTHING, ArmSums, Stats, Totals


class Scripted(random.Random):
    """Draws what the test says, and fails on a draw too many."""

    def __init__(self, chances: Sequence[float] = (), arms: Sequence[int] = ()) -> None:
        super().__init__(0)
        self.chances, self.arms = list(chances), list(arms)

    def random(self) -> float:
        """The next chance."""
        return self.chances.pop(0)

    def randrange(self, *limits: int) -> int:  # type: ignore[override]
        """The next arm."""
        arm = self.arms.pop(0)
        assert arm < limits[0]
        return arm


def made(**parameters: Any) -> Policy:
    """The policy with some parameters."""
    return BUILT_IN["nightjar"].build({k: str(v) for k, v in parameters.items()})[0]


def arm(seconds_per_token: float, steps: int = 10) -> ArmSums:
    """An arm of one row a step and one token a step."""
    us = seconds_per_token * 1e6 * steps
    return ArmSums(steps, us, steps, steps, us, steps)


def one_step(gamma: int, us: int, emitted: int) -> Outcome:
    """The outcome of one step of one row."""
    return Outcome(1, 1, us, emitted, 1, emitted, reached=(1,) * gamma, accepted=(0,) * gamma)


def test_a_stream_follows_the_trace_computed_by_hand() -> None:
    """Blocks of 1, 2, 4, 8 steps, bins of 1, 1, 2, 2, exploration 1/b, the arm held for its bin."""
    policy = made(gamma_max=1)
    at = Context(1, max_gamma=1)
    rng = Scripted(chances=[0.99, 0.99, 0.6, 0.99, 0.4, 0.99, 0.51], arms=[1, 0, 0, 1, 0])
    stats, session = NOTHING, Session()

    def decide(ran: int = 0) -> tuple[int, int, bool, float]:
        nonlocal session
        choice, session = policy.select(at, stats, session.after_steps(1, ran), rng)
        return choice.gamma, choice.hold_steps, choice.explored, choice.propensity

    assert decide() == (1, 1, True, 0.5)  # block 1, bin 1: always explores
    stats = stats.plus(policy.update(stats, at, 1, one_step(1, 10_000, 2)))  # 5 ms a token
    assert decide(1) == (0, 1, True, 0.5)  # block 2, bin 1
    stats = stats.plus(policy.update(stats, at, 0, one_step(0, 6_000, 1)))  # 6 ms a token
    assert decide(1) == (1, 1, False, 0.75)  # bin 2: .6 >= 1/2, exploits: 5 ms
    assert decide(1) == (0, 2, True, 0.5)  # block 3: bins of 2
    assert decide(1) == (0, 1, True, 0.5)  # held: nothing is drawn
    assert decide(1) == (1, 2, True, 0.75)  # bin 2: .4 < 1/2, explores what is best anyway
    assert decide(3) == (0, 2, True, 0.5)  # block 4; the step too many starts no bin
    stats = stats.plus(policy.update(stats, at, 1, one_step(1, 20_000, 1)))  # now 10 ms: 30 / 3
    assert decide(2) == (0, 2, False, 0.75)  # bin 2: exploits: 6 ms
    assert (rng.chances, rng.arms) == ([], [])


@pytest.mark.parametrize("block", range(1, 13))
def test_the_bins_of_a_block_add_up_to_it(block: int) -> None:
    """A block has 2^(j-1) steps in bins of floor(sqrt) of it, the last one cut."""
    lengths, at = [], Bin(block)
    while at.block == block:
        lengths.append(at.length)
        at = at.after(at.length)
    assert sum(lengths) == 2 ** (block - 1)
    assert set(lengths[:-1]) <= {math.isqrt(2 ** (block - 1))}
    assert at == Bin(block + 1)


def test_a_new_stream_starts_in_the_block_that_was_reached() -> None:
    """After 21 steps at a batch size the next one is the 6th of block 5: its 2nd bin of 4."""
    assert Bin.at(0) == Bin(1, 1)
    assert Bin.at(21) == Bin(5, 2)
    at = Bin(1)
    for steps in range(1, 400):
        at = at.after(1)
        seen = Bin.at(steps)
        assert (seen.block, seen.number) == (at.block, at.number)


def exploit(policy: Policy, stats: Stats, session: Session, **fields: Any) -> Choice:
    """The choice of a bin that does not explore."""
    bins = {1: Bin(4, 2)}
    session = Session(session.previous_gamma, bins)
    return policy.select(Context(1, **fields), stats, session, Scripted([0.99]))[0]


def test_switching_is_charged_on_the_way_from_zero_only() -> None:
    """100 stale tokens at 50 us are 5 ms, divided by gamma; coming from gamma > 0 they are free."""
    stats = Stats(
        {1: {0: arm(0.010), 1: arm(0.009), 2: arm(0.0085)}},
        Totals(catch_up_us=5_000, catch_up_tokens=100),
    )
    fields: dict[str, Any] = {"max_gamma": 2, "sum_stale_tokens": 100}
    policy = made(gamma_max=2)
    assert exploit(policy, stats, Session(previous_gamma=0), **fields).gamma == 0  # 11 and 14 ms
    assert exploit(policy, stats, Session(previous_gamma=1), **fields).gamma == 2
    few = {**fields, "sum_stale_tokens": 20}  # 1 ms: 9.0 at gamma 2
    assert exploit(policy, stats, Session(previous_gamma=0), **few).gamma == 2
    free = made(gamma_max=2, switching_cost="none")
    assert exploit(free, stats, Session(previous_gamma=0), **fields).gamma == 2


def test_draft_prefill_is_charged_to_speculation_only() -> None:
    """2 ms of draft prefill per token delivered turn 9 ms into 11, and leave gamma 0 at 10."""
    arms = {1: {0: arm(0.010), 1: arm(0.009)}}
    charged = Stats(arms, Totals(emitted=1000, draft_prefill_us=2_000_000))
    policy, held = made(gamma_max=1), Session(previous_gamma=1)
    assert exploit(policy, Stats(arms), held, max_gamma=1).gamma == 1
    assert exploit(policy, charged, held, max_gamma=1).gamma == 0


def test_an_unseen_gamma_is_forced_once_the_largest_first() -> None:
    """Arms without a step come before any measured one; seen, they compete like the others."""
    policy, held = made(gamma_max=3), Session(previous_gamma=1)
    arms = {0: arm(0.001), 2: arm(0.5)}
    assert exploit(policy, Stats({1: arms}), held).gamma == 3
    assert exploit(policy, Stats({1: {**arms, 3: arm(0.5)}}), held).gamma == 1
    assert exploit(policy, Stats({1: {**arms, 3: arm(0.5), 1: arm(0.5)}}), held).gamma == 0
    assert exploit(policy, Stats({1: arms}), held, feasible_max_gamma=2).gamma == 1


def test_the_mean_of_ratios_is_biased_as_computed() -> None:
    """At batch 1, gamma 3, acceptance .7, E[T/N] E[N]/T is 1.37; the ratio of sums gives 1."""
    chances = {1: 0.3, 2: 0.7 * 0.3, 3: 0.49 * 0.3, 4: 0.343}
    stats, policy = NOTHING, made()
    for emitted, chance in chances.items():
        for _ in range(round(chance * 1000)):
            stats = stats.plus(policy.update(stats, Context(1), 3, one_step(3, 10_000, emitted)))
    sums = stats.buckets[1][3]
    truth = 0.010 / sum(n * p for n, p in chances.items())
    assert sums.seconds_per_token("ratio_of_sums") == pytest.approx(truth)
    assert sums.seconds_per_token("mean_of_ratios") / truth == pytest.approx(1.37, abs=0.005)


def test_the_two_estimators_can_choose_differently() -> None:
    """Where the paper's estimator keeps to gamma 0, the ratio of sums sees that 3 is faster."""
    stats = Stats({1: {0: arm(0.0050), 3: ArmSums(1000, 1e7, 2533, 1000, 1000 * 5411, 1000)}})
    held, fields = Session(previous_gamma=3), {"max_gamma": 3, "feasible_max_gamma": 3}
    stats = Stats({1: {**stats.buckets[1], 1: arm(0.9), 2: arm(0.9)}})
    assert exploit(made(gamma_max=3), stats, held, **fields).gamma == 3
    paper = made(gamma_max=3, estimator="mean_of_ratios")
    assert exploit(paper, stats, held, **fields).gamma == 0


def test_steps_that_cannot_speculate_advance_no_bin_and_teach_nothing() -> None:
    """With feasible gamma 0 the answer is 0, nothing is drawn, and the bins stay as they are.

    What catching up cost is learned from them too: it is when a draft catches up that they occur.
    """
    policy, off = made(), Context(1, feasible_max_gamma=0)
    session = Session(3, {1: Bin(3, 2, 1, 4, 1, 0.5)})
    choice, after = policy.select(off, NOTHING, session, Scripted())
    assert (choice.gamma, choice.explored) == (0, False)
    assert after.numbers == session.numbers
    assert policy.update(NOTHING, off, 0, one_step(0, 1, 1)) is NOTHING
    caught_up = one_step(0, 1, 1)._replace(catch_up_us=900, num_catch_up_tokens=3)
    learned = policy.update(NOTHING, off, 0, caught_up)
    assert (learned.catch_up_us_per_token, learned.totals.steps, learned.buckets) == (300, 0, {})


@given(
    seed=st.integers(0, 2**32),
    gamma_max=st.integers(0, 8),
    steps=st.lists(
        st.tuples(st.integers(0, 20), st.integers(0, 8), st.integers(0, 12), st.booleans()),
        max_size=40,
    ),
    max_gamma=st.integers(0, 8),
    estimator=st.sampled_from(["ratio_of_sums", "mean_of_ratios"]),
)
def test_answers_are_always_feasible(
    seed: int,
    gamma_max: int,
    steps: list[tuple[int, int, int, bool]],
    max_gamma: int,
    estimator: str,
) -> None:
    """Whatever ran before, also through bytes of another replica, each answer is in range."""
    policy, rng = made(gamma_max=gamma_max, estimator=estimator), random.Random(seed)
    stats, session = NOTHING, Session()
    for batch_size, feasible, ran, moved in steps:
        limits: dict[str, Any] = {"max_gamma": max_gamma, "max_batch_size": 16}
        at = Context(batch_size, feasible_max_gamma=feasible, **limits)
        choice, session = policy.select(at, stats, session, rng)
        assert not check_choice(choice, at)
        assert not check_table(choice.table, max_gamma)
        assert choice.gamma <= min(gamma_max, feasible, max_gamma)
        if moved:
            session = unpack(
                pack(session, "1-nightjar", at.bucket, choice.hold_steps), "1-nightjar"
            )
        if batch_size:
            rows = batch_size * (ran + 1)
            outcome = Outcome(ran + 1, ran + 1, 1000 + seed % 99, rows, rows, rows)
            stats = stats.plus(policy.update(stats, at, choice.gamma, outcome))
        session = session.after_steps(at.bucket, ran)


@given(st.lists(st.one_of(st.integers(-5, 50), st.floats(-1, 9)), max_size=8))
def test_hostile_numbers_of_a_bin_are_left_out(numbers: list[float]) -> None:
    """What could not be our own gives a fresh bin, never an error or an answer out of range."""
    policy, at = made(), Context(2, feasible_max_gamma=5, max_gamma=5)
    packed = pack(Session(0, {1: tuple(numbers), 2: tuple(numbers)}), "v", 1, 3)
    choice, _ = policy.select(at, NOTHING, unpack(packed, "v"), random.Random(1))
    assert not check_choice(choice, at)
    assert not check_table(choice.table, at.max_gamma)


def test_the_largest_block_keeps_its_place() -> None:
    """After 2^40 steps the bandit goes on with blocks of the largest size."""
    last = Bin(MAX_BLOCK, math.isqrt(2 ** (MAX_BLOCK - 1)) + 1)
    assert last.after(last.length).block == MAX_BLOCK
    assert Bin.at(2**62).block == MAX_BLOCK


def test_a_batch_size_that_is_never_timed_goes_by_the_nearest() -> None:
    """Steps with prompt tokens alone teach no time: after its first blocks nothing is forced."""
    policy, at = made(gamma_max=2), Context(9, max_gamma=2)
    near = {0: arm(0.01), 1: arm(0.007), 2: arm(0.008)}
    stats = Stats(buckets={4: {0: arm(0.02), 2: arm(0.01)}, 8: near})
    untried = {9: Bin(block=4, number=3)}
    choice, _ = policy.select(at, stats, Session(0, untried), Scripted(chances=[0.99]))
    assert choice.gamma == 2  # never ran: the largest first
    long_run = Session(0, {9: Bin(block=9, number=3)})
    for known, best in ((stats, 1), (NOTHING, 0)):
        choice, _ = policy.select(at, known, long_run, Scripted(chances=[0.99]))
        assert choice.gamma == best
    smaller = at._replace(max_gamma=0)  # of another worker, whose largest gamma is less
    assert policy.select(smaller, stats, long_run, Scripted(chances=[0.99]))[0].exploit_gamma == 0


@pytest.mark.parametrize("seed", range(8))
def test_it_leaves_gamma_0_when_drafts_begin_to_be_accepted(seed: int) -> None:
    """500 steps accept nothing; then all is: each arm ran meanwhile, and drafts win soon."""
    policy, rng = made(gamma_max=2), random.Random(seed)
    at = Context(1, max_gamma=2)
    stats, session = NOTHING, Session()
    step_us = (10_000, 12_000, 16_000)
    friendly_at, ran, runs = 500, 0, [0, 0, 0]
    tried_after = won_after = math.inf
    while ran < 5000 and won_after == math.inf:
        choice, session = policy.select(at, stats, session, rng)
        gamma, steps = choice.gamma, choice.hold_steps
        friendly = ran >= friendly_at
        reached = (steps,) * gamma if friendly else (steps,) * min(gamma, 1) + (0,) * (gamma - 1)
        emitted = steps * (1 + gamma) if friendly else steps
        accepted = reached if friendly else (0,) * gamma
        us = step_us[gamma] * steps
        outcome = Outcome(
            steps, steps, us, emitted, steps, emitted, reached=reached, accepted=accepted
        )
        stats = stats.plus(policy.update(stats, at, gamma, outcome))
        session = session.after_steps(1, steps)
        ran += steps
        if not friendly:
            runs[gamma] += steps
            continue
        if gamma > 0:
            tried_after = min(tried_after, ran - friendly_at)
        if choice.exploit_gamma > 0:
            won_after = ran - friendly_at
    assert min(runs[1:]) > 0
    assert runs[0] > sum(runs[1:])
    assert tried_after <= 600
    assert won_after <= 2000
