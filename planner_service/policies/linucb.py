"""Policy `linucb`: disjoint linear models of the speed-up, and upper bounds (arXiv 1003.0146).

    theta = A^-1 b,   take the largest  theta' x + alpha sqrt(x' A^-1 x)
    A = ridge + sum x x',   b = ridge e_0 + sum r x

that is, a prior of 1 everywhere. x holds a constant, batch size, its square and logarithm, and KV
tokens per row; the reward r is the throughput per request over that of gamma 0, so that alpha has
one meaning on any machine. Each step weighs with its time: at a single context the fit is the
ratio of sums. With a half-life A and b forget, the ridge does not: D-LinUCB (Russac, Vernade and
Cappe, 2019) in its simpler form, with one matrix. Draft prefill is charged to gamma > 0; the
switching cost is not, as the algorithm knows of no state. An arm is held for some steps at a
batch size.
"""

from __future__ import annotations

import math
import random
from abc import abstractmethod
from collections.abc import Sequence

from planner_service.context import Context, Outcome
from planner_service.observation import observe
from planner_service.policies.held import (
    HALF_LIFE,
    Drawn,
    Prepared,
    half_life_of,
    hold_or_draw,
    hold_steps,
    largest_of,
)
from planner_service.policies.linear import RIDGE, LinearArms, Ran, features_now
from planner_service.policies.policy import Choice, Parameter, Policy, PolicySpec, gamma_max
from planner_service.session import Session
from planner_service.sums import Stats


class LinearSpeedup(Policy):
    """What the two bandits with linear models share: rewards, and all but the draw."""

    def __init__(
        self, name: str, gamma_max: int, hold_steps: int, half_life: float, ridge: float
    ) -> None:
        self._gamma_max = gamma_max
        self._hold_steps = hold_steps
        self._arms = LinearArms(name, half_life, ridge)

    def select(
        self, context: Context, stats: Stats, session: Session, rng: random.Random
    ) -> tuple[Choice, Session]:
        """Hold the arm, or draw the next one."""
        largest = min(self._gamma_max, context.max_gamma)

        def prepare() -> Prepared:
            arms = self._arms
            rate = arms.ratio(stats, 0) or arms.overall_ratio(stats, largest) or 1.0
            x = features_now(context)
            rates, variances, num_steps = arms.predict(stats, x, largest, rate)
            means = [rate_there / rate for rate_there in rates]
            prefill = stats.draft_prefill_us_per_token * context.bucket / 1e6 * rate
            if prefill:
                for gamma in range(1, largest + 1):
                    means[gamma] /= 1 + max(means[gamma], 0.0) * prefill
            exploit = largest_of(means)
            if 0.0 in num_steps:  # until speculation was tried, nothing says that it is off
                exploit = largest_of([float(n == 0) for n in num_steps])

            def draw(feasible: int) -> Drawn:
                end = feasible + 1
                arm, propensity = self._draw(means[:end], variances[:end], rng)
                return Drawn(arm, arm != exploit, propensity)

            return exploit, draw

        return hold_or_draw(
            context, session, largest=largest, hold_steps=self._hold_steps, prepare=prepare
        )

    def update(self, stats: Stats, context: Context, gamma: int, outcome: Outcome) -> Stats:
        """The common sums, and what the arm's regression of tokens over seconds gains."""
        learned, ran = observe(context, gamma, outcome), Ran.of(context, outcome)
        if ran is None:
            return learned
        own = self._arms.learned(stats, gamma, ran, ran.seconds, ran.tokens_per_request)
        return learned._replace(own=own)

    @abstractmethod
    def _draw(
        self, means: Sequence[float], variances: Sequence[float], rng: random.Random
    ) -> tuple[int, float]:
        """An arm and its probability."""


class LinUcb(LinearSpeedup):
    """Takes the largest upper bound; nothing is drawn."""

    def __init__(
        self, gamma_max: int, hold_steps: int, half_life: float, ridge: float, alpha: float
    ) -> None:
        super().__init__("linucb", gamma_max, hold_steps, half_life, ridge)
        self._alpha = alpha

    def _draw(
        self, means: Sequence[float], variances: Sequence[float], rng: random.Random
    ) -> tuple[int, float]:
        alpha, pairs = self._alpha, zip(means, variances, strict=True)
        return largest_of([mean + alpha * math.sqrt(variance) for mean, variance in pairs]), 1.0


SPEC = PolicySpec(
    name="linucb",
    summary="Upper confidence bounds on linear models of the speed-up, from batch size and KV.",
    parameters=(
        gamma_max(5),
        hold_steps(),
        HALF_LIFE,
        RIDGE,
        Parameter(
            name="alpha",
            kind="float",
            default=1.0,
            minimum=0.0,
            maximum=100.0,
            help="width of the bounds",
        ),
    ),
    make=lambda values: LinUcb(
        int(values["gamma_max"]),
        int(values["hold_steps"]),
        half_life_of(values["half_life"]),
        float(values["ridge"]),
        float(values["alpha"]),
    ),
)
