"""The mean of each row, in an order of additions that depends on the row's width alone.

torch cuts a reduction by the number of rows too, so that its mean of a row in a small batch has
other bits than in a large one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ROWS = 16  # of a program, whatever their number
_LANES = 256  # of a row that are added side by side; at most, and a power of two
_WARPS = 4
_ALIGNMENT = 16  # bytes; triton cuts loads, and with them sums, otherwise below it


@triton.jit(do_not_specialize=["num_rows"])
def _row_mean_kernel(  # type: ignore[no-untyped-def]
    values, means, num_rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lanes = tl.arange(0, LANES)
    is_row = rows < num_rows
    starts = values + rows.to(tl.int64)[:, None] * WIDTH
    sums = tl.full((ROWS, LANES), 0.0, tl.float32)
    for at in range(0, WIDTH, LANES):
        live = is_row[:, None] & (at + lanes < WIDTH)[None, :]
        sums += tl.load(starts + at + lanes[None, :], mask=live, other=0.0).to(tl.float32)
    mean = tl.div_rn(tl.sum(sums, 1), tl.full((ROWS,), WIDTH, tl.float32))
    tl.store(means + rows, mean.to(means.dtype.element_ty), mask=is_row)


def row_mean(values: torch.Tensor, *, keepdim: bool) -> torch.Tensor:
    """The mean over the last dimension, added in float32; one launch, without waiting for it.

    Args:
        values: [..., width], floating point; width is at least 1.
        keepdim: Whether the last dimension stays, of 1.

    Returns:
        [...] or [..., 1], of the same dtype. A row's bits depend on nothing but the row: neither on
        how many there are nor on where they lie.
    """
    width = values.shape[-1]
    flat = values.contiguous().view(-1, width)
    if flat.data_ptr() % _ALIGNMENT:
        flat = flat.clone()
    means = flat.new_empty(len(flat))
    if len(flat):
        _row_mean_kernel[(triton.cdiv(len(flat), _ROWS),)](
            flat,
            means,
            len(flat),
            WIDTH=width,
            ROWS=_ROWS,
            LANES=min(_LANES, triton.next_power_of_2(width)),
            num_warps=_WARPS,
        )
    return means.view(*values.shape[:-1], *([1] if keepdim else []))


def reference_row_mean(values: torch.Tensor, *, keepdim: bool) -> torch.Tensor:
    """`row_mean` in torch, float64 inside."""
    return values.double().mean(-1, keepdim=keepdim).to(values.dtype)
