"""Matrix products by cuBLAS, cut so that they may add in the fixed order: by rows, and by splits.

Left alone, cuBLAS adds in whatever order is fastest for a size. For some numbers of rows that is
the fixed order of one split, so a product of more rows is made of several of such; and where the
order has several splits, each is a product of its own, added to the sum of those before.
"""

from __future__ import annotations

import torch

from worker.kernels.gemm import split_size


def library_matmul(
    x: torch.Tensor, weight: torch.Tensor, splits: int, rows_at_once: int
) -> torch.Tensor:
    """Product of x [M, K] and weight [N, K] transposed: [M, N] in x's dtype.

    Whether its bits are those of the fixed order is to be seen, for each M.

    Args:
        x: Rows.
        weight: Of the same dtype.
        splits: Parts of K, each multiplied by itself and added to float32 sums in index order.
        rows_at_once: Rows of x in each of cuBLAS's products.
    """
    if splits == 1 and len(x) <= rows_at_once:
        return torch.nn.functional.linear(x, weight)
    out = x.new_empty(len(x), len(weight))
    for start in range(0, len(x), rows_at_once):
        rows = slice(start, start + rows_at_once)
        if splits == 1:
            torch.mm(x[rows], weight.T, out=out[rows])
        else:
            out[rows] = _sum_of_splits(x[rows], weight, splits)
    return out


def _sum_of_splits(x: torch.Tensor, weight: torch.Tensor, splits: int) -> torch.Tensor:
    size = split_size(x.shape[1], splits)
    if x.device.type == "cuda":
        sums = torch.mm(x[:, :size], weight[:, :size].T, out_dtype=torch.float32)
        for start in range(size, x.shape[1], size):
            part = slice(start, start + size)
            torch.ops.aten.addmm.dtype_out(
                sums, x[:, part], weight[:, part].T, torch.float32, out=sums
            )
        return sums
    # torch multiplies into a wider type on a GPU alone.
    sums = x.new_zeros(len(x), len(weight), dtype=torch.float32)
    for start in range(0, x.shape[1], size):
        part = slice(start, start + size)
        sums += x[:, part].float() @ weight[:, part].float().T
    return sums
