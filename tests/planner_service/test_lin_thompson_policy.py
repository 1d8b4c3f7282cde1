"""Policy `lin_thompson`: its probabilities against closed forms and sampling."""

from __future__ import annotations

import random
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest

from planner_service.context import Context, Outcome
from planner_service.policies import BUILT_IN
from planner_service.policies.lin_thompson import chances_of_largest
from planner_service.policies.policy import Policy
from planner_service.session import Session
from planner_service.sums import NOTHING


class Chance(random.Random):
    """Draws one number."""

    def __init__(self, chance: float) -> None:
        super().__init__(0)
        self.chance = chance

    def random(self) -> float:
        """The number."""
        return self.chance


def made(**parameters: Any) -> Policy:
    """The policy with some parameters."""
    return BUILT_IN["lin_thompson"].build({k: str(v) for k, v in parameters.items()})[0]


def steps(num_steps: int, us: int, emitted: int) -> Outcome:
    """Steps of one row that took `us` together."""
    return Outcome(num_steps, num_steps, us, emitted, num_steps, emitted)


def test_a_stream_follows_the_trace_computed_by_hand() -> None:
    """At batch 1 theta'x has mean (1 + n r) / (1 + n) and variance sigma^2 / (1 + n); sigma is .5.

    Gamma 0: 24 steps, r = 1:   mean 1,    deviation .5 / 5 = .1
    Gamma 1: 24 steps, r = 1.1: 27.4 / 25 = 1.096, deviation .1
    P(1 above 0) = Phi(.096 / (.1 sqrt 2)) = Phi(.6788) = .7514.
    With 75 more steps each: means 1 and 109.9 / 100, deviations .05: Phi(1.400) = .9192.
    """
    policy, at = made(gamma_max=1, hold_steps=8, sigma=0.5), Context(1, max_gamma=1)
    stats, session = NOTHING, Session()

    def decide(chance: float) -> tuple[int, int, bool, float]:
        nonlocal session
        choice, session = policy.select(at, stats, session.after_steps(1, 8), Chance(chance))
        return choice.gamma, choice.exploit_gamma, choice.explored, choice.propensity

    def teach(num_steps: int) -> None:
        nonlocal stats
        for gamma, tokens in ((0, 20), (1, 22)):
            ran = Outcome(num_steps, num_steps, 200_000 * num_steps, tokens * num_steps, num_steps)
            stats = stats.plus(policy.update(stats, at, gamma, ran))

    assert decide(0.4) == (0, 1, True, 0.5)  # nothing is known: either
    teach(24)
    assert decide(0.99) == (1, 1, False, pytest.approx(0.7514, abs=2e-4))
    assert decide(0.22) == (0, 1, True, pytest.approx(1 - 0.7514, abs=2e-4))
    teach(75)
    assert decide(0.5) == (1, 1, False, pytest.approx(0.9192, abs=2e-4))


@pytest.mark.parametrize(
    ("means", "deviations"),
    [
        ([1.0, 1.1], [0.1, 0.3]),
        ([1.0, 1.01, 1.02, 0.99, 0.98, 1.0], [0.03, 0.02, 0.05, 0.03, 0.04, 0.2]),
        ([0.0] * 6, [1.0] + [0.01] * 5),
        ([0.0, 0.5, 0.2, 0.1, 0.3, 0.4], [0.3] * 6),
        ([0.0] * 9, [1.0] * 9),
    ],
)
def test_chances_are_those_of_sampling(means: list[float], deviations: list[float]) -> None:
    """The share of draws in which an arm is the largest, within .02 of 10^5 samples."""
    chances = chances_of_largest(means, deviations)
    assert sum(chances) == pytest.approx(1)
    normal = np.random.default_rng(0).normal(means, deviations, size=(100_000, len(means)))
    shares = np.bincount(normal.argmax(axis=1), minlength=len(means)) / 100_000
    assert chances == pytest.approx(shares.tolist(), abs=0.02)


def test_two_arms_have_a_closed_form() -> None:
    """Phi of the difference in its deviations, for means far and near."""
    for gap in (0.0, 0.05, 0.2, 0.5, 3.0):
        expected = NormalDist(gap, 0.2 * 2**0.5).cdf(0)
        assert chances_of_largest([0.0, gap], [0.2, 0.2])[0] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("means", "deviations", "sure"),
    [
        ([0.3], [0.1], 0),
        ([0.0, 1.0, 0.5], [0.0, 0.0, 0.0], 1),
        ([-1e200, 0.0, 5.0], [0.1, 0.1, 0.1], 2),
        ([0.0, 1e-3] + [0.0] * 7, [1e-6] * 9, 1),
    ],
)
def test_certain_comparisons_stay_numbers(
    means: list[float], deviations: list[float], sure: int
) -> None:
    """Without doubt the best arm has all of the probability, and nothing overflows."""
    assert chances_of_largest(means, deviations)[sure] == pytest.approx(1)


def test_the_best_arm_wins_in_time() -> None:
    """Gamma 2 is 20 % faster than the next: after 2000 steps nearly all draws take it."""
    policy, rng = made(gamma_max=3), random.Random(3)
    stats, session, at = NOTHING, Session(), Context(4, max_gamma=3)
    tokens = (32, 40, 48, 30)
    for _ in range(250):
        choice, session = policy.select(at, stats, session, rng)
        emitted = tokens[choice.gamma]
        ran = Outcome(8, 8, 80_000, emitted, 32, emitted)
        stats = stats.plus(policy.update(stats, at, choice.gamma, ran))
        session = session.after_steps(4, 8)
    assert stats.buckets[4][2].steps > 1700
    assert set(stats.buckets[4]) == {0, 1, 2, 3}
