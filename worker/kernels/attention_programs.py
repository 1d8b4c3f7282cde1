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
def _load_blocks(  # type: ignore[no-untyped-def]
    table, first_key, start, end, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr
):
    # The block of each of a tile's keys, or a block of the row where a key is not the row's.
    entries = first_key // BLOCK_SIZE + tl.arange(0, TILE) // BLOCK_SIZE
    entries = tl.minimum(tl.maximum(entries, start // BLOCK_SIZE), (end - 1) // BLOCK_SIZE)
    return tl.load(table + entries)


@triton.jit
def _see_tile(  # type: ignore[no-untyped-def]
    q,
    ones,
    head_pool,
    blocks,
    first_key,
    start,
    end,
    positions,
    window,
    scale,
    cap_scale,
    peak,
    masses,
    sums,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    TILE: tl.constexpr,
):
    # Continues a part's state by one tile of keys. A tile begins at a block's edge, so only the
    # blocks differ from tile to tile; the places in them do not.
    lanes, dims = tl.arange(0, TILE), tl.arange(0, DIM_PAD)
    places = head_pool + ((lanes % BLOCK_SIZE) * HEAD_DIM)[:, None] + dims[None, :]
    source = places + (blocks.to(tl.int64) * BLOCK_STRIDE)[:, None]
    # Keys that no query sees may be anything, and their scores are replaced. V is masked: what
    # the row does not own may be NaN, and NaN times 0 is NaN.
    live = lanes < end - first_key
    if WINDOWED:
        live = live & (lanes >= start - first_key)
    live = live[:, None]
    if HEAD_DIM < DIM_PAD:
        live = live & (dims < HEAD_DIM)[None, :]
        k = tl.load(source, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    else:
        k = tl.load(source)
    v = tl.load(source + NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM, mask=live, other=0.0)

    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if CAPPED:
        small = tl.exp2(-tl.abs(scores) * cap_scale)
        bounded = (1.0 - small) / (1.0 + small)
        scores = tl.where(scores < 0, -bounded, bounded)
    visible = lanes[None, :] <= (positions - first_key)[:, None]
    if WINDOWED:
        visible = visible & (lanes[None, :] > (positions - first_key - window)[:, None])
    scores = tl.where(visible, scores, float("-inf"))
    top = tl.maximum(peak, tl.max(scores, 1) * scale)
    base = tl.where(top == float("-inf"), 0.0, top)
    keep = tl.exp2(peak - base)
    weights = tl.exp2(tl.fma(scores, scale, -base[:, None])).to(v.dtype)
    # By a product, whose order of additions does not depend on ROWS, as a reduction's does.
    masses = tl.dot(weights, ones, masses * keep[:, None], input_precision="ieee")
    sums = tl.dot(weights, v, sums * keep[:, None], input_precision="ieee")
    return top, masses, sums


@triton.jit
def _store_part(  # type: ignore[no-untyped-def]
    part_sums,
    part_peaks,
    part_masses,
    to,
    written,
    peak,
    masses,
    sums,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
):
    dims = tl.arange(0, DIM_PAD)
    tl.store(part_peaks + to, peak, mask=written)
    tl.store(part_masses + to, tl.max(masses, 1), mask=written)
    tl.store(
        part_sums + to[:, None] * HEAD_DIM + dims[None, :],
        sums,
        mask=written[:, None] & (dims < HEAD_DIM)[None, :],
    )


@triton.jit
def _load_part(  # type: ignore[no-untyped-def]
    part_sums,
    part_peaks,
    part_masses,
    at,
    written,
    part,
    last,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
):
    # Past the level 1 cache, which may hold what lay there before. A part past the last is one
    # that has seen no key.
    dims = tl.arange(0, DIM_PAD)
    to = at + part
    live = written & (to <= at + last)
    sums = tl.load(
        part_sums + to[:, None] * HEAD_DIM + dims[None, :],
        mask=live[:, None] & (dims < HEAD_DIM)[None, :],
        other=0.0,
        cache_modifier=".cg",
    )
    peak = tl.load(part_peaks + to, mask=live, other=float("-inf"), cache_modifier=".cg")
    mass = tl.load(part_masses + to, mask=live, other=0.0, cache_modifier=".cg")
    return peak, mass, sums


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
    counters,
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
    BACKWARDS: tl.constexpr,
):
    """Grid (KV heads * slices of their group, tiles, programs that share the parts).

    A row of the products is (query r // HEADS, head r % HEADS of the slice). Where programs
    share a tile, each stores its parts' states, and whichever stores last joins them all.
    """
    SLICES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    PART_TILES: tl.constexpr = PART // TILE
    kv_head, head_slice = tl.program_id(0) // SLICES, tl.program_id(0) % SLICES
    tile, share, step = tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    if BACKWARDS:  # a prompt's later tiles are longer: they begin first
        tile = tl.num_programs(1) - 1 - tile
    count = tl.load(num_queries + tile)
    position = tl.load(first_positions + tile)
    row, first_token = tl.load(rows + tile), tl.load(first_tokens + tile)
    end = position + count
    start = tl.maximum(position + 1 - window, 0)  # keys before it are seen by no query
    first_part, last_part = start // PART, (end - 1) // PART
    part = first_part + share
    if (count == 0) | (part > last_part):
        return

    first_tile, end_tile = start // TILE, (end + TILE - 1) // TILE
    table = tables + row.to(tl.int64) * table_stride
    next_tile = tl.maximum(first_tile, part * PART_TILES)
    blocks = _load_blocks(table, next_tile * TILE, start, end, BLOCK_SIZE, TILE)

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

    head_pool = pool + kv_head * (BLOCK_SIZE * HEAD_DIM)
    # [ROWS]; the mass in 16 equal columns, as the product with ones makes it.
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    masses = tl.full((ROWS, 16), 0.0, tl.float32)
    sums = tl.full((ROWS, DIM_PAD), 0.0, tl.float32)
    all_peak = tl.full((ROWS,), float("-inf"), tl.float32)
    all_mass = tl.full((ROWS,), 0.0, tl.float32)
    all_sums = tl.full((ROWS, DIM_PAD), 0.0, tl.float32)
    results = tokens * (NUM_KV_HEADS * GROUP) + heads

    if SPLIT:
        at = results * num_parts
        for mine in range(part, last_part + 1, step):
            peak = tl.full((ROWS,), float("-inf"), tl.float32)
            masses = tl.full((ROWS, 16), 0.0, tl.float32)
            sums = tl.full((ROWS, DIM_PAD), 0.0, tl.float32)
            stop = tl.minimum(end_tile, (mine + 1) * PART_TILES)
            for i in range(tl.maximum(first_tile, mine * PART_TILES), stop):
                following = _load_blocks(table, (i + 1) * TILE, start, end, BLOCK_SIZE, TILE)
                peak, masses, sums = _see_tile(
                    q, ones, head_pool, blocks, i * TILE, start, end, positions, window,
                    scale, cap_scale, peak, masses, sums,
                    NUM_KV_HEADS, HEAD_DIM, DIM_PAD, BLOCK_SIZE, BLOCK_STRIDE,
                    WINDOWED, CAPPED, TILE,
                )  # fmt: skip
                blocks = following
            _store_part(
                part_sums, part_peaks, part_masses, at + mine, written,
                peak, masses, sums, HEAD_DIM, DIM_PAD,
            )  # fmt: skip
            next_key = (mine + step) * PART
            blocks = _load_blocks(table, next_key, start, end, BLOCK_SIZE, TILE)
        # The barrier orders the program's stores before its arrival, the arrival orders them
        # before whatever the last comer reads.
        tl.debug_barrier()
        counter = counters + tile * tl.num_programs(0) + tl.program_id(0)
        arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        if arrived + 1 == tl.minimum(step, last_part + 1 - first_part):
            # AHEAD parts are under way at a time, as many as registers hold.
            AHEAD: tl.constexpr = 4 if ROWS <= 16 else (2 if ROWS <= 32 else 1)
            for mine in range(first_part, last_part + 1, AHEAD):
                peak_0, mass_0, sums_0 = _load_part(
                    part_sums, part_peaks, part_masses, at, written, mine, last_part,
                    HEAD_DIM, DIM_PAD,
                )  # fmt: skip
                if AHEAD >= 2:
                    peak_1, mass_1, sums_1 = _load_part(
                        part_sums, part_peaks, part_masses, at, written, mine + 1, last_part,
                        HEAD_DIM, DIM_PAD,
                    )  # fmt: skip
                if AHEAD >= 4:
                    peak_2, mass_2, sums_2 = _load_part(
                        part_sums, part_peaks, part_masses, at, written, mine + 2, last_part,
                        HEAD_DIM, DIM_PAD,
                    )  # fmt: skip
                    peak_3, mass_3, sums_3 = _load_part(
                        part_sums, part_peaks, part_masses, at, written, mine + 3, last_part,
                        HEAD_DIM, DIM_PAD,
                    )  # fmt: skip
                all_peak, all_mass, all_sums = _join(
                    all_peak, all_mass, all_sums, peak_0, mass_0, sums_0
                )
                if AHEAD >= 2:
                    all_peak, all_mass, all_sums = _join(
                        all_peak, all_mass, all_sums, peak_1, mass_1, sums_1
                    )
                if AHEAD >= 4:
                    all_peak, all_mass, all_sums = _join(
                        all_peak, all_mass, all_sums, peak_2, mass_2, sums_2
                    )
                    all_peak, all_mass, all_sums = _join(
                        all_peak, all_mass, all_sums, peak_3, mass_3, sums_3
                    )
            tl.store(
                out + results[:, None] * HEAD_DIM + dims[None, :],
                _divide(all_mass, all_sums).to(out.dtype.element_ty),
                mask=written[:, None] & in_head[None, :],
            )
            tl.store(counter, 0)  # for the next launch
    else:
        for i in range(first_tile, end_tile):
            following = _load_blocks(table, (i + 1) * TILE, start, end, BLOCK_SIZE, TILE)
            if (i % PART_TILES == 0) & (i > first_tile):  # the part before this one is complete
                all_peak, all_mass, all_sums = _join(
                    all_peak, all_mass, all_sums, peak, tl.max(masses, 1), sums
                )
                peak = tl.full((ROWS,), float("-inf"), tl.float32)
                masses = tl.full((ROWS, 16), 0.0, tl.float32)
                sums = tl.full((ROWS, DIM_PAD), 0.0, tl.float32)
            peak, masses, sums = _see_tile(
                q, ones, head_pool, blocks, i * TILE, start, end, positions, window,
                scale, cap_scale, peak, masses, sums,
                NUM_KV_HEADS, HEAD_DIM, DIM_PAD, BLOCK_SIZE, BLOCK_STRIDE,
                WINDOWED, CAPPED, TILE,
            )  # fmt: skip
            blocks = following
        all_peak, all_mass, all_sums = _join(
            all_peak, all_mass, all_sums, peak, tl.max(masses, 1), sums
        )
        tl.store(
            out + results[:, None] * HEAD_DIM + dims[None, :],
            _divide(all_mass, all_sums).to(out.dtype.element_ty),
            mask=written[:, None] & in_head[None, :],
        )
