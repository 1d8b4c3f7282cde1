"""What it costs to speculate again after gamma 0, learned from the catch-ups that workers report.

Kept in two forms, both additive: a linear model of a catch-up step, as the sums of its normal
equations, and the paper's table C(L, B) of arXiv 2512.22420, measured here instead of offline.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

from planner_service.context import MAX_BATCH_SIZE, Context, Outcome
from planner_service.own_sums import OwnSums
from planner_service.sums import Stats

COST = "switching/cost"
NUM_LENGTHS = 18  # of the table, by powers of two: up to 131072 stale tokens a row and beyond
NUM_BATCHES = MAX_BATCH_SIZE.bit_length()
_ROWS = tuple(f"switching/table:{batch}" for batch in range(NUM_BATCHES))
_NOTHING: Mapping[str, OwnSums] = MappingProxyType({})
_MIN_STEPS = 8  # fewer do not carry a fit of three numbers
_SINGULAR = 1e-6  # share of a variance that its regressors must leave unexplained


class StepCost(NamedTuple):
    """Microseconds of one catch-up step: fixed + per_token * tokens + per_row * rows."""

    fixed: float
    per_token: float
    per_row: float
    mean_rows: float  # of the steps it was learned from


def learned(context: Context, outcome: Outcome) -> Mapping[str, OwnSums]:
    """What the catch-up in a report adds to `Stats.own`; nothing without any."""
    steps, tokens = outcome.num_catch_up_steps, outcome.num_catch_up_tokens
    if steps <= 0 or tokens <= 0:
        return _NOTHING
    us, rows, mean = outcome.catch_up_us, max(1, context.batch_size), tokens / steps
    # Equations of the mean step, counted once a step: a report's steps are not told apart.
    equations = (
        *(steps, tokens, steps * rows),
        *(tokens * mean, tokens * rows, steps * rows * rows),
        *(us, us * mean, us * rows),
    )
    # The report's context is that of its last step, when the draft has mostly caught up: so L
    # is the mean a row of what was caught up, not the context's own maximum.
    cells = [0.0] * (2 * _length_bucket(mean / rows) + 2)
    cells[-2:] = us, steps
    return {COST: OwnSums(equations), _ROWS[_batch_bucket(rows)]: OwnSums(tuple(cells))}


def predict_us(stats: Stats, stale_tokens: float, batch: int) -> float:
    """Microseconds of catch-up before a batch can speculate; 0 until any was measured.

    Counts one catch-up step; of a worker that needs several, all tokens but one step's fixed
    cost. Where the steps seen allow no fit, or it has a negative part, it is the mean cost of a
    token, `Stats.catch_up_us_per_token`.

    Args:
        stats: What was learned.
        stale_tokens: Tokens that the draft's cache lacks, summed over the rows. A token for each
            row costs nothing: the first draft takes it along.
        batch: Decode rows.
    """
    if stale_tokens <= batch:
        return 0.0
    cost = step_cost(stats)
    if cost is None:
        return stats.catch_up_us_per_token * stale_tokens
    return cost.fixed + cost.per_token * stale_tokens + cost.per_row * batch


def step_cost(stats: Stats) -> StepCost | None:
    """The linear model of a catch-up step; None where what was seen allows none."""
    sums = stats.own.get(COST)
    return None if sums is None else _fit(sums)


def us_per_step(stats: Stats) -> float:
    """Microseconds of a catch-up step beyond its tokens, at the mean batch seen; 0 if unknown."""
    cost = step_cost(stats)
    return 0.0 if cost is None else cost.fixed + cost.per_row * cost.mean_rows


def table_us(stats: Stats, max_stale_tokens: int, batch: int) -> float:
    """The paper's C(L, B) in microseconds: mean catch-up step of the nearest cell that has any.

    L and B go by powers of two. Of cells equally near, the one of the nearer batch counts, then
    the shorter. Up to one token a row costs nothing; 0 while the table is empty.
    """
    if max_stale_tokens <= 1:
        return 0.0
    length, row = _length_bucket(max_stale_tokens), _batch_bucket(batch)
    nearest, least = 0.0, (NUM_LENGTHS + NUM_BATCHES, 0)
    for at, name in enumerate(_ROWS):
        sums = stats.own.get(name)
        if sums is None:
            continue
        away = abs(at - row)
        for index in range(len(sums.values) // 2):
            us, steps = sums.values[2 * index : 2 * index + 2]
            distance = (abs(index - length) + away, away)
            if steps > 0 and distance < least:
                nearest, least = max(0.0, us / steps), distance
    return nearest


def _length_bucket(stale_tokens: float) -> int:
    return min(max(1, int(stale_tokens)).bit_length(), NUM_LENGTHS) - 1


def _batch_bucket(rows: int) -> int:
    return min(max(1, rows).bit_length(), NUM_BATCHES) - 1


@lru_cache(maxsize=256)
def _fit(sums: OwnSums) -> StepCost | None:
    """Least squares over (1, tokens, rows), without rows where that fails; None if both do."""
    if len(sums.values) != 9 or sums.values[0] < _MIN_STEPS:
        return None
    steps, tokens, rows, tt, tb, bb, us, ty, by = sums.values
    mean_t, mean_b, mean_y = tokens / steps, rows / steps, us / steps
    # Covariances, of tokens a step (t), rows (b) and microseconds (y).
    stt, sbb = tt / steps - mean_t * mean_t, bb / steps - mean_b * mean_b
    stb = tb / steps - mean_t * mean_b
    sty, sby = ty / steps - mean_t * mean_y, by / steps - mean_b * mean_y
    if not stt > _SINGULAR * mean_t * mean_t:
        return None
    determinant = stt * sbb - stb * stb
    if sbb > _SINGULAR * mean_b * mean_b and determinant > _SINGULAR * stt * sbb:
        per_token = (sty * sbb - sby * stb) / determinant
        per_row = (sby * stt - sty * stb) / determinant
        fixed = mean_y - per_token * mean_t - per_row * mean_b
        if per_token >= 0 and per_row >= 0 and 0 <= fixed < math.inf:
            return StepCost(fixed, per_token, per_row, mean_b)
    per_token = sty / stt
    fixed = mean_y - per_token * mean_t
    sane = per_token >= 0 and 0 <= fixed < math.inf
    return StepCost(fixed, per_token, 0.0, mean_b) if sane else None
