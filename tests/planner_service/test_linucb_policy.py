"""Policy `linucb` and the ridge regressions that three policies share, against figures by hand."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from planner_service.context import Context, Outcome
from planner_service.own_sums import OwnSums
from planner_service.policies import BUILT_IN
from planner_service.policies.linear import (
    NUM_FEATURES,
    LinearArms,
    Ran,
    factor,
    features,
    features_now,
    forward,
)
from planner_service.policies.policy import Policy
from planner_service.session import Session
from planner_service.sums import NOTHING, Stats, Totals

RNG = random.Random(0)


def made(**parameters: Any) -> Policy:
    """The policy with some parameters."""
    return BUILT_IN["linucb"].build({k: str(v) for k, v in parameters.items()})[0]


def steps(num_steps: int, us: int, emitted: int, rows: int = 1) -> Outcome:
    """Steps of some rows each that took `us` together."""
    return Outcome(num_steps, num_steps, us, emitted, rows * num_steps, emitted)


def test_features_are_scaled_as_said() -> None:
    """64 rows of 1024 tokens: b = 64/128, log b = 6/7, KV = 1024/2048; capped, and safe at 0."""
    assert features(64, 65_536) == pytest.approx((1, 0.5, 0.25, 6 / 7, 0.5))
    assert features_now(Context(0, num_kv_tokens=2**62)) == (1, 1 / 128, 1 / 128**2, 0, 32)


def test_a_stream_follows_the_trace_computed_by_hand() -> None:
    """At batch 1 without KV x = [1, u, u^2, 0, 0] with u = 1/128, so x'x = s = 1.000061.

    With n steps at one context A = I + n xx', so theta'x = (1 + n s r) / (1 + n s) for the mean
    reward r, and x' A^-1 x = s / (1 + n s). Alpha is .5.

    Gamma 0: 9 steps of 10 ms, 9 tokens: r = 1, with .5 sqrt(1 / 10): 1.158
    Gamma 1: 3 steps of 10 ms, 5 tokens: r = 5/3: 6 / 4 + .5 sqrt(1 / 4) = 1.75
    Gamma 2: 24 steps of 10 ms, 40 tokens: r = 5/3: 41 / 25 + .5 sqrt(1 / 25) = 1.74
    With 21 more steps of gamma 1 and 21 tokens: r = 26/24: 27 / 25 + .1 = 1.18, and 2 it is.
    """
    policy, at = made(gamma_max=2, alpha=0.5), Context(1, max_gamma=2)
    stats, session = NOTHING, Session()

    def decide() -> tuple[int, int, bool, float]:
        nonlocal session
        choice, session = policy.select(at, stats, session.after_steps(1, 8), RNG)
        return choice.gamma, choice.exploit_gamma, choice.explored, choice.propensity

    assert decide() == (2, 2, False, 1.0)  # all are equal, and none ran: the largest
    stats = stats.plus(policy.update(stats, at, 0, steps(9, 90_000, 9)))
    stats = stats.plus(policy.update(stats, at, 2, steps(24, 240_000, 40)))
    assert decide() == (2, 1, True, 1.0)  # gamma 1, which never ran, has a bound of 1.5
    stats = stats.plus(policy.update(stats, at, 1, steps(3, 30_000, 5)))
    assert decide() == (1, 2, True, 1.0)  # 1.75 and 1.74; the means are 1.5 and 1.64
    stats = stats.plus(policy.update(stats, at, 1, steps(21, 210_000, 21)))
    assert decide() == (2, 2, False, 1.0)


def test_at_one_context_the_fit_is_the_ratio_of_sums() -> None:
    """10 ms with 1 token and 30 ms with 1 are 2 in 40 ms, 50 a second; the mean would be 66.7."""
    arms, at, stats = LinearArms("p", math.inf, 1e-3), Context(1), NOTHING
    for outcome in (steps(1, 10_000, 1), steps(1, 30_000, 1)):
        ran = Ran.of(at, outcome)
        assert ran is not None
        own = arms.learned(stats, 0, ran, ran.seconds, ran.tokens_per_request)
        stats = stats.plus(Stats(own=own))
    assert arms.ratio(stats, 0) == pytest.approx(50)
    assert arms.predict(stats, features_now(at), 0, 0.0).means[0] == pytest.approx(50, rel=1e-3)


@pytest.mark.parametrize("seed", range(5))
def test_the_solution_is_that_of_the_normal_equations(seed: int) -> None:
    """Plain floats written out give what numpy gives for the same sums."""
    rng = np.random.default_rng(seed)
    arms, stats, ridge = LinearArms("p", math.inf, 0.7), NOTHING, 0.7
    matrix, right, num_steps, weight = np.zeros((5, 5)), np.zeros(5), 0, 0.0
    for _ in range(20):
        rows, num = int(rng.integers(1, 200)), int(rng.integers(1, 9))
        at = Context(rows, num_kv_tokens=rows * int(rng.integers(0, 4000)))
        outcome = steps(num, int(rng.integers(1, 10**5)), int(rng.integers(0, rows * num)), rows)
        ran = Ran.of(at, outcome)
        assert ran is not None
        own = arms.learned(stats, 3, ran, ran.seconds, ran.tokens_per_request)
        stats = stats.plus(Stats(own=own))
        x = np.array(features_now(at))
        matrix += ran.seconds * np.outer(x, x)
        right += ran.tokens_per_request * x
        num_steps, weight = num_steps + num, weight + ran.seconds
    scale = num_steps / weight
    at, prior = Context(77, num_kv_tokens=99_000), 1.3
    matrix = ridge * np.eye(NUM_FEATURES) + scale * matrix
    pulled = scale * right + ridge * prior * np.eye(NUM_FEATURES)[0]
    x = np.array(features_now(at))
    means, variances, known = arms.predict(stats, features_now(at), 4, prior)
    assert means[3] == pytest.approx(x @ np.linalg.solve(matrix, pulled))
    assert variances[3] == pytest.approx(x @ np.linalg.solve(matrix, x))
    assert (means[1], variances[1]) == pytest.approx((prior, x @ x / ridge))  # it never ran
    assert known == [0, 0, 0, num_steps, 0]
    lower = factor(matrix[np.triu_indices(5)].tolist(), 0.0)
    assert forward(lower, x.tolist()) == pytest.approx(
        np.linalg.solve(np.linalg.cholesky(matrix), x)
    )


def test_forgetting_widens_the_bounds_of_an_arm_that_rests() -> None:
    """With a half-life of 100 steps 24 steps count as 12 when 100 more have run, the ridge stays.

    At batch 1: x' A^-1 x = s / (1 + 12 s) = 1 / 13; a prior of 50 and 100 a second: 1250 / 13.
    """
    policy, at = made(half_life=100), Context(1)
    stats = policy.update(NOTHING, at, 1, steps(24, 240_000, 24))
    later = stats._replace(totals=Totals(steps=100))
    arms = LinearArms("linucb", 100.0, 1.0)
    means, variances, known = arms.predict(later, features_now(at), 1, 50.0)
    assert (known[1], variances[1]) == pytest.approx((12, 1 / 13), rel=1e-4)
    assert means[1] == pytest.approx(1250 / 13, rel=1e-4)
    added = policy.update(later, at, 1, steps(24, 240_000, 24))
    sums = later.plus(added).own["linucb/100.0/1"]
    assert (sums.values[-1], sums.at) == (36, 100)


def test_draft_prefill_is_charged_to_speculation_alone() -> None:
    """Gamma 1 has a speed-up of 1.2; 5 ms of prefill a token on 10 make it 1.2 / 1.6 = .75."""
    policy, at = made(gamma_max=1, alpha=0.0, ridge=0.001), Context(1, max_gamma=1)
    stats = policy.update(NOTHING, at, 0, steps(1000, 10_000_000, 1000))
    stats = stats.plus(policy.update(stats, at, 1, steps(1000, 10_000_000, 1200)))
    assert policy.select(at, stats, Session(), RNG)[0].gamma == 1
    charged = stats._replace(totals=Totals(emitted=1000, draft_prefill_us=5_000_000))
    assert policy.select(at, charged, Session(), RNG)[0].gamma == 0


def trained(policy: Policy, truth: Callable[[int, int, int], float]) -> Stats:
    """What a policy knows once each gamma ran at some batch sizes and lengths of context."""
    stats = NOTHING
    for rows in (1, 2, 4, 8, 16, 32, 64, 96, 128):
        for kv in (200, 1000, 3000):
            for gamma in range(4):
                at = Context(rows, num_kv_tokens=rows * kv)
                us = round(1e7 / truth(rows, kv, gamma))
                stats = stats.plus(policy.update(stats, at, gamma, steps(10, us, 10 * rows, rows)))
    return stats


def test_the_features_find_where_speculation_stops_to_pay() -> None:
    """Gains fall by .25 with each factor of 4 in batch size: 3 pays up to 16, nothing at 128."""

    def truth(rows: int, kv: int, gamma: int) -> float:
        gain = 0.6 - 0.125 * math.log2(rows)  # 0 near 28 rows
        return 100 * (1 - 0.03 * math.log2(rows) - kv / 40_000) * (1 + gain * gamma / 3)

    policy = made(gamma_max=3)
    stats = trained(policy, truth)
    for rows, expected in ((1, 3), (6, 3), (12, 3), (100, 0), (128, 0)):
        at = Context(rows, num_kv_tokens=rows * 1000, max_gamma=3)
        assert policy.select(at, stats, Session(), RNG)[0].exploit_gamma == expected


def test_sums_that_are_none_of_ours_count_as_nothing_known() -> None:
    """Not of squares, without weight, of another length: the arm is as if it never ran."""
    good = made().update(NOTHING, Context(3), 2, steps(5, 50_000, 20, rows=3)).own["linucb/inf/2"]
    arms, x = LinearArms("linucb", math.inf, 1.0), features(3, 0)
    for values in (
        good.values[:-1],
        (0.0, *good.values[1:]),
        (*good.values[:5], -1e9, *good.values[6:]),
        (*[1e299 for _ in good.values[:-1]], 1e200),
    ):
        stats = Stats(own={"linucb/inf/2": OwnSums(values)})
        means, variances, known = arms.predict(stats, x, 2, 3.0)
        assert (means[2], known[2]) == (3, 0)
        assert variances[2] == pytest.approx(sum(value * value for value in x))
    assert arms.predict(Stats(own={"linucb/inf/2": good}), x, 2, 0.0).num_steps[2] == 5
