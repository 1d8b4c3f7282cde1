"""Policy `fixed`: the same gamma for every context, as far as the worker can run it."""

from __future__ import annotations

import random
from functools import lru_cache

from planner_service.context import MAX_GAMMA, Context
from planner_service.policies.policy import Choice, Parameter, Policy, PolicySpec
from planner_service.session import Session
from planner_service.sums import Stats

HOLD_STEPS = 64  # a new version is pushed, so the hold only bounds how often a worker asks


class Fixed(Policy):
    """One gamma for every context."""

    def __init__(self, gamma: int) -> None:
        self._gamma = gamma

    def select(
        self, context: Context, stats: Stats, session: Session, rng: random.Random
    ) -> tuple[Choice, Session]:
        """Choose the gamma, cut to what is feasible."""
        return constant(self._gamma, context)


def constant(gamma: int, context: Context) -> tuple[Choice, Session]:
    """The answer of a policy that looks at nothing."""
    wanted = min(gamma, context.max_gamma)
    run = min(wanted, context.feasible_max_gamma)
    table = _table(wanted, context.max_batch_size)
    return Choice(run, wanted, HOLD_STEPS, False, 1.0, table), Session(run)


@lru_cache(maxsize=64)
def _table(gamma: int, max_batch_size: int) -> dict[int, tuple[int, int]]:
    return dict.fromkeys(range(1, max_batch_size + 1), (gamma, gamma))


SPEC = PolicySpec(
    name="fixed",
    summary="Always drafts the same number of tokens.",
    parameters=(
        Parameter(
            name="gamma",
            kind="int",
            default=3,
            minimum=0,
            maximum=MAX_GAMMA,
            help="draft tokens per row and step",
        ),
    ),
    make=lambda values: Fixed(int(values["gamma"])),
)
