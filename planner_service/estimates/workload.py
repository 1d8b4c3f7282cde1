"""What kind of requests come: their prompts, and rows that may not draft.

A draft that speculates computes every prompt once. What that takes is measured while all rows
draft: what was put off at gamma 0 would count twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from planner_service.context import Context, Outcome
from planner_service.own_sums import OwnSums

HALF_LIFE = 10_000.0  # steps
PRIOR_ROWS = 64.0  # that all draft, before any was seen
NAME = "workload"
NUM_VALUES = 8
DRAFTING_SHARE = 0.8  # of rows, at least, where nothing is caught up
MIN_PROMPT_STEPS = 8.0  # fewer tell nothing of what a draft's prompts take
MAX_PROMPT_SHARE = 0.95  # of steps, from which a rate can be told
_MOST = 1e15


class Workload(NamedTuple):
    """Means over steps, the older ones forgotten."""

    prompt_tokens: float = 0.0  # for each emitted token
    prompt_steps: float = 0.0  # for each emitted token, steps that hold prompt tokens
    drafting_share: float = 1.0  # of rows, at gamma > 0: the others' requests cap it at 0
    draft_prompts_us: float = -1.0  # of the draft, for a step with prompts; -1: not measured


def sums(
    policy: str, clock: float, context: Context, gamma: int, outcome: Outcome
) -> dict[str, OwnSums]:
    """What steps add."""
    steps, prompt = outcome.num_steps, float(outcome.num_prefill_tokens)
    mixed = float(steps - outcome.num_timed_steps)
    drafted = rows = draft_steps = draft_us = 0.0
    if gamma and not outcome.num_catch_up_tokens and outcome.reached:
        drafted, rows = outcome.reached[0], steps * context.batch_size
        if drafted >= DRAFTING_SHARE * rows:
            draft_steps, draft_us = mixed, float(outcome.draft_prefill_us)
    values = (
        prompt,
        float(outcome.num_emitted),
        mixed,
        float(steps),
        float(min(drafted, rows)),
        float(rows),
        draft_steps,
        draft_us,
    )
    return {f"{policy}/{NAME}": OwnSums(values, HALF_LIFE, clock)}


def read(policy: str, own: Mapping[str, OwnSums]) -> Workload:
    """The means; those of nothing where what is stored is not ours."""
    found = own.get(f"{policy}/{NAME}")
    if found is None or len(found.values) != NUM_VALUES or not 0 <= min(found.values) <= _MOST:
        return Workload()
    if max(found.values) > _MOST:
        return Workload()
    prompt, emitted, mixed, steps, drafted, rows, draft_steps, draft_us = found.values
    share = min(mixed / steps, MAX_PROMPT_SHARE) if steps > 0 else 0.0
    return Workload(
        min(prompt / emitted, 1e6) if emitted > 0 else 0.0,
        -math.log1p(-share) * steps / emitted if emitted > 0 else 0.0,
        min((drafted + PRIOR_ROWS) / (rows + PRIOR_ROWS), 1.0),
        draft_us / draft_steps if draft_steps >= MIN_PROMPT_STEPS else -1.0,
    )
