"""Matrix products whose additions happen in an order that the weight's shape alone fixes.

Every tile walks K upwards in fp32 accumulators, so any tile, any number of rows and any row's
place give a row the same bits; only the number of K splits would change them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from nightjar.errors import EngineFailure
from worker.kernels.gemm_tiles import Join, Tile

# The rule of splits and their borders belongs to the arithmetic version.
BORDER = 128  # borders of splits are multiples of it; every tile's block_k divides it
_LONG_INPUTS = 4096
_LONG_RATIO = 4
_LONG_SPLITS = 4

_GROUP_M = 8  # tiles of rows that run side by side over one tile of weights
_REDUCE_BLOCK = 512
_NUM_COUNTERS = 1 << 16
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Who adds the splits' sums, always from split 0 upwards.
_LAST, _SERIAL = tl.constexpr(1), tl.constexpr(2)
_JOINS: dict[Join, int] = {"reduce": 0, "last": 1, "serial": 2}


def num_splits(num_inputs: int, num_outputs: int) -> int:
    """Parts that K is summed in: more than one only where K is long and N would not fill a GPU."""
    is_long = num_inputs >= _LONG_INPUTS and num_inputs >= _LONG_RATIO * num_outputs
    return _LONG_SPLITS if is_long else 1


def split_size(num_inputs: int, splits: int) -> int:
    """Inputs of each split but the last: K / splits rounded up to whole BORDERs."""
    return -(-num_inputs // (splits * BORDER)) * BORDER


@triton.jit
def _sum_inputs(  # type: ignore[no-untyped-def]
    x_pointers,
    weight_pointers,
    row_mask,
    column_mask,
    start,
    stop,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    WIDEN: tl.constexpr,
):
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(start, stop, BLOCK_K):
        if EVEN_K:
            x = tl.load(x_pointers + k, mask=row_mask, other=0.0)
            if EVEN_N:
                weight = tl.load(weight_pointers + k)
            else:
                weight = tl.load(weight_pointers + k, mask=column_mask, other=0.0)
        else:
            inside = k + tl.arange(0, BLOCK_K) < stop
            x = tl.load(x_pointers + k, mask=row_mask & inside[None, :], other=0.0)
            weight = tl.load(weight_pointers + k, mask=column_mask & inside[:, None], other=0.0)
        if WIDEN:
            x = x.to(tl.float32)
            weight = weight.to(tl.float32)
        total = tl.dot(x, weight, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["num_rows"])
def _matmul_kernel(  # type: ignore[no-untyped-def]
    x,  # [num_rows, num_inputs], rows `row_stride` apart
    weight,  # [num_outputs, num_inputs]
    out,  # [num_rows, num_outputs]
    sums,  # float32 [SPLITS, num_rows, num_outputs]; unused where nobody joins through memory
    counters,  # int32, zeros before and after; used by the last comer's join alone
    num_rows,
    num_outputs,
    num_inputs,
    row_stride,
    split_inputs,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    JOIN: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    WIDEN: tl.constexpr,  # for the interpreter, whose dot takes bfloat16's bits for integers
    GROUP_M: tl.constexpr,
):
    tile, split = tl.program_id(0), tl.program_id(1)
    tile_m, tile_n = tile * 0, tile
    if num_rows > BLOCK_M:  # few rows are spared the divisions
        tiles_m, tiles_n = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(num_outputs, BLOCK_N)
        first_m = tile // (GROUP_M * tiles_n) * GROUP_M
        height = tl.minimum(tiles_m - first_m, GROUP_M)
        in_group = tile % (GROUP_M * tiles_n)
        tile_m = first_m + in_group % height
        tile_n = in_group // height

    rows = (tile_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    columns = (tile_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    inputs = tl.arange(0, BLOCK_K)
    row_mask = rows < num_rows
    column_mask = columns[None, :] < num_outputs
    x_pointers = x + rows * row_stride + inputs[None, :]
    weight_pointers = weight + columns[None, :] * num_inputs + inputs[:, None]
    results = rows * num_outputs + columns[None, :]
    result_mask = row_mask & column_mask

    if JOIN == _SERIAL:
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for part in range(0, SPLITS):
            start = part * split_inputs
            total += _sum_inputs(
                x_pointers, weight_pointers, row_mask, column_mask,
                start, tl.minimum(start + split_inputs, num_inputs),
                BLOCK_M, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K, WIDEN,
            )  # fmt: skip
        tl.store(out + results, total.to(out.dtype.element_ty), mask=result_mask)
    else:
        start = split * split_inputs
        part_sum = _sum_inputs(
            x_pointers, weight_pointers, row_mask, column_mask,
            start, tl.minimum(start + split_inputs, num_inputs),
            BLOCK_M, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K, WIDEN,
        )  # fmt: skip
        if SPLITS == 1:
            tl.store(out + results, part_sum.to(out.dtype.element_ty), mask=result_mask)
        else:
            plane = num_rows.to(tl.int64) * num_outputs
            tl.store(sums + split * plane + results, part_sum, mask=result_mask)
            if JOIN == _LAST:
                # The barrier orders the program's stores before its arrival, the arrival orders
                # them before whatever the last comer reads.
                tl.debug_barrier()
                arrived = tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu")
                if arrived == SPLITS - 1:
                    joined = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
                    for part in tl.static_range(SPLITS):
                        joined += tl.load(
                            sums + part * plane + results,
                            mask=result_mask,
                            other=0.0,
                            cache_modifier=".cg",
                        )
                    tl.store(out + results, joined.to(out.dtype.element_ty), mask=result_mask)
                    tl.store(counters + tile, 0)


@triton.jit
def _reduce_kernel(  # type: ignore[no-untyped-def]
    sums,  # float32 [SPLITS, num_results]
    out,  # [num_results]
    num_results,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < num_results
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(SPLITS):
        total += tl.load(sums + part * num_results + at, mask=mask, other=0.0)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)


def fixed_order_matmul(
    x: torch.Tensor, weight: torch.Tensor, tile: Tile, splits: int
) -> torch.Tensor:
    """Product of x [M, K] and weight [N, K] transposed: [M, N] in x's dtype, rounded once.

    Products that join by their last comer run on one stream at a time: they share counters.

    Raises:
        EngineFailure: The tensors do not fit each other or the kernel.
    """
    out = _check(x, weight)
    if out.numel():
        plan = _plan(x, weight, out, tile, splits)
        _matmul_kernel[plan.grid](*plan.arguments, **plan.options)
        if plan.sums is not None:
            grid = (triton.cdiv(out.numel(), _REDUCE_BLOCK),)
            _reduce_kernel[grid](
                plan.sums,
                out,
                out.numel(),
                splits,
                _REDUCE_BLOCK,
                num_warps=4,
            )
    return out


def compile_tile(x: torch.Tensor, weight: torch.Tensor, tile: Tile, splits: int) -> None:
    """Compile what `fixed_order_matmul` would launch, launching nothing; on a GPU alone."""
    out = _check(x, weight)
    plan = _plan(x, weight, out, tile, splits)
    _matmul_kernel.warmup(*plan.arguments, grid=plan.grid, **plan.options)


def reference_matmul(x: torch.Tensor, weight: torch.Tensor, splits: int) -> torch.Tensor:
    """The same product by torch: float64 sums of each split, added in order; float64 [M, N]."""
    size = split_size(x.shape[1], splits)
    total = torch.zeros(len(x), len(weight), dtype=torch.float64, device=x.device)
    for start in range(0, x.shape[1], size):
        part = slice(start, start + size)
        total += x[:, part].double() @ weight[:, part].double().T
    return total


def prepare_counters(device: torch.device) -> torch.Tensor:
    """int32 zeros that last comers count in, one buffer a device; first made outside captures."""
    if device not in _COUNTERS:
        _COUNTERS[device] = torch.zeros(_NUM_COUNTERS, dtype=torch.int32, device=device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # whichever stream uses them next finds zeros
    return _COUNTERS[device]


_COUNTERS: dict[torch.device, torch.Tensor] = {}


@dataclass(frozen=True, kw_only=True)
class _Plan:
    grid: tuple[int, int]
    arguments: tuple[Any, ...]
    options: dict[str, int]
    sums: torch.Tensor | None  # for the reduce kernel


def _check(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    (num_rows, num_inputs), (num_outputs, width) = x.shape, weight.shape
    if num_inputs != width or x.dtype != weight.dtype or x.dtype not in _DTYPES:
        raise EngineFailure(
            f"no product of {x.dtype} {list(x.shape)} with weights {weight.dtype} "
            f"{list(weight.shape)}"
        )
    if x.stride(1) != 1 or not weight.is_contiguous():
        raise EngineFailure("a product's inputs are contiguous along K, its weight everywhere")
    return x.new_empty(num_rows, num_outputs)


def _plan(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, tile: Tile, splits: int
) -> _Plan:
    (num_rows, num_outputs), num_inputs = out.shape, x.shape[1]
    tiles = triton.cdiv(num_rows, tile.block_m) * triton.cdiv(num_outputs, tile.block_n)
    join: Join = tile.join if splits > 1 else "reduce"
    if join == "last" and tiles > _NUM_COUNTERS:
        join = "reduce"
    in_memory = splits > 1 and join != "serial"
    sums = x.new_empty(splits, num_rows, num_outputs, dtype=torch.float32) if in_memory else out
    return _Plan(
        grid=(tiles, splits if in_memory else 1),
        arguments=(
            x,
            weight,
            out,
            sums,
            prepare_counters(x.device) if join == "last" else out,
            num_rows,
            num_outputs,
            num_inputs,
            x.stride(0) if num_rows > 1 else num_inputs,  # one row's may be anything
            split_size(num_inputs, splits),
        ),
        options={
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "BLOCK_K": tile.block_k,
            "SPLITS": splits,
            "JOIN": _JOINS[join],
            "EVEN_N": num_outputs % tile.block_n == 0,
            "EVEN_K": num_inputs % tile.block_k == 0,
            "WIDEN": x.device.type == "cpu" and x.dtype is torch.bfloat16,
            "GROUP_M": _GROUP_M,
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
        },
        sums=sums if join == "reduce" and in_memory else None,
    )
