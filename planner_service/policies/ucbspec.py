"""Policy `ucbspec`: UCBSpec of BanditSpec (arXiv 2505.15141), one bandit for every context.

Each gamma is tried once, then the largest upper bound is taken. With n_i steps at gamma i, t in
all, K gammas up to L, and a reward that lies in [0, L + 1]:

    mean_i + L/2 sqrt((1 + n_i) / n_i^2 (1 + 2 ln(K t^2 sqrt(1 + n_i) / delta)))

That bound is for tokens a step. The paper's choice among lengths is by throughput, whose scale is
another: here the reward is the speed-up, throughput per request over that of gamma 0, which is 1
at gamma 0 and at most L + 1 if drafts cost nothing. Means are ratios of sums.

Beyond the paper: it starts anew for each prompt or batch, whereas this state is the fleet's; a
gamma is held for some steps, each counted as one play, so the bound is wide for large batches,
whose steps are means over their rows. Costs of draft prefill and of switching are not in the
algorithm and are not charged.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from planner_service.context import MAX_GAMMA, Context, Outcome
from planner_service.observation import observe
from planner_service.own_sums import OwnSums
from planner_service.policies.held import (
    Drawn,
    Prepared,
    hold_or_draw_one,
    hold_steps,
    largest_of,
)
from planner_service.policies.policy import Choice, Parameter, Policy, PolicySpec, gamma_max
from planner_service.policies.speedup import Ran, arms_of, reference
from planner_service.session import Session
from planner_service.sums import Stats

NAMES = tuple(f"ucbspec/{gamma}" for gamma in range(MAX_GAMMA + 1))


class UcbSpec(Policy):
    """Upper confidence bounds on the speed-up."""

    def __init__(self, gamma_max: int, hold_steps: int, delta: float) -> None:
        self._gamma_max = gamma_max
        self._hold_steps = hold_steps
        self._delta = delta

    def select(
        self, context: Context, stats: Stats, session: Session, rng: random.Random
    ) -> tuple[Choice, Session]:
        """Hold the arm, or take the one of the largest bound; nothing is drawn."""
        largest = min(self._gamma_max, context.max_gamma)

        def prepare() -> Prepared:
            arms = arms_of(stats, NAMES[: largest + 1])
            means = speedups(arms)
            exploit = largest_of(means)

            def draw(feasible: int) -> Drawn:
                bounds = upper_bounds(means, [ran.num_steps for ran in arms], self._delta)
                arm = largest_of(bounds[: feasible + 1])
                return Drawn(arm, arm != exploit)

            return exploit, draw

        return hold_or_draw_one(
            context,
            stats.buckets,
            session,
            largest=largest,
            hold_steps=self._hold_steps,
            prepare=prepare,
        )

    def update(self, stats: Stats, context: Context, gamma: int, outcome: Outcome) -> Stats:
        """The common sums, and the arm's steps, request time and tokens."""
        learned, ran = observe(context, gamma, outcome), Ran.of(context, outcome)
        return learned if ran is None else learned._replace(own={NAMES[gamma]: OwnSums(ran)})


def speedups(arms: Sequence[Ran]) -> list[float]:
    """Mean rewards; infinite for an arm that never ran."""
    seconds = reference(arms)
    return [ran.throughput * seconds if ran.num_steps else math.inf for ran in arms]


def upper_bounds(means: Sequence[float], num_steps: Sequence[float], delta: float) -> list[float]:
    """The bounds of the paper; infinite for an arm that never ran."""
    num_arms, total = len(means), sum(num_steps)
    half_range = (num_arms - 1) / 2
    bounds = []
    for mean, n in zip(means, num_steps, strict=True):
        if n > 0:
            log = math.log(num_arms * total**2 * math.sqrt(1 + n) / delta)
            bounds.append(mean + half_range * math.sqrt((1 + n) / n**2 * (1 + 2 * log)))
        else:
            bounds.append(math.inf)
    return bounds


SPEC = PolicySpec(
    name="ucbspec",
    summary="BanditSpec's upper confidence bounds: one bandit over gamma for every context.",
    parameters=(
        gamma_max(4),
        hold_steps(),
        Parameter(
            name="delta",
            kind="float",
            default=0.5,
            minimum=1e-6,
            maximum=1.0,
            help="probability with which the bounds may fail",
        ),
    ),
    make=lambda values: UcbSpec(
        int(values["gamma_max"]), int(values["hold_steps"]), float(values["delta"])
    ),
)
