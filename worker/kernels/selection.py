"""Which drafts of a batch are verified, where rows draft more than that, on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from worker.kernels.draft_scores import MAX_DRAFTS
from worker.kernels.row_state import StagedRows
from worker.speculative.selection import likeliest

_BITS = tl.constexpr(63)
_NO_KEY = tl.constexpr(2**63 - 1)  # above infinity's


@triton.jit
def _select(  # type: ignore[no-untyped-def]
    header,
    fields,
    failed,
    scores,
    fields_stride,
    ROWS: tl.constexpr,
    MAX_DRAFTS: tl.constexpr,
):
    """Cut decode rows to their drafts among the likeliest, and move all rows together.

    A key is the bits of a score's magnitude, which grow with it. The last key that is taken is
    found bit by bit; those that tie with it are taken by (position, row). One program.
    """
    row = tl.arange(0, ROWS)
    real = row < tl.load(header)
    field = fields + row
    count = tl.load(field + 2 * fields_stride, mask=real, other=0)
    num_kept = tl.load(field + 6 * fields_stride, mask=real, other=0)
    is_decode = tl.load(field + 7 * fields_stride, mask=real, other=-1) >= 0
    is_whole = tl.load(failed + row, mask=real, other=0) == 0
    num_drafts = tl.where(is_decode & is_whole, count - 1, 0)
    wanted = tl.minimum(tl.load(header + 6), tl.sum(num_drafts, 0))

    at = tl.arange(0, MAX_DRAFTS)[:, None]
    is_draft = at < num_drafts[None, :]
    score = tl.load(scores + row[None, :] * MAX_DRAFTS + at, mask=is_draft, other=0.0)
    keys = tl.where(is_draft, tl.abs(score).to(tl.int64, bitcast=True), _NO_KEY)
    last = tl.zeros((), tl.int64)
    bit = tl.full((), 2**62, tl.int64)
    for _step in range(_BITS):
        number = tl.sum(tl.sum((keys < last + bit).to(tl.int32), 1), 0)
        last = tl.where(number < wanted, last + bit, last)
        bit = bit >> 1
    is_before = keys < last
    ties = (keys == last).to(tl.int32)
    of_position = tl.sum(ties, 1)
    place = tl.cumsum(ties, 1) + (tl.cumsum(of_position, 0) - of_position)[:, None]
    left = wanted - tl.sum(tl.sum(is_before.to(tl.int32), 1), 0)
    is_taken = is_before | ((ties > 0) & (place <= left))
    taken = 1 + tl.sum(is_taken.to(tl.int32), 0)

    count = tl.where(is_decode, taken, count)
    num_kept = tl.where(is_decode, taken, num_kept)
    tl.debug_barrier()  # few rows are worked on by every warp: all must have read before one writes
    tl.store(field + 2 * fields_stride, count, mask=real)
    tl.store(field + 4 * fields_stride, tl.cumsum(count, 0) - count, mask=real)
    tl.store(field + 5 * fields_stride, tl.cumsum(num_kept, 0) - num_kept, mask=real)
    tl.store(field + 6 * fields_stride, num_kept, mask=real)
    tl.store(header + 1, tl.sum(count, 0))
    tl.store(header + 2, tl.sum(num_kept, 0))


def select(rows: StagedRows, scores: torch.Tensor) -> None:
    """Let the target verify the likeliest drafts alone, as many as the header says.

    Args:
        rows: Staged with every draft among a decode row's tokens. Drafts of a row whose draft
            failed are not verified.
        scores: float64 [max_rows, MAX_DRAFTS], 0 or less and never rising along a row: sums of
            its drafts' log-probabilities.
    """
    _select[(1,)](
        rows.header,
        rows.fields,
        rows.failed,
        scores,
        rows.fields.stride(0),
        ROWS=triton.next_power_of_2(rows.fields.shape[1]),
        MAX_DRAFTS=MAX_DRAFTS,
        num_warps=8,
    )


def reference_select(
    log_probabilities: Sequence[Sequence[float]], failed: Sequence[bool], capacity: int
) -> list[int]:
    """Drafts of each row that `select` leaves; the scores are the rows' running sums."""
    kept = [[] if bad else row for row, bad in zip(log_probabilities, failed, strict=True)]
    return likeliest(kept, capacity)
