"""Policy `exp3spec` against the paper's formulas, worked out by hand."""

from __future__ import annotations

import random
from typing import Any

import pytest

from planner_service.context import Context, Outcome
from planner_service.policies import BUILT_IN
from planner_service.policies.exp3spec import MAX_WEIGHT, summed_losses, weights
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
    return BUILT_IN["exp3spec"].build({k: str(v) for k, v in parameters.items()})[0]


def one_step(us: int, emitted: int, propensity: float | None) -> Outcome:
    """One step of one row."""
    return Outcome(1, 1, us, emitted, 1, emitted, propensity=propensity)


def test_a_stream_follows_the_trace_computed_by_hand() -> None:
    """K = 2, L = 1: uniform at first; then by exp(-eta Z), Z = (2 - Y) / p.

    Gamma 0 ran a step of 10 ms with a token, drawn with 1/2: Y = 1, Z_0 = (2 - 1) / .5 = 2.
    t = 1, eta = sqrt(ln 2 / 2) = .5887: p_0 = 1 / (1 + exp(2 eta)) = .2355, p_1 = .7645.
    Gamma 1 ran a step of 10 ms with 1.6 tokens (16 in ten), drawn with .7645: Y = 1.6,
    Z_1 = .4 / .7645 = .5232 for each of ten steps: 5.232. t = 11, eta = sqrt(ln 2 / 22) = .1775:
    p_0 = 1 / (1 + exp(eta (2 - 5.232))) = .6397.
    """
    policy, at = made(gamma_max=1, hold_steps=1), Context(1, max_gamma=1)
    stats, session = NOTHING, Session()

    def decide(chance: float) -> tuple[int, int, bool, float]:
        nonlocal session
        choice, session = policy.select(at, stats, session.after_steps(1, 1), Chance(chance))
        return choice.gamma, choice.exploit_gamma, choice.explored, choice.propensity

    assert decide(0.49) == (0, 1, True, 0.5)
    stats = stats.plus(policy.update(stats, at, 0, one_step(10_000, 1, 0.5)))
    assert decide(0.24) == (1, 1, False, pytest.approx(0.7645, abs=1e-4))
    ten = Outcome(10, 10, 100_000, 16, 10, 16, propensity=0.7645)
    stats = stats.plus(policy.update(stats, at, 1, ten))
    assert summed_losses(stats, ("exp3spec/1/0", "exp3spec/1/1"), 0.01) == pytest.approx(
        [2.0, 5.232], abs=1e-3
    )
    assert decide(0.63) == (0, 0, False, pytest.approx(0.6397, abs=1e-4))
    assert decide(0.65) == (1, 0, True, pytest.approx(1 - 0.6397, abs=1e-4))


def test_a_hold_is_one_round() -> None:
    """Ten steps held are one round of their mean loss: t = 1, Z_0 = 2, as for a single step."""
    at, chances = Context(1, max_gamma=1), []
    for hold_steps in (1, 10):
        policy = made(gamma_max=1, hold_steps=hold_steps)
        ran = Outcome(
            hold_steps, hold_steps, 10_000 * hold_steps, hold_steps, hold_steps, hold_steps
        )
        stats = policy.update(NOTHING, at, 0, ran._replace(propensity=0.5))
        chances.append(policy.select(at, stats, Session(), Chance(0.9))[0].propensity)
    assert chances == pytest.approx([0.7645, 0.7645], abs=1e-4)


def test_an_arm_that_cannot_run_is_not_drawn() -> None:
    """Weights 1, 1/2, 1/4 cut to the first two give 2/3 and 1/3; the others keep their sums."""
    drawn = weights([0.0, 1.0, 2.0], 1.0, 1)
    assert len(drawn) == 2
    assert drawn[0] == 1
    policy, at = made(gamma_max=2), Context(1, max_gamma=2, feasible_max_gamma=1)
    choice, _ = policy.select(at, NOTHING, Session(), Chance(0.6))
    assert (choice.gamma, choice.propensity) == (1, 0.5)


@pytest.mark.parametrize(
    ("context", "gamma", "outcome"),
    [
        (Context(1), 1, one_step(10, 1, None)),  # its propensity is no longer known
        (Context(1, feasible_max_gamma=3), 1, one_step(10, 1, 0.5)),  # gamma 4 could not run
        (Context(1), 5, one_step(10, 1, 0.5)),  # none of the arms
        (Context(1, feasible_max_gamma=0), 0, one_step(10, 1, 0.5)),
        (Context(1), 1, Outcome(1, num_emitted=1, propensity=0.5)),  # not timed
    ],
)
def test_what_would_bias_the_losses_does_not_teach(
    context: Context, gamma: int, outcome: Outcome
) -> None:
    """The common sums may learn from it, this bandit does not."""
    assert not made().update(NOTHING, context, gamma, outcome).own


def test_an_importance_weight_is_bounded() -> None:
    """A step drawn with 1e-30 counts a million times, and its sums stay finite."""
    own = made().update(NOTHING, Context(1), 4, one_step(10_000, 1, 1e-30)).own
    values = own["exp3spec/4/4"].values
    assert values[3:] == pytest.approx((MAX_WEIGHT, 100 * MAX_WEIGHT))


def test_workers_with_fewer_arms_keep_sums_of_their_own() -> None:
    """A worker that runs gamma 2 at most draws from another distribution than one that runs 4."""
    few = made().update(
        NOTHING, Context(1, max_gamma=2, feasible_max_gamma=2), 1, one_step(9, 1, 1)
    )
    assert list(few.own) == ["exp3spec/2/1"]


def test_losses_go_to_the_slower_arms() -> None:
    """Gamma 2 is the fastest by half: after 3000 steps it is drawn most of the time."""
    policy, rng = made(gamma_max=2, hold_steps=4), random.Random(5)
    stats, session, at = NOTHING, Session(), Context(1, max_gamma=2, feasible_max_gamma=2)
    for _ in range(750):
        choice, session = policy.select(at, stats, session, rng)
        tokens = 4 + 2 * choice.gamma
        ran = Outcome(4, 4, 40_000, tokens, 4, tokens, propensity=choice.propensity)
        stats = stats.plus(policy.update(stats, at, choice.gamma, ran))
        session = session.after_steps(1, 4)
    choice, _ = policy.select(at, stats, session, Chance(0.5))
    assert choice.exploit_gamma == 2
    shares = [stats.buckets[1][gamma].steps / 3000 for gamma in range(3)]
    assert shares[2] > 0.5 > shares[1] > shares[0]
