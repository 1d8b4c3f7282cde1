"""The Triton programs of paged attention; `attention` launches them and holds their reference.

A state is (peak, mass, sums): the largest score in powers of two, and relative to it the sum of
the weights and of the weighted values, all float32. The state that has seen no key is
(-inf, 0, 0), and joining it changes nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _join(peak, mass, sums, next_peak, next_mass, next_sums):  # type: ignore[no-untyped-def]
    # The one formula that parts are joined by. The multiply-adds are explicit, so that the
    # compiler's own choice of fusing cannot differ between kernels.
    top = tl.maximum(peak, next_peak)
    base = tl.where(top == float("-inf"), 0.0, top)  # never -inf - -inf, which is NaN
    keep, scale = tl.exp2(peak - base), tl.exp2(next_peak - base)
    mass = tl.fma(mass, keep, next_mass * scale)
    sums = tl.fma(sums, keep[:, None], next_sums * scale[:, None])
    return top, mass, sums


@triton.jit
def _divide(mass, sums):  # type: ignore[no-untyped-def]
    # A padding row has no mass, and is not stored.
    return sums * tl.div_rn(1.0, tl.where(mass > 0.0, mass, 1.0))[:, None]


@triton.jit
def attend_kernel(  # type: ignore[no-untyped-def]
    query,
    pool,
    tables,
    rows,
    first_tokens,
    num_queries,
    first_positions,
    out,
    part_sums,
    part_peaks,
    part_masses,
    query_head_stride,
    query_token_stride,
    table_stride,
    num_parts,
    window,
    scale,
    cap_scale,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    PART: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Grid (tiles, KV heads * slices of their group, programs that share the parts).

    A row of the products is (query r // HEADS, head r % HEADS of the slice).
    """
    SLICES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    PART_TILES: tl.constexpr = PART // TILE
    tile, share, step = tl.program_id(0), tl.program_id(2), tl.num_programs(2)
    kv_head, head_slice = tl.program_id(1) // SLICES, tl.program_id(1) % SLICES
    count = tl.load(num_queries + tile)
    position = tl.load(first_positions + tile)
    row, first_token = tl.load(rows + tile), tl.load(first_tokens + tile)
    end = position + count
    start = tl.maximum(position + 1 - window, 0)  # keys before it are seen by no query
    part = start // PART + share
    if (count == 0) | (part * PART >= end):
        return

    # This program's tiles, numbered through its parts: part, part + step, and so on.
    owned = ((end - 1) // PART - part) // step
    last_part = part + owned * step
    begin = tl.where(share == 0, start // TILE % PART_TILES, 0)
    stop = owned * PART_TILES + tl.minimum(PART_TILES, (end - last_part * PART + TILE - 1) // TILE)

    lanes, dims = tl.arange(0, ROWS), tl.arange(0, DIM_PAD)
    queries = lanes // HEADS
    slots = head_slice * HEADS + lanes % HEADS
    written = (queries < count) & (slots < GROUP)
    positions = position + tl.minimum(queries, count - 1)
    heads = kv_head * GROUP + slots
    tokens = (first_token + queries).to(tl.int64)
    in_head = dims < HEAD_DIM
    q = tl.load(
        query + (tokens * query_token_stride + heads * query_head_stride)[:, None] + dims[None, :],
        mask=written[:, None] & in_head[None, :],
        other=0.0,
    )
    ones = tl.full((TILE, 16), 1.0, q.dtype)

    table = tables + row.to(tl.int64) * table_stride
    head_pool = pool + kv_head * (BLOCK_SIZE * HEAD_DIM)
    # [ROWS]; the mass in 16 equal columns, as the product with ones makes it.
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    masses = tl.full((ROWS, 16), 0.0, tl.float32)
    sums = tl.full((ROWS, DIM_PAD), 0.0, tl.float32)
    all_peak = tl.full((ROWS,), float("-inf"), tl.float32)
    all_mass = tl.full((ROWS,), 0.0, tl.float32)
    all_sums = tl.full((ROWS, DIM_PAD), 0.0, tl.float32)
    at = (tokens * (NUM_KV_HEADS * GROUP) + heads) * num_parts

    for i in range(begin, stop):
        if (i % PART_TILES == 0) & (i > begin):  # the part before this one is complete
            if SPLIT:
                to = at + (part + (i // PART_TILES - 1) * step)
                tl.store(part_peaks + to, peak, mask=written)
                tl.store(part_masses + to, tl.max(masses, 1), mask=written)
                tl.store(
                    part_sums + to[:, None] * HEAD_DIM + dims[None, :],
                    sums,
                    mask=written[:, None] & in_head[None, :],
                )
            else:
                all_peak, all_mass, all_sums = _join(
                    all_peak, all_mass, all_sums, peak, tl.max(masses, 1), sums
                )
            peak = tl.full((ROWS,), float("-inf"), tl.float32)
            masses = tl.full((ROWS, 16), 0.0, tl.float32)
            sums = tl.full((ROWS, DIM_PAD), 0.0, tl.float32)

        first_key = (part + i // PART_TILES * step) * PART + i % PART_TILES * TILE
        keys = first_key + tl.arange(0, TILE)
        live = keys < end
        if WINDOWED:
            live = live & (keys >= start)
        blocks = tl.load(table + keys // BLOCK_SIZE, mask=live, other=0)
        offsets = blocks.to(tl.int64) * BLOCK_STRIDE + (keys % BLOCK_SIZE) * HEAD_DIM
        source = head_pool + offsets[:, None] + dims[None, :]
        # V is masked too: what the row does not own may be NaN, and NaN times 0 is NaN.
        loaded = live[:, None] & in_head[None, :]
        k = tl.load(source, mask=loaded, other=0.0)
        v = tl.load(source + NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM, mask=loaded, other=0.0)

        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if CAPPED:
            small = tl.exp2(-tl.abs(scores) * cap_scale)
            bounded = (1.0 - small) / (1.0 + small)
            scores = tl.where(scores < 0, -bounded, bounded)
        visible = keys[None, :] <= positions[:, None]
        if WINDOWED:
            visible = visible & (keys[None, :] > positions[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
        top = tl.maximum(peak, tl.max(scores, 1) * scale)
        base = tl.where(top == float("-inf"), 0.0, top)
        keep = tl.exp2(peak - base)
        weights = tl.exp2(tl.fma(scores, scale, -base[:, None])).to(v.dtype)
        # By a product, whose order of additions does not depend on ROWS, as a reduction's does.
        masses = tl.dot(weights, ones, masses * keep[:, None], input_precision="ieee")
        sums = tl.dot(weights, v, sums * keep[:, None], input_precision="ieee")
        peak = top

    if SPLIT:
        to = at + last_part
        tl.store(part_peaks + to, peak, mask=written)
        tl.store(part_masses + to, tl.max(masses, 1), mask=written)
        tl.store(
            part_sums + to[:, None] * HEAD_DIM + dims[None, :],
            sums,
            mask=written[:, None] & in_head[None, :],
        )
    else:
        all_peak, all_mass, all_sums = _join(
            all_peak, all_mass, all_sums, peak, tl.max(masses, 1), sums
        )
        tl.store(
            out + (tokens * (NUM_KV_HEADS * GROUP) + heads)[:, None] * HEAD_DIM + dims[None, :],
            _divide(all_mass, all_sums).to(out.dtype.element_ty),
            mask=written[:, None] & in_head[None, :],
        )


@triton.jit
def _load_part(  # type: ignore[no-untyped-def]
    part_sums,
    part_peaks,
    part_masses,
    at,
    part,
    last,
    slots,
    dims,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    live = slots < tl.where(part <= last, GROUP, 0)
    to = at + part
    sums = tl.load(
        part_sums + to[:, None] * HEAD_DIM + dims[None, :],
        mask=live[:, None] & (dims < HEAD_DIM)[None, :],
        other=0.0,
    )
    peak = tl.load(part_peaks + to, mask=live, other=float("-inf"))
    mass = tl.load(part_masses + to, mask=live, other=0.0)
    return peak, mass, sums


@triton.jit
def join_kernel(  # type: ignore[no-untyped-def]
    part_sums,
    part_peaks,
    part_masses,
    first_tokens,
    num_queries,
    first_positions,
    out,
    num_parts,
    window,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PART: tl.constexpr,
):
    """Grid (tiles, queries of a tile, KV heads): joins parts that programs have stored."""
    tile, index, kv_head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.load(num_queries + tile)
    position = tl.load(first_positions + tile) + index
    token = (tl.load(first_tokens + tile) + index).to(tl.int64)
    if index >= count:
        return
    first, last = tl.maximum(position + 1 - window, 0) // PART, position // PART
    slots, dims = tl.arange(0, GROUP_PAD), tl.arange(0, DIM_PAD)
    in_group = slots < GROUP
    heads = token * (NUM_KV_HEADS * GROUP) + kv_head * GROUP + slots
    at = heads * num_parts
    peak = tl.full((GROUP_PAD,), float("-inf"), tl.float32)
    mass = tl.full((GROUP_PAD,), 0.0, tl.float32)
    sums = tl.full((GROUP_PAD, DIM_PAD), 0.0, tl.float32)
    # Four parts are under way at a time; those past the last join as nothing.
    for part in range(first, last + 1, 4):
        peak_0, mass_0, sums_0 = _load_part(
            part_sums, part_peaks, part_masses, at, part, last, slots, dims, GROUP, HEAD_DIM
        )
        peak_1, mass_1, sums_1 = _load_part(
            part_sums, part_peaks, part_masses, at, part + 1, last, slots, dims, GROUP, HEAD_DIM
        )
        peak_2, mass_2, sums_2 = _load_part(
            part_sums, part_peaks, part_masses, at, part + 2, last, slots, dims, GROUP, HEAD_DIM
        )
        peak_3, mass_3, sums_3 = _load_part(
            part_sums, part_peaks, part_masses, at, part + 3, last, slots, dims, GROUP, HEAD_DIM
        )
        peak, mass, sums = _join(peak, mass, sums, peak_0, mass_0, sums_0)
        peak, mass, sums = _join(peak, mass, sums, peak_1, mass_1, sums_1)
        peak, mass, sums = _join(peak, mass, sums, peak_2, mass_2, sums_2)
        peak, mass, sums = _join(peak, mass, sums, peak_3, mass_3, sums_3)
    tl.store(
        out + heads[:, None] * HEAD_DIM + dims[None, :],
        _divide(mass, sums).to(out.dtype.element_ty),
        mask=in_group[:, None] & (dims < HEAD_DIM)[None, :],
    )
