"""Policy `regression`: online ridge regression predicts seconds per token of each gamma; argmin.

Supervised learning of the cost, not a bandit: the features are those of `linucb` (constant, batch
size, its square and logarithm, KV tokens per row), a step weighs with its tokens, so that the fit
at a single context is the ratio of sums; the prior is that of all gammas together. Added are draft
prefill for gamma > 0 and, on the way from gamma 0, the switching cost over gamma, as `nightjar`
does.

Each gamma is first run for a number of steps over all contexts, and never again for the sake of
learning: where its few steps were at other batch sizes than those that follow, the prediction is
an extrapolation, which only running the gamma would put right.
"""

from __future__ import annotations

import random
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
)
from planner_service.policies.linear import RIDGE, LinearArms, Ran, features_now
from planner_service.policies.policy import Choice, Parameter, Policy, PolicySpec, gamma_max
from planner_service.session import Session
from planner_service.sums import Stats


class Regression(Policy):
    """Predicts the loss of each gamma and takes the least."""

    def __init__(
        self, gamma_max: int, hold_steps: int, half_life: float, ridge: float, min_steps: int
    ) -> None:
        self._gamma_max = gamma_max
        self._hold_steps = hold_steps
        self._min_steps = min_steps
        self._arms = LinearArms("regression", half_life, ridge)

    def select(
        self, context: Context, stats: Stats, session: Session, rng: random.Random
    ) -> tuple[Choice, Session]:
        """Hold the arm, or take the one of least predicted loss; nothing is drawn."""
        largest = min(self._gamma_max, context.max_gamma)

        def prepare() -> Prepared:
            prefill_s = stats.draft_prefill_us_per_token * context.bucket / 1e6
            switching_s = 0.0
            if session.previous_gamma == 0:
                switching_s = stats.catch_up_us_per_token * context.sum_stale_tokens / 1e6
            prior, x = self._arms.overall_ratio(stats, largest), features_now(context)
            losses, _, num_steps = self._arms.predict(stats, x, largest, prior)
            for gamma in range(1, largest + 1):
                losses[gamma] += prefill_s + switching_s / gamma

            def draw(feasible: int) -> Drawn:
                return Drawn(*self._next(losses, num_steps, feasible))

            # An arm that lacks steps counts as the best: memory must not be planned without it.
            return self._next(losses, num_steps, largest)[0], draw

        return hold_or_draw(
            context, session, largest=largest, hold_steps=self._hold_steps, prepare=prepare
        )

    def update(self, stats: Stats, context: Context, gamma: int, outcome: Outcome) -> Stats:
        """The common sums, and what the arm's regression of seconds over tokens gains."""
        learned, ran = observe(context, gamma, outcome), Ran.of(context, outcome)
        if ran is None:
            return learned
        own = self._arms.learned(stats, gamma, ran, ran.tokens_per_request, ran.seconds)
        return learned._replace(own=own)

    def _next(
        self, losses: Sequence[float], num_steps: Sequence[float], largest: int
    ) -> tuple[int, bool]:
        """The arm that lacks most steps, of equals the largest; else the one of least loss."""
        if min(num_steps[: largest + 1]) < self._min_steps:
            return min(range(largest, -1, -1), key=num_steps.__getitem__), True
        return min(range(largest + 1), key=losses.__getitem__), False


SPEC = PolicySpec(
    name="regression",
    summary="Ridge regression of seconds per token on batch size and KV; takes the least.",
    parameters=(
        gamma_max(5),
        hold_steps(),
        HALF_LIFE,
        RIDGE,
        Parameter(
            name="min_steps",
            kind="int",
            default=64,
            minimum=1,
            maximum=1_000_000,
            help="steps that each gamma is run for before predictions are followed",
        ),
    ),
    make=lambda values: Regression(
        int(values["gamma_max"]),
        int(values["hold_steps"]),
        half_life_of(values["half_life"]),
        float(values["ridge"]),
        int(values["min_steps"]),
    ),
)
