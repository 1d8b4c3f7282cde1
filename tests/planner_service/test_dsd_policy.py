"""Policy `dsd` against figures computed by hand, and its trap at gamma 0."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner_service.context import Context, Outcome
from planner_service.own_sums import OwnSums
from planner_service.policies import BUILT_IN
from planner_service.policies.dsd import NUM_SUMS, Fit, Line, State, best_gamma, moments
from planner_service.policies.policy import Choice, Policy, check_choice, check_table
from planner_service.session import Session, pack, unpack
from planner_service.sums import NOTHING, Stats
from planner_service.trial import try_out

Cost = Callable[[float, float, int], float]  # rows, KV tokens, gamma -> milliseconds


def made(gamma_max: int = 5) -> Policy:
    """The policy."""
    return BUILT_IN["dsd"].build({"gamma_max": str(gamma_max)})[0]


def linear(rows: float, num_kv_tokens: float, gamma: int) -> float:
    """Target: 8 ms + 0.05 a token + 0.0001 a KV token. Draft: 1 ms + 0.02 a row + 0.00002 a KV."""
    target = 8 + 0.05 * rows * (gamma + 1) + 1e-4 * num_kv_tokens
    return target + gamma * (1 + 0.02 * rows + 2e-5 * num_kv_tokens)


def one_a_token(rows: float, num_kv_tokens: float, gamma: int) -> float:
    """10 ms, and 1 ms for each draft."""
    return 10.0 + gamma


class Stream:
    """One worker with a cost and an acceptance per token, without noise."""

    def __init__(self, policy: Policy, cost: Cost = one_a_token, acceptance: float = 0.7) -> None:
        self.policy, self.cost, self.acceptance = policy, cost, acceptance
        self.stats, self.session = NOTHING, Session()
        self.rng = random.Random(0)

    def decide(self, batch_size: int, num_kv_tokens: int = 0, **fields: Any) -> Choice:
        """Ask."""
        limits = {"max_gamma": 5, "feasible_max_gamma": 5, **fields}
        at = Context(batch_size, num_kv_tokens, **limits)
        choice, self.session = self.policy.select(at, self.stats, self.session, self.rng)
        assert not check_choice(choice, at)
        assert not check_table(choice.table, at.max_gamma)
        return choice

    def run(self, batch_size: int, gamma: int, steps: int, num_kv_tokens: int = 0) -> None:
        """Run steps, and learn from them."""
        rows = batch_size * steps * 1000  # so that whole numbers hold the acceptance
        reached, accepted = [], []
        left = rows
        for _ in range(gamma):
            reached.append(left)
            left = round(left * self.acceptance)
            accepted.append(left)
        us = round(1000 * steps * self.cost(batch_size, num_kv_tokens, gamma))
        timed = batch_size * steps
        outcome = Outcome(
            steps,
            steps,
            us,
            timed,
            timed,
            timed,
            reached=tuple(reached),
            accepted=tuple(accepted),
        )
        at = Context(batch_size, num_kv_tokens)
        self.stats = self.stats.plus(self.policy.update(self.stats, at, gamma, outcome))
        self.session = self.session.after_steps(batch_size, steps)

    def follow(self, batch_size: int, decisions: int, num_kv_tokens: int = 0) -> list[Choice]:
        """Run decisions for their hold."""
        choices = []
        for _ in range(decisions):
            choices.append(self.decide(batch_size, num_kv_tokens))
            self.run(batch_size, choices[-1].gamma, choices[-1].hold_steps, num_kv_tokens)
        return choices

    @property
    def state(self) -> State:
        """The session's."""
        return State(*next(iter(self.session.numbers.values())))  # type: ignore[arg-type]


def line(*ms: float) -> Line:
    """A predicted time, by its values at gamma 0 and 1."""
    return Line([], [], ms[0], ms[1] - ms[0])


def test_a_stream_follows_the_trace_computed_by_hand() -> None:
    """First the arms that tell T, 8 steps each; then the goodput's first peak, for 20 steps.

    At 10 + k ms and acceptance .7, tokens a row and second times 1000:
    k = 0: 1.1 * 1 / 10 = 110; 1: 1.7 / 11 = 154.5; 2: 2.19 / 12 = 182.5; 3: 2.533 / 13 = 194.8;
    4: 2.7731 / 14 = 198.1; 5: 2.9412 / 15 = 196.1.
    """
    stream = Stream(made())
    seen = [(c.gamma, c.hold_steps, c.explored) for c in stream.follow(4, 4)]
    assert seen == [(5, 8, True), (0, 8, True), (4, 20, False), (4, 20, False)]
    assert stream.state.acceptance == pytest.approx(0.7)


def test_acceptance_moves_by_what_steps_that_drafted_show() -> None:
    """20 steps at .5: .85^20 = .03876 of .7 is left: .50775. The 8 steps at gamma 0 move nothing.

    Then, times 1000: k = 0: 110; 1: 1.50775 / 11 = 137.1; 2: 1.76556 / 12 = 147.1;
    3: 1.89647 / 13 = 145.9: the peak is 2.
    """
    stream = Stream(made())
    stream.follow(4, 2)
    stream.acceptance = 0.5
    assert stream.follow(4, 1)[0].gamma == 4
    choice = stream.decide(4)
    assert stream.state.acceptance == pytest.approx(0.507752, abs=1e-6)
    assert choice.gamma == 2


def test_speculation_must_gain_a_tenth() -> None:
    """At acceptance .7, a draft of 5.5 ms gains 1.7 / 15.5 = 109.7 < 110, one of 5.4 110.4."""
    assert best_gamma(0.7, line(10, 15.5), 5) == 0
    assert best_gamma(0.7, line(10, 15.4), 5) == 1


def test_the_scan_stops_at_the_first_gamma_that_is_no_better() -> None:
    """As published: 1 gains 1.99 / 18.2 = 109.3 < 110, and 3.94 / 34.6 = 113.9 at 3 is not seen."""
    assert best_gamma(0.99, line(10, 18.2), 5) == 0
    assert best_gamma(0.99, line(10, 18.0), 5) == 5  # 110.6, and growing from there
    assert best_gamma(1.0, line(10, 10), 8) == 8
    assert best_gamma(0.0, line(10, 10), 8) == 0


def test_the_fit_finds_the_coefficients_that_made_the_times() -> None:
    """Times of batches never seen are predicted to 0.1 %, from moments added in any order."""
    seen = [(b, b * length, k) for b in (1, 8, 30) for length in (100, 700) for k in (0, 1, 4)]
    parts = [moments(*at, linear(*at), 3) for at in seen]
    random.Random(1).shuffle(parts)
    fit = Fit.of(tuple(map(sum, zip(*parts, strict=True))))
    for batch, length, gamma in ((4, 300, 0), (16, 500, 2), (64, 900, 5), (128, 100, 3)):
        predicted = fit.line(batch, batch * length).ms(gamma)
        assert predicted == pytest.approx(linear(batch, batch * length, gamma), rel=1e-3)


def test_leverage_counts_the_steps_that_a_prediction_rests_on() -> None:
    """Where 5 steps ran at gamma 0 and 20 at 4 of one batch, it is 1/5 and 1/20; elsewhere more."""
    parts = [moments(6, 900, gamma, 10, steps) for gamma, steps in ((0, 5), (4, 20))]
    fit = Fit.of(tuple(map(sum, zip(*parts, strict=True))))
    assert fit.line(6, 900).leverages(4) == pytest.approx((1 / 5, 1 / 20), rel=1e-6)
    assert fit.line(6, 900).leverages(2)[1] == pytest.approx(0.25 / 5 + 0.25 / 20, rel=1e-6)
    assert fit.line(7, 900).leverages(4)[0] > 1000


def test_arms_that_tell_the_times_are_run_where_they_are_unknown_and_no_longer() -> None:
    """A second batch size and a longer context are identified; what lies between is predicted."""
    stream = Stream(made(), linear, 0.8)
    explored = [sum(c.explored for c in stream.follow(4, 8, 4 * 200))]
    explored += [sum(c.explored for c in stream.follow(32, 8, 32 * 200))]
    explored += [sum(c.explored for c in stream.follow(4, 8, 4 * 900))]
    assert explored[0] == 2  # at one batch size the largest and 0 tell T over k
    assert all(0 < number <= 4 for number in explored[1:])
    for batch, length in ((16, 230), (10, 250), (24, 205)):
        choices = stream.follow(batch, 3, batch * length)
        assert not any(choice.explored for choice in choices)
        true = Line([], [], linear(batch, batch * length, 0), 0.0)
        slope = linear(batch, batch * length, 1) - true.start_ms
        assert choices[-1].gamma == best_gamma(0.8, true._replace(slope_ms=slope), 5)


def test_gamma_zero_is_a_trap_as_published() -> None:
    """Once at 0 the acceptance stays unknown, however good the draft became; a new stream sees it.

    At acceptance 0.1 plain decoding wins; after 80 steps the draft is perfect, for nothing.
    """
    stream = Stream(made(), acceptance=0.1)
    choices = stream.follow(4, 20)
    assert choices[-1].gamma == 0
    acceptance = stream.state.acceptance
    assert acceptance < 0.2
    stream.acceptance = 1.0
    assert {choice.gamma for choice in stream.follow(4, 500)} == {0}
    assert stream.state.acceptance == acceptance
    stream.session = Session()
    assert [choice.gamma for choice in stream.follow(4, 3)] == [4, 5, 5]


def test_a_decision_is_for_every_batch_and_holds_its_steps() -> None:
    """One bucket for all batch sizes; asked early, it holds on; a cut one is not forgotten."""
    stream = Stream(made())
    stream.follow(4, 2)
    choice = stream.decide(4)
    assert choice.grid is not None
    assert (choice.grid.num_buckets, choice.gamma, choice.hold_steps) == (1, 4, 20)
    stream.run(4, 4, 7)
    choice = stream.decide(200, 200 * 4000)
    assert (choice.gamma, choice.hold_steps) == (4, 13)
    assert stream.decide(4, feasible_max_gamma=1).gamma == 1
    assert stream.decide(4).gamma == 4


def test_where_nothing_is_feasible_the_model_still_says_what_it_would_do() -> None:
    """Gamma 0 is answered, the model's choice beside it; steps teach nothing, and nothing runs."""
    stream = Stream(made())
    choice = stream.decide(4, feasible_max_gamma=0)
    assert (choice.gamma, choice.exploit_gamma, choice.explored) == (0, 5, False)
    stream.follow(4, 2)
    choice = stream.decide(4, feasible_max_gamma=0)
    assert (choice.gamma, choice.exploit_gamma) == (0, 4)
    off = Context(4, feasible_max_gamma=0)
    assert stream.policy.update(NOTHING, off, 0, Outcome(1, 1, 9, 4, 4, 4)) is NOTHING
    assert stream.decide(0).gamma in range(6)


def test_steps_with_prefill_teach_acceptance_and_no_time() -> None:
    """Untimed steps leave the moments at 0."""
    outcome = Outcome(3, 0, 0, 0, 0, 9, 50, reached=(6, 3), accepted=(3, 1))
    learned = made().update(NOTHING, Context(2), 2, outcome)
    assert learned.own["dsd/moments"].values == (0.0,) * (NUM_SUMS - 3) + (9, 4, 3)


def test_sums_that_are_behind_or_not_ours_teach_nothing() -> None:
    """Fewer sums than at the last decision keep the acceptance; wrong shapes count as none."""
    stream = Stream(made())
    stream.follow(4, 3)
    before = stream.state.acceptance
    stream.stats = NOTHING
    assert stream.decide(4).explored  # the fit is gone with its sums
    assert stream.state.acceptance == before
    for values in ((1.0,), (math.nan,) * NUM_SUMS, (-1.0,) * NUM_SUMS, (1e299,) * NUM_SUMS):
        stream = Stream(made())
        stream.stats = Stats(own={"dsd/moments": OwnSums(values)})
        assert stream.decide(4).gamma in range(6)
        assert 0 <= stream.state.acceptance <= 1


def test_another_replica_goes_on_where_the_first_left_off() -> None:
    """Through bytes each decision is as without."""
    here, there = Stream(made(), linear, 0.6), Stream(made(), linear, 0.6)
    for batch_size in (4, 4, 4, 20, 20, 20, 9, 9, 4, 4):
        (choice,) = here.follow(batch_size, 1, batch_size * 300)
        assert there.decide(batch_size, batch_size * 300) == choice
        there.run(batch_size, choice.gamma, choice.hold_steps, batch_size * 300)
        packed = pack(there.session._replace(ran={}), "v", batch_size, choice.hold_steps)
        there.session = unpack(packed, "v")
    assert here.state == there.state


def test_the_policy_passes_the_trial_and_builds_from_its_own_parameters() -> None:
    """Nothing known or much known, every answer of the grid is in range."""
    policy, parameters = BUILT_IN["dsd"].build({})
    assert BUILT_IN["dsd"].build(parameters)[1] == parameters
    stream = Stream(policy, linear)
    stream.follow(4, 5)
    assert not try_out(policy, [NOTHING, stream.stats])


NUMBERS = st.one_of(st.integers(-3, 30), st.floats(-2, 12), st.sampled_from([1e15, -1e15]))


@given(rows=st.dictionaries(st.integers(0, 80), st.lists(NUMBERS, min_size=7, max_size=9)))
def test_hostile_numbers_never_lead_out_of_range(rows: dict[int, list[float]]) -> None:
    """What could not be our own state gives a fresh one; the rest gives an answer in range."""
    packed = pack(Session(0, {key: tuple(numbers) for key, numbers in rows.items()}), "v", 9, 5)
    stream = Stream(made())
    stream.session = unpack(packed, "v")
    for _ in range(3):
        stream.follow(9, 1)
        assert 0 <= stream.state.acceptance <= 1


@given(
    steps=st.lists(
        st.tuples(
            st.integers(1, 200), st.integers(0, 8), st.integers(0, 40), st.integers(0, 10**6)
        ),
        max_size=30,
    ),
    acceptance=st.floats(0, 1),
    gamma_max=st.integers(0, 8),
    scale=st.floats(0.001, 1e4),
)
def test_answers_are_always_feasible(
    steps: list[tuple[int, int, int, int]], acceptance: float, gamma_max: int, scale: float
) -> None:
    """Whatever ran, at whatever cost, each answer is within limits and the state is sane."""
    stream = Stream(made(gamma_max), lambda *at: scale * linear(*at), acceptance)
    for batch_size, feasible, num_steps, num_kv_tokens in steps:
        choice = stream.decide(batch_size, num_kv_tokens, feasible_max_gamma=feasible)
        assert choice.gamma <= gamma_max
        assert 0 <= stream.state.acceptance <= 1
        if num_steps and feasible:
            stream.run(batch_size, choice.gamma, num_steps, num_kv_tokens)
