"""Policy `tetris`: drafts more than is verified, and verifies the likeliest (arXiv 2502.15197).

Every row drafts gamma + e tokens; of all rows' drafts the worker verifies the gamma * rows of
largest cumulative log-probability, which are a prefix of each row's. Gamma is fixed, or is what
`dsd` decides; from a batch of `min_batch_size` rows on there are extra drafts.

Over `dsd` the times are fitted to steps with the extra drafts, whose cost falls to the draft's
share, and the acceptance is that of the drafts that were selected, which is higher than of all.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

from nightjar.buckets import BucketGrid
from planner_service.context import MAX_BATCH_SIZE, MAX_GAMMA, Context, Outcome
from planner_service.policies.dsd import Dsd
from planner_service.policies.fixed import Fixed
from planner_service.policies.policy import Choice, Parameter, ParameterValue, Policy, PolicySpec
from planner_service.session import Session
from planner_service.sums import Stats


class Tetris(Policy):
    """Adds extra drafts to another policy's gamma."""

    def __init__(self, base: Policy, num_extra: int, min_batch_size: int) -> None:
        self._base, self._num_extra, self._min_batch_size = base, num_extra, min_batch_size
        # A decision's extra drafts are for all its buckets, so it answers for its side only.
        self._grid = BucketGrid((min_batch_size,))

    def select(
        self, context: Context, stats: Stats, session: Session, rng: random.Random
    ) -> tuple[Choice, Session]:
        """The base's gamma, with as many extra drafts as the worker can run beyond it."""
        choice, session = self._base.select(context, stats, session, rng)
        num_extra = 0
        if choice.gamma > 0 and context.batch_size >= self._min_batch_size:
            num_extra = min(self._num_extra, context.largest_gamma - choice.gamma)
        choice = choice._replace(table={}, grid=self._grid, num_extra_drafts=num_extra)
        return choice, session

    def update(self, stats: Stats, context: Context, gamma: int, outcome: Outcome) -> Stats:
        """What the base learns."""
        return self._base.update(stats, context, gamma, outcome)


def _make(values: Mapping[str, ParameterValue]) -> Tetris:
    gamma = int(values["gamma"])
    base = Fixed(gamma) if values["base"] == "fixed" else Dsd(gamma, "tetris")
    return Tetris(base, int(values["extra"]), int(values["min_batch_size"]))


SPEC = PolicySpec(
    name="tetris",
    summary="Drafts more tokens than it verifies, and verifies the likeliest of the whole batch.",
    parameters=(
        Parameter(
            name="base",
            kind="choice",
            default="fixed",
            choices=("fixed", "dsd"),
            help="what decides gamma, the verified tokens per row on average",
        ),
        Parameter(
            name="gamma",
            kind="int",
            default=3,
            minimum=0,
            maximum=MAX_GAMMA,
            help="gamma where the base is fixed; the largest where it is dsd",
        ),
        Parameter(
            name="extra",
            kind="int",
            default=1,
            minimum=1,
            maximum=3,
            help="drafts per row beyond gamma",
        ),
        Parameter(
            name="min_batch_size",
            kind="int",
            default=2,
            minimum=1,
            maximum=MAX_BATCH_SIZE,
            help="rows from which on there are extra drafts",
        ),
    ),
    make=_make,
)
