"""Policy `exp3spec`: EXP3Spec of BanditSpec (arXiv 2505.15141), one bandit for every context.

In round t, gamma i of K gammas up to L is drawn with a probability p_i in proportion to
exp(-eta_t sum of Z_i), eta_t = sqrt(ln K / (t K)), where an arm that ran with reward Y adds
Z_i = (L + 1 - Y) / (L p_i). That is for tokens a step, Y in [1, L + 1]; the reward here is the
speed-up, throughput per request over that of gamma 0, which takes the same range. Its scale is
learnt, so what is kept are the two sums of which Z is made, of 1 / p and of throughput / p.

Beyond the paper: it starts anew for each prompt or batch, whereas this state is the fleet's. A
gamma may be held for some steps: that is one round, to which each of its steps adds a share.
Steps at which some gamma could not run, or whose probability is no longer known, teach this
bandit nothing: an arm that cannot run would never be accused. Costs of draft prefill and of
switching are not in the algorithm and are not charged.
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
    draw_from,
    hold_or_draw_one,
    hold_steps,
    largest_of,
)
from planner_service.policies.policy import Choice, Policy, PolicySpec, gamma_max
from planner_service.policies.speedup import Ran, arms_of, reference
from planner_service.session import Session
from planner_service.sums import Stats

MAX_WEIGHT = 1e6  # of 1 / p: an arm less likely than that is hardly ever drawn
_MOST = 1e100

# The arms are part of the name: workers with other limits draw from other distributions.
NAMES = [
    [f"exp3spec/{largest}/{gamma}" for gamma in range(largest + 1)]
    for largest in range(MAX_GAMMA + 1)
]


class Exp3Spec(Policy):
    """Exponential weights over importance-weighted losses."""

    def __init__(self, gamma_max: int, hold_steps: int) -> None:
        self._gamma_max = gamma_max
        self._hold_steps = hold_steps

    def select(
        self, context: Context, stats: Stats, session: Session, rng: random.Random
    ) -> tuple[Choice, Session]:
        """Hold the arm, or draw the next one."""
        largest = min(self._gamma_max, context.max_gamma)

        def prepare() -> Prepared:
            names, held = NAMES[largest], self._hold_steps
            arms = arms_of(stats, names)
            num_rounds = max(1.0, sum([ran.num_steps for ran in arms]) / held)
            losses = [loss / held for loss in summed_losses(stats, names, reference(arms))]
            exploit = largest_of([-loss for loss in losses])

            def draw(feasible: int) -> Drawn:
                arm, propensity = draw_from(weights(losses, num_rounds, feasible), rng)
                return Drawn(arm, arm != exploit, propensity)

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
        """The common sums; the arm's steps, and its steps and throughput over the propensity."""
        learned, ran = observe(context, gamma, outcome), Ran.of(context, outcome)
        largest = min(self._gamma_max, context.max_gamma)
        whole = gamma <= largest <= context.feasible_max_gamma
        if ran is None or outcome.propensity is None or not whole:
            return learned
        steps = ran.num_steps * min(1 / outcome.propensity, MAX_WEIGHT)
        values = (*ran, steps, steps * ran.throughput)
        return learned._replace(own={NAMES[largest][gamma]: OwnSums(values)})


def summed_losses(stats: Stats, names: Sequence[str], seconds_per_token: float) -> list[float]:
    """Sum over steps of Z of each arm, where a reward is a throughput times `seconds_per_token`."""
    largest, losses = len(names) - 1, []
    for name in names:
        sums = stats.own.get(name)
        loss = 0.0
        if sums is not None and len(sums.values) == 5 and largest:
            plays, throughput = sums.values[3:]
            loss = ((largest + 1) * plays - throughput * seconds_per_token) / largest
        losses.append(loss if abs(loss) < _MOST else 0.0)
    return losses


def weights(losses: Sequence[float], num_rounds: float, feasible: int) -> list[float]:
    """What the arms of [0, feasible] are drawn in proportion to; the largest is 1."""
    num_arms = len(losses)
    rate = math.sqrt(math.log(num_arms) / (num_rounds * num_arms))
    least = min(losses[: feasible + 1])
    return [math.exp(-rate * (loss - least)) for loss in losses[: feasible + 1]]


SPEC = PolicySpec(
    name="exp3spec",
    summary="BanditSpec's exponential weights: one bandit over gamma for every context.",
    parameters=(gamma_max(4), hold_steps(1)),  # a round is a step, as in the paper
    make=lambda values: Exp3Spec(int(values["gamma_max"]), int(values["hold_steps"])),
)
