"""Policy `regression` against figures computed by hand."""

from __future__ import annotations

import random
from typing import Any

import pytest

from planner_service.context import Context, Outcome
from planner_service.policies import BUILT_IN
from planner_service.policies.linear import LinearArms, features_now
from planner_service.policies.policy import Policy
from planner_service.session import Session
from planner_service.sums import NOTHING, Stats

RNG = random.Random(0)


def made(**parameters: Any) -> Policy:
    """The policy with some parameters."""
    return BUILT_IN["regression"].build({k: str(v) for k, v in parameters.items()})[0]


def steps(num_steps: int, us: int, emitted: int, rows: int = 1) -> Outcome:
    """Steps of some rows each that took `us` together."""
    return Outcome(num_steps, num_steps, us, emitted, rows * num_steps, emitted)


def test_a_stream_follows_the_trace_computed_by_hand() -> None:
    """Arms that lack steps first, the fewest of all and then the largest; then the least loss.

    At batch 1, with n steps whose seconds by tokens are q, the prediction is (p + n q) / (1 + n)
    for those of all arms, p. After 3 steps of 10 ms each with 4, 5 and 3 tokens at gamma 2, 1 and
    0, p = 90 / 12 = 7.5 ms and the predictions are 7.5, 6.375 and 9.375 ms. 16 steps more of gamma
    1, 160 ms and 11 tokens, make q = 190 / 16 = 11.875 and p = 250 / 23 = 10.870 ms, hence 8.342
    at gamma 2, 11.825 at gamma 1 and 10.217 at gamma 0, so 2 it is.
    """
    policy, at = made(gamma_max=2, min_steps=3), Context(1, max_gamma=2)
    stats, session = NOTHING, Session()

    def decide() -> tuple[int, int, bool, float]:
        nonlocal session
        choice, session = policy.select(at, stats, session.after_steps(1, 8), RNG)
        return choice.gamma, choice.exploit_gamma, choice.explored, choice.propensity

    def teach(gamma: int, outcome: Outcome) -> None:
        nonlocal stats
        stats = stats.plus(policy.update(stats, at, gamma, outcome))

    assert decide() == (2, 2, True, 1.0)
    teach(2, steps(2, 20_000, 3))
    assert decide() == (1, 1, True, 1.0)
    teach(1, steps(3, 30_000, 5))
    assert decide() == (0, 0, True, 1.0)
    teach(0, steps(3, 30_000, 3))
    assert decide() == (2, 2, True, 1.0)  # it has 2 of 3
    teach(2, steps(1, 10_000, 1))
    assert decide() == (1, 1, False, 1.0)
    teach(1, steps(16, 160_000, 11))
    assert decide() == (2, 2, False, 1.0)
    arms = LinearArms("regression", float("inf"), 1.0)
    seconds = arms.predict(stats, features_now(at), 2, 0.25 / 23).means
    assert seconds == pytest.approx([0.010217, 0.011825, 0.008342], rel=1e-3)


def known(**tokens: int) -> Stats:
    """A thousand steps of 10 ms for each gamma, with so many tokens."""
    stats = NOTHING
    for gamma, emitted in enumerate(tokens.values()):
        outcome = steps(1000, 10_000_000, emitted)
        stats = stats.plus(made().update(stats, Context(1), gamma, outcome))
    return stats


def test_costs_are_charged_as_nightjar_does() -> None:
    """10, 9 and 8.5 ms; 5 ms of catch-up over gamma, from gamma 0 alone; 2 ms of prefill."""
    policy, stats = made(gamma_max=2), known(zero=1000, one=1111, two=1176)
    at = Context(1, max_gamma=2, sum_stale_tokens=100)
    switching = stats._replace(totals=stats.totals._replace(catch_up_us=5_000, catch_up_tokens=100))
    assert policy.select(at, switching, Session(0), RNG)[0].gamma == 0  # 10, 14 and 11 ms
    assert policy.select(at, switching, Session(1), RNG)[0].gamma == 2
    emitted = stats.totals.emitted
    prefill = stats._replace(totals=stats.totals._replace(draft_prefill_us=2_000 * emitted))
    assert policy.select(at, prefill, Session(1), RNG)[0].gamma == 0  # 10, 11 and 10.5 ms


def test_an_arm_is_forced_among_those_that_can_run() -> None:
    """Gamma 2 lacks steps and cannot run: the best of the others, and 2 is still planned for."""
    policy, stats = made(gamma_max=2), known(zero=1000, one=1111)
    choice, _ = policy.select(Context(1, max_gamma=2, feasible_max_gamma=1), stats, Session(), RNG)
    assert (choice.gamma, choice.exploit_gamma, choice.explored) == (1, 2, False)


def test_with_a_half_life_what_is_forgotten_is_run_again() -> None:
    """100 steps of each count as 50 a half-life later, less than the 64 asked for."""
    policy, at = made(gamma_max=1, half_life=1000), Context(1, max_gamma=1)
    stats = NOTHING
    for gamma, emitted in enumerate((100, 150)):
        stats = stats.plus(policy.update(stats, at, gamma, steps(100, 10**6, emitted)))
    assert policy.select(at, stats, Session(), RNG)[0].explored is False
    later = stats._replace(totals=stats.totals._replace(steps=1200))
    choice, _ = policy.select(at, later, Session(), RNG)
    assert (choice.gamma, choice.explored) == (0, True)  # its clock is the older


def test_context_length_moves_the_choice() -> None:
    """Drafts save 30 % on short contexts and cost 30 % on long ones, at the same batch size."""
    policy, stats = made(gamma_max=1), NOTHING
    for kv, us in ((256, (10_000, 7_000)), (2048, (12_000, 12_100)), (4096, (14_000, 18_200))):
        at = Context(8, num_kv_tokens=8 * kv)
        for gamma in (0, 1):
            learned = policy.update(stats, at, gamma, steps(100, 100 * us[gamma], 800, rows=8))
            stats = stats.plus(learned)
    answers = [
        policy.select(Context(8, num_kv_tokens=8 * kv, max_gamma=1), stats, Session(1), RNG)[
            0
        ].gamma
        for kv in (300, 1000, 3000, 4000)
    ]
    assert answers == [1, 1, 0, 0]
