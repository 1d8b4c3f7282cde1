"""Policy `patience`: drafts one token more while the last one is accepted often, else one less.

An example of a plug-in: it keeps a sum of its own, and remembers the gamma of each batch size.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

from planner_service.context import MAX_GAMMA, Context, Outcome
from planner_service.observation import observe
from planner_service.own_sums import OwnSums
from planner_service.policies.policy import Choice, Parameter, ParameterValue, Policy, PolicySpec
from planner_service.session import Session
from planner_service.sums import Stats

HALF_LIFE = 500.0  # steps after which a step counts half
MIN_REACHED = 20.0  # rows, before an acceptance is believed


class Patience(Policy):
    """Follows the acceptance of the last draft position of each gamma."""

    def __init__(self, values: Mapping[str, ParameterValue]) -> None:
        self._start = int(values["start"])
        self._target = float(values["target"])

    def select(
        self, context: Context, stats: Stats, session: Session, rng: random.Random
    ) -> tuple[Choice, Session]:
        """Move by one from the gamma that this batch size had."""
        bucket = context.bucket
        kept = session.numbers.get(bucket, ())
        # A session that came back from outside may hold anything.
        gamma = round(kept[0]) if len(kept) == 1 else self._start
        gamma = min(max(1, gamma), context.max_gamma)
        sums = stats.own.get(_name(gamma))
        if sums is not None and sums.values[0] >= MIN_REACHED:
            wanted = sums.values[1] / sums.values[0] >= self._target
            gamma = min(max(1, gamma + (1 if wanted else -1)), context.max_gamma)
        run = min(gamma, context.feasible_max_gamma)
        numbers = {**session.numbers, bucket: (float(gamma),)}
        return Choice(run, gamma, 16, False, 1.0, {bucket: (run, gamma)}), Session(run, numbers)

    def update(self, stats: Stats, context: Context, gamma: int, outcome: Outcome) -> Stats:
        """Count how often the last position was reached and accepted, forgetting slowly."""
        added = observe(context, gamma, outcome)
        if not 1 <= gamma <= len(outcome.reached):
            return added
        counts = (float(outcome.reached[gamma - 1]), float(outcome.accepted[gamma - 1]))
        sums = OwnSums(counts, HALF_LIFE, stats.totals.steps)
        return added._replace(own={**added.own, _name(gamma): sums})


def _name(gamma: int) -> str:
    return f"patience/last:{gamma}"


SPEC = PolicySpec(
    name="patience",
    summary="One more draft token while the last one is accepted often enough.",
    parameters=(
        Parameter(
            name="start",
            kind="int",
            default=2,
            minimum=1,
            maximum=MAX_GAMMA,
            help="gamma to begin with",
        ),
        Parameter(
            name="target",
            kind="float",
            default=0.6,
            minimum=0,
            maximum=1,
            help="acceptance of the last position that earns one more",
        ),
    ),
    make=Patience,
)
