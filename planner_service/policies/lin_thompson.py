"""Policy `lin_thompson`: Thompson sampling on linear models (Agrawal and Goyal, arXiv 1209.3352).

    take the largest  theta_i' x,   theta_i ~ N(A_i^-1 b_i, sigma^2 A_i^-1)

Model, reward and forgetting are those of `linucb`. The arms' rewards are independent normals, so
an arm is drawn from the probabilities with which each is the largest, computed beforehand: the
propensity is then exactly the probability of the draw. They come from a quadrature within 0.02 of
the truth.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import cache
from statistics import NormalDist
from typing import Any

import numpy as np

from planner_service.context import MAX_GAMMA
from planner_service.policies.held import (
    HALF_LIFE,
    draw_from,
    half_life_of,
    hold_steps,
    largest_of,
)
from planner_service.policies.linear import RIDGE
from planner_service.policies.linucb import LinearSpeedup
from planner_service.policies.policy import Parameter, PolicySpec, gamma_max

NUM_NODES = 8
# Medians of as many equally likely parts of a normal variable, above them ones for its mean.
_NODES = np.ones((2, NUM_NODES))
_NODES[1] = [NormalDist().inv_cdf((i + 0.5) / NUM_NODES) for i in range(NUM_NODES)]
_ONES = np.ones((MAX_GAMMA + 1) * NUM_NODES)
LOGISTIC = 1.702  # 1 / (1 + exp(-1.702 z)) is the normal distribution function within 0.01
_LEAST = 1e-6  # of a standard deviation: below it the comparison with another is certain
_HOPELESS = 4.0  # deviations of the difference to the best
_FAR = 1e6  # rewards beyond which it does not matter how much


class LinThompson(LinearSpeedup):
    """Draws an arm as often as it is likely to be the best."""

    def __init__(
        self, gamma_max: int, hold_steps: int, half_life: float, ridge: float, sigma: float
    ) -> None:
        super().__init__("lin_thompson", gamma_max, hold_steps, half_life, ridge)
        self._sigma = sigma

    def _draw(
        self, means: Sequence[float], variances: Sequence[float], rng: random.Random
    ) -> tuple[int, float]:
        deviations = [self._sigma * math.sqrt(variance) for variance in variances]
        return draw_from(chances_of_largest(means, deviations), rng)


def chances_of_largest(means: Sequence[float], deviations: Sequence[float]) -> list[float]:
    """Probability of each of some independent normals to be the largest; they add up to 1.

    Those that lie four deviations below the best have none.
    """
    means = [min(max(mean, -_FAR), _FAR) for mean in means]
    deviations = [max(deviation, _LEAST) for deviation in deviations]
    best = largest_of(means)
    room = [_HOPELESS * math.hypot(deviation, deviations[best]) for deviation in deviations]
    near = [i for i, mean in enumerate(means) if means[best] - mean < room[i]]
    chances = [0.0] * len(means)
    for i, chance in zip(
        near, _chances([means[i] for i in near], [deviations[i] for i in near]), strict=True
    ):
        chances[i] = chance
    return chances


def _chances(means: Sequence[float], deviations: Sequence[float]) -> list[float]:
    num_arms = len(means)
    if num_arms == 1:
        return [1.0]
    if num_arms == 2:
        first = 0.5 + 0.5 * math.erf((means[0] - means[1]) / math.hypot(*deviations) / math.sqrt(2))
        return [first, 1 - first]
    slopes = [-LOGISTIC / deviation for deviation in deviations]
    offsets = [-mean * slope for mean, slope in zip(means, slopes, strict=True)]
    nodes = np.array((means, deviations)).T @ _NODES
    # [arm, node of any arm]: 1 over the chance of the arm to lie below the node.
    above = np.array((slopes, offsets)).T @ np.array((nodes.ravel(), _ONES[: nodes.size]))
    np.minimum(above, 700 / num_arms, out=above)  # exp(700) is still a number
    np.exp(above, out=above)
    above += 1.0
    above.put(_own(num_arms), 1.0)
    products = np.multiply.reduce(above).reshape(num_arms, NUM_NODES)
    chances: list[float] = np.add.reduce(1 / products, axis=1).tolist()
    total = sum(chances)
    return [chance / total for chance in chances]


@cache
def _own(num_arms: int) -> Any:
    """Indices at which each arm meets its own nodes."""
    return np.flatnonzero(np.kron(np.eye(num_arms), np.ones(NUM_NODES)))


SPEC = PolicySpec(
    name="lin_thompson",
    summary="Thompson sampling on linear models of the speed-up, from batch size and KV.",
    parameters=(
        gamma_max(5),
        hold_steps(16),
        HALF_LIFE,
        RIDGE,
        Parameter(
            name="sigma",
            kind="float",
            default=0.3,
            minimum=0.0,
            maximum=100.0,
            help="standard deviation of one step's speed-up",
        ),
    ),
    make=lambda values: LinThompson(
        int(values["gamma_max"]),
        int(values["hold_steps"]),
        half_life_of(values["half_life"]),
        float(values["ridge"]),
        float(values["sigma"]),
    ),
)
