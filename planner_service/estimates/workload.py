"""What kind of requests come: prompt tokens for each emitted one, and rows that may not draft."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from planner_service.context import Context, Outcome
from planner_service.own_sums import OwnSums

HALF_LIFE = 10_000.0  # steps
PRIOR_ROWS = 64.0  # that all draft, before any was seen
NAME = "workload"
_MOST = 1e15


class Workload(NamedTuple):
    """Means over steps, the older ones forgotten."""

    prompt_tokens: float = 0.0  # for each emitted token
    prompt_share: float = 0.0  # of steps: they hold prompt tokens
    drafting_share: float = 1.0  # of rows, at gamma > 0: the others' requests cap it at 0


def sums(
    policy: str, clock: float, context: Context, gamma: int, outcome: Outcome
) -> dict[str, OwnSums]:
    """What steps add."""
    steps = outcome.num_steps
    drafted = rows = 0.0
    if gamma and not outcome.num_catch_up_tokens and outcome.reached:
        drafted, rows = outcome.reached[0], steps * context.batch_size
    values = (
        float(outcome.num_prefill_tokens),
        float(outcome.num_emitted),
        float(steps - outcome.num_timed_steps),
        float(steps),
        float(min(drafted, rows)),
        float(rows),
    )
    return {f"{policy}/{NAME}": OwnSums(values, HALF_LIFE, clock)}


def read(policy: str, own: Mapping[str, OwnSums]) -> Workload:
    """The means; those of nothing where what is stored is not ours."""
    found = own.get(f"{policy}/{NAME}")
    if found is None or len(found.values) != 6 or not 0 <= min(found.values) <= _MOST:
        return Workload()
    if max(found.values) > _MOST:
        return Workload()
    prompt, emitted, untimed, steps, drafted, rows = found.values
    return Workload(
        min(prompt / emitted, 1e6) if emitted > 0 else 0.0,
        min(untimed / steps, 1.0) if steps > 0 else 0.0,
        min((drafted + PRIOR_ROWS) / (rows + PRIOR_ROWS), 1.0),
    )
