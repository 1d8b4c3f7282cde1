"""What steps cost, fitted to what runs recorded, as the table that a simulator takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner_service.simulate.cost import MIN_STEP_US, CostTable

MIN_SLOPE_POINTS = 4
Record = Mapping[str, Any]
Floats = NDArray[np.float64]


class NotEnough(Exception):
    """The record lacks what a replay needs; says what."""


def cost_table(record: Record, cells: Sequence[int], max_gamma: int) -> CostTable:
    """A table of step times at the measured batch sizes, gaps between steps included.

    Least squares over all steps at or just below a cell's rows: in a closed loop with many rows
    hardly a step has them all, and none that has also computes a prompt.

    Raises:
        NotEnough: A batch size was not measured at every gamma.
    """
    rows = [row for row in record["steps"] if any(_is_near(row["rows"], cell) for cell in cells)]
    wanted = [(size, gamma) for size in cells for gamma in range(max_gamma + 1)]
    known = {(cell, row["gamma"]) for row in rows for cell in cells if _is_near(row["rows"], cell)}
    missing = [f"{cell[0]} rows at gamma {cell[1]}" for cell in wanted if cell not in known]
    if missing:
        raise NotEnough(f"no steps of {', '.join(missing)}")
    drafting = [row for row in rows if row["gamma"] <= max_gamma]
    num = np.array([row["num_steps"] for row in drafting], float)
    decoding = np.array([row["rows"] for row in drafting], float)
    gammas = np.array([row["gamma"] for row in drafting])
    kv = np.array([row["kv_tokens"] for row in drafting]) / num
    context = round(float((kv / decoding * num).sum() / num.sum()))
    us = np.array([row["step_us"] / row["num_steps"] + _gap_us(row) for row in drafting])
    left = np.zeros((len(drafting), len(wanted) + 3))
    for at in range(len(cells)):
        share = np.interp(decoding, cells, np.eye(len(cells))[at])
        left[np.arange(len(drafting)), at * (max_gamma + 1) + gammas] += share
    beyond = kv - context * decoding
    left[:, -3], left[:, -2] = beyond / 1000, gammas * beyond / 1000
    left[:, -1] = np.array([row["prefill_tokens"] for row in drafting]) / num
    bins = {(row["rows"], row["gamma"], row["kv_bin"]) for row in drafting}
    has_slopes = len(bins) >= len({bin[:2] for bin in bins}) + MIN_SLOPE_POINTS
    found = _least_squares(left, us, num, num_cells=len(wanted), has_slopes=has_slopes)
    table = np.maximum(found[: len(wanted)].reshape(len(cells), -1), MIN_STEP_US)
    per_step, per_token = _catch_up(record["steps"])
    prefill = float(found[-1]) or _pure_prefill(record["steps"], float(table[0, 0]))
    return CostTable(
        name="measured",
        source="benchmarks/paper.py run",
        context=context,
        batch_sizes=tuple(cells),
        step_us=tuple(tuple(row.tolist()) for row in table),
        # One more draft, not verified, costs at most what the cheapest further gamma does.
        draft_step_us=tuple(max(0.0, float(np.diff(row).min())) for row in table),
        kv_us_per_1000_tokens=float(found[-3]),
        draft_kv_us_per_1000_tokens=float(found[-2]),
        catch_up_us=per_step,
        catch_up_us_per_token=per_token,
        catch_up_us_per_row=0.0,
        prefill_us_per_token=prefill,
    )


def _is_near(rows: int, cell: int) -> bool:
    return 0 < rows <= cell and rows >= cell - max(1, cell // 16)


def _gap_us(row: Record) -> float:
    return float(row["gap_us"] / row["gap_steps"]) if row["gap_steps"] else 0.0


def _least_squares(
    left: Floats, right: Floats, weights: Floats, *, num_cells: int, has_slopes: bool
) -> Floats:
    """Solution whose last three, the slopes, are not negative; 0 where nothing shows them."""
    used = list(range(left.shape[1] if has_slopes else num_cells))
    if not has_slopes:
        used.append(left.shape[1] - 1)
    root = np.sqrt(weights)
    while True:
        used = [i for i in used if left[:, i].any()]
        solved, *_ = np.linalg.lstsq(left[:, used] * root[:, None], right * root, rcond=None)
        negative = [i for i, value in zip(used, solved, strict=True) if i >= num_cells > 0 > value]
        if not negative:
            found = np.zeros(left.shape[1])
            found[used] = solved
            return found
        used.remove(negative[0])


def _pure_prefill(rows: Sequence[Record], plain_us: float) -> float:
    """Microseconds a prompt's token, from steps that did nothing else."""
    own = [row for row in rows if not row["rows"]]
    num_tokens = sum(row["prefill_tokens"] for row in own)
    us = sum(row["step_us"] - row["num_steps"] * plain_us for row in own)
    return max(0.0, us / num_tokens) if num_tokens else 0.0


def _catch_up(rows: Sequence[Record]) -> tuple[float, float]:
    """Microseconds of catching up, prompts included: of a step that does, and per token of it."""
    own = [row for row in rows if row["catch_up_steps"]]
    if not own:
        return 0.0, 0.0
    left = np.array(
        [
            (row["catch_up_steps"], row["catch_up_tokens"] + row["draft_prefill_tokens"])
            for row in own
        ],
        float,
    )
    right = np.array([row["catch_up_us"] + row["draft_prefill_us"] for row in own], float)
    weights = 1 / np.sqrt(left[:, 0])  # sums of so many steps
    solved = np.linalg.lstsq(left * weights[:, None], right * weights, rcond=None)[0]
    per_step, per_token = map(float, solved)
    if per_step < 0:
        return 0.0, float(right.sum() / left[:, 1].sum())
    if per_token < 0:
        return float(right.sum() / left[:, 0].sum()), 0.0
    return per_step, per_token
