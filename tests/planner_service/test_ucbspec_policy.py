"""Policy `ucbspec` against the paper's formula, worked out by hand."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from planner_service.context import Context, Outcome
from planner_service.policies import BUILT_IN
from planner_service.policies.policy import Policy
from planner_service.policies.speedup import Ran, reference
from planner_service.policies.ucbspec import speedups, upper_bounds
from planner_service.session import Session, pack, unpack
from planner_service.sums import NOTHING

RNG = random.Random(0)


def made(**parameters: Any) -> Policy:
    """The policy with some parameters."""
    return BUILT_IN["ucbspec"].build({k: str(v) for k, v in parameters.items()})[0]


def steps(num_steps: int, us: int, emitted: int, rows: int = 1) -> Outcome:
    """Steps of some rows each that took `us` together."""
    return Outcome(num_steps, num_steps, us, emitted, rows * num_steps, emitted)


def test_a_stream_follows_the_trace_computed_by_hand() -> None:
    """Each arm once, the largest first; then the largest of mean plus radius.

    K = 3, L = 2, delta = .5. After 10, 10 and 20 steps with speed-ups 1, 1.2 and .75, t = 40:
        n = 10: sqrt(11/100 (1 + 2 ln(3 * 1600 * sqrt(11) / .5))) = sqrt(.11 * 21.737)  = 1.5463
        n = 20: sqrt(21/400 (1 + 2 ln(3 * 1600 * sqrt(21) / .5))) = sqrt(.0525 * 22.384) = 1.0840
    so the bounds are 2.5463, 2.7463 and 1.8340. With 1000 steps more of gamma 1, t = 1040:
        n = 10:   sqrt(.11 (1 + 2 ln(6 * 1040^2 * sqrt(11))))   = sqrt(.11 * 34.770)
        n = 20:   sqrt(.0525 (1 + 2 ln(6 * 1040^2 * sqrt(21)))) = sqrt(.0525 * 35.416)
        n = 1010: sqrt(1011/1010^2 (1 + 2 ln(6 * 1040^2 * sqrt(1011)))) = sqrt(9.911e-4 * 39.290)
    and the bounds 2.9557, 2.1136 and 1.3973.
    """
    policy, at = made(gamma_max=2, delta=0.5, hold_steps=10), Context(1, max_gamma=2)
    stats, session = NOTHING, Session()

    def decide() -> tuple[int, int, bool, float]:
        nonlocal session
        choice, session = policy.select(at, stats, session.after_steps(1, 10), RNG)
        return choice.gamma, choice.exploit_gamma, choice.explored, choice.propensity

    assert decide() == (2, 2, False, 1.0)
    stats = stats.plus(policy.update(stats, at, 2, steps(20, 400_000, 30)))  # 75 tokens a second
    assert decide() == (1, 1, False, 1.0)
    stats = stats.plus(policy.update(stats, at, 1, steps(10, 100_000, 12)))  # 120
    assert decide() == (0, 0, False, 1.0)
    stats = stats.plus(policy.update(stats, at, 0, steps(10, 100_000, 10)))  # 100
    assert decide() == (1, 1, False, 1.0)
    bounds = upper_bounds([1.0, 1.2, 0.75], [10, 10, 20], 0.5)
    assert bounds == pytest.approx([2.5463, 2.7463, 1.8340], abs=2e-4)
    stats = stats.plus(policy.update(stats, at, 1, steps(1000, 10_000_000, 1200)))
    assert decide() == (0, 1, True, 1.0)
    bounds = upper_bounds([1.0, 1.2, 0.75], [10, 1010, 20], 0.5)
    assert bounds == pytest.approx([2.9557, 1.3973, 2.1136], abs=2e-4)


def test_the_reward_is_a_ratio_of_sums_over_that_of_gamma_0() -> None:
    """1 + 8 tokens in 10 + 20 ms at 4 rows are 75 a request and second; gamma 0 makes 50."""
    policy, stats = made(), NOTHING
    stats = stats.plus(policy.update(stats, Context(1), 0, steps(2, 40_000, 2)))
    at = Context(4)
    for outcome in (steps(1, 10_000, 1, rows=4), steps(1, 20_000, 8, rows=4)):
        stats = stats.plus(policy.update(stats, at, 3, outcome))
    assert stats.own["ucbspec/0"].values == pytest.approx((2, 0.040, 2))
    assert stats.own["ucbspec/3"].values == pytest.approx((2, 0.120, 9))
    arms = [Ran(*stats.own[f"ucbspec/{gamma}"].values) for gamma in (0, 3)]
    assert speedups(arms) == pytest.approx([1.0, 75 / 50])
    assert speedups([Ran(), arms[1]]) == [
        math.inf,
        pytest.approx(1.0),
    ]  # until gamma 0 ran: over that of all
    assert reference([Ran(), Ran()]) == 1.0


def test_the_scale_of_rewards_does_not_matter() -> None:
    """A machine a thousand times as slow is answered alike."""
    answers = []
    for us in (1_000, 1_000_000):
        policy, stats, session = made(gamma_max=2, hold_steps=1), NOTHING, Session()
        gammas = []
        for _ in range(200):
            at = Context(1, max_gamma=2)
            choice, session = policy.select(at, stats, session.after_steps(1, 1), RNG)
            tokens = 10 + 3 * choice.gamma
            learned = policy.update(stats, at, choice.gamma, steps(10, us, tokens))
            stats = stats.plus(learned)
            gammas.append(choice.gamma)
        answers.append(gammas)
    assert answers[0] == answers[1]
    assert answers[0].count(2) > answers[0].count(0)


def test_one_arm_is_held_over_all_batch_sizes() -> None:
    """Of 8 steps held 3 ran at batch 1 and 2 at batch 5: 3 are left, whatever is asked about."""
    policy, stats = made(gamma_max=3), NOTHING
    stats = stats.plus(policy.update(stats, Context(7), 3, steps(1, 10_000, 7, rows=7)))
    first, session = policy.select(Context(1), stats, Session(), RNG)
    assert first.table == {7: (first.gamma, first.exploit_gamma)}
    session = session.after_steps(1, 3).after_steps(5, 2)
    choice, session = policy.select(Context(9), stats, session, RNG)
    assert (choice.gamma, choice.hold_steps) == (first.gamma, 3)
    assert list(session.numbers) == [9]
    again = unpack(pack(session, "v", 9, 2), "v")
    assert policy.select(Context(2), stats, again, RNG)[0].hold_steps == 1


def test_steps_without_a_time_teach_nothing() -> None:
    """Steps that held prompt tokens, and those that could not speculate."""
    policy = made()
    assert not policy.update(NOTHING, Context(1), 2, Outcome(4, num_emitted=6)).own
    off = Context(1, feasible_max_gamma=0)
    assert not policy.update(NOTHING, off, 0, steps(1, 10, 1)).own
