"""A planner process whose policy `remembering` keeps sums of its own, of every kind.

What it keeps depends on the report alone, so that a test knows what must come out:
`num_kv_tokens` of the context is the clock, `num_prefill_tokens` what is kept.
"""

from __future__ import annotations

import random
import sys

from planner_service.context import Context, Outcome
from planner_service.main import main
from planner_service.observation import observe
from planner_service.own_sums import OwnSums
from planner_service.policies.policy import Choice, Policy, PolicySpec
from planner_service.session import Session
from planner_service.sums import Stats

HALF_LIFE = 200.0


class Remembering(Policy):
    """Never speculates; adds what it is told."""

    def select(
        self, context: Context, stats: Stats, session: Session, rng: random.Random
    ) -> tuple[Choice, Session]:
        """Plain decoding."""
        return Choice(0, 0, 1, False, 1.0, {}), session

    def update(self, stats: Stats, context: Context, gamma: int, outcome: Outcome) -> Stats:
        """The common sums, a plain sum, one that forgets, and a value that cannot add."""
        value, clock = float(outcome.num_prefill_tokens), float(context.num_kv_tokens)
        own = {
            "remembering/plain": OwnSums((1.0, value)),
            "remembering/forgets": OwnSums((1.0, value), HALF_LIFE, clock),
        }
        learned = observe(context, gamma, outcome)
        return learned._replace(own=own, latest={"remembering/last": (value, clock)})


if __name__ == "__main__":
    spec = PolicySpec(
        name="remembering",
        summary="Keeps sums of its own, for tests.",
        parameters=(),
        make=lambda values: Remembering(),
        additive=False,
    )
    sys.exit(main(["--policy", "remembering", *sys.argv[1:]], {"remembering": spec}))
