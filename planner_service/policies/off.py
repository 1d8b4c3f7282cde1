"""Policy `off`: plain decoding, always."""

from __future__ import annotations

import random

from planner_service.context import Context
from planner_service.policies.fixed import constant
from planner_service.policies.policy import Choice, Policy, PolicySpec
from planner_service.session import Session
from planner_service.sums import Stats


class Off(Policy):
    """Gamma 0 for every context."""

    def select(
        self, context: Context, stats: Stats, session: Session, rng: random.Random
    ) -> tuple[Choice, Session]:
        """Choose 0."""
        return constant(0, context)


SPEC = PolicySpec(
    name="off",
    summary="Never speculates: plain decoding.",
    parameters=(),
    make=lambda values: Off(),
)
