"""Policy `epsilon_greedy`: the gamma of least loss, and now and then any other; by batch size.

The textbook bandit (Sutton and Barto, Reinforcement Learning, section 2.2), with the schedule
epsilon * c / (c + n) after n steps at a batch size (Auer, Cesa-Bianchi and Fischer, 2002) as an
option. The loss is `nightjar`'s: seconds per token per request as a ratio of sums, draft prefill
for gamma > 0, and on the way from gamma 0 the switching cost over gamma.
"""

from __future__ import annotations

import random

from planner_service.context import Context
from planner_service.policies.held import (
    Drawn,
    Prepared,
    epsilon_draw,
    hold_or_draw,
    hold_steps,
)
from planner_service.policies.loss import first_or_least, nearest
from planner_service.policies.policy import Choice, Parameter, Policy, PolicySpec, gamma_max
from planner_service.session import Session
from planner_service.sums import Bucket, Stats


class EpsilonGreedy(Policy):
    """Greedy but for a share of its draws."""

    def __init__(
        self,
        gamma_max: int,
        hold_steps: int,
        epsilon: float,
        decay_steps: float,
        charge_switching: bool,
    ) -> None:
        self._gamma_max = gamma_max
        self._hold_steps = hold_steps
        self._epsilon = epsilon
        self._decay_steps = decay_steps
        self._charge_switching = charge_switching

    def select(
        self, context: Context, stats: Stats, session: Session, rng: random.Random
    ) -> tuple[Choice, Session]:
        """Hold the arm, or draw the next one."""
        bucket, largest = context.bucket, min(self._gamma_max, context.max_gamma)

        def prepare() -> Prepared:
            arms = stats.buckets.get(bucket) or nearest(stats.buckets, bucket)
            prefill_s = stats.draft_prefill_us_per_token * bucket / 1e6
            switching_s = 0.0
            if self._charge_switching and session.previous_gamma == 0:
                switching_s = stats.catch_up_us_per_token * context.sum_stale_tokens / 1e6
            exploit = first_or_least(arms, largest, prefill_s, switching_s)

            def draw(feasible: int) -> Drawn:
                best = exploit
                if best > feasible:
                    best = first_or_least(arms, feasible, prefill_s, switching_s)
                return epsilon_draw(best, feasible, self._epsilon_after(arms), rng)

            return exploit, draw

        return hold_or_draw(
            context, session, largest=largest, hold_steps=self._hold_steps, prepare=prepare
        )

    def _epsilon_after(self, arms: Bucket) -> float:
        if not self._decay_steps:
            return self._epsilon
        num_steps = sum([arm.steps for arm in arms.values()])
        return self._epsilon * self._decay_steps / (self._decay_steps + num_steps)


SPEC = PolicySpec(
    name="epsilon_greedy",
    summary="The gamma of least loss per batch size, and now and then any other.",
    parameters=(
        gamma_max(5),
        hold_steps(),
        Parameter(
            name="epsilon",
            kind="float",
            default=0.05,
            minimum=0.0,
            maximum=1.0,
            help="share of draws that explore",
        ),
        Parameter(
            name="decay_steps",
            kind="float",
            default=0.0,
            minimum=0.0,
            maximum=1e9,
            help="steps at a batch size after which epsilon is halved; 0: it stays constant",
        ),
        Parameter(
            name="switching_cost",
            kind="choice",
            default="measured",
            choices=("measured", "none"),
            help="cost of going from gamma 0 to more: measured draft catch-up, or none",
        ),
    ),
    make=lambda values: EpsilonGreedy(
        int(values["gamma_max"]),
        int(values["hold_steps"]),
        float(values["epsilon"]),
        float(values["decay_steps"]),
        values["switching_cost"] == "measured",
    ),
)
