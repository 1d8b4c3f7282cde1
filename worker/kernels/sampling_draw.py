"""The last kernel of sampling: noise over the tokens that stay, and the row's choice.

Tokens in the bins of a cut are listed, and the last program of a row to arrive cuts among them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from worker.kernels.noise import REACH, gumbel, hash_tokens, log, row_keys
from worker.kernels.processors import logits_of, reading
from worker.kernels.sampling_cut import (
    BINS,
    CAPACITY,
    CHUNK,
    CHUNK_BLOCKS,
    append,
    bins_of,
    cut,
    cut_of_few,
    edge_of,
    is_greedy,
    is_limited,
    is_listed,
    key_of_reach,
    keys_of,
    keys_of_bins,
    pick,
    tokens_of,
)
from worker.kernels.sampling_scan import FRAME

_BINS = tl.constexpr(BINS)
_CAPACITY = tl.constexpr(CAPACITY)
_CHUNK = tl.constexpr(CHUNK)
_CHUNK_BLOCKS = tl.constexpr(CHUNK_BLOCKS)
_FRAME = tl.constexpr(FRAME)
_REACH = tl.constexpr(REACH)
_TILE = tl.constexpr(256)
_NO_ID = tl.constexpr(2**31 - 1)
_NO_KEY = tl.constexpr(0x7F800000)


@triton.jit
def _limit_of(min_p):  # type: ignore[no-untyped-def]
    """The largest key that REACH and min_p let be drawn."""
    limit = key_of_reach()
    if min_p > 0:
        # A normal float32 of at most 1, so that there is a logarithm, of at most 0.
        least = tl.abs(log(tl.minimum(tl.maximum(min_p, 1e-30), 1.0)))
        limit = tl.minimum(limit, least.to(tl.int32, bitcast=True))
    return limit


@triton.jit
def _better(score, tokens, best, best_id):  # type: ignore[no-untyped-def]
    """The best of scores and of `best`, and the lowest id that has it."""
    most = tl.maximum(tl.max(score, 0), best)
    lowest = tl.min(tl.where(score == most, tokens, _NO_ID), 0)
    return most, tl.where(best == most, tl.minimum(lowest, best_id), lowest)


@triton.jit
def draw(  # type: ignore[no-untyped-def]
    logits,
    stride,
    row_of,
    inverse_temperature,
    top_k,
    top_p,
    asked,
    asked_stride,
    slots,
    places,
    positions,
    marks,
    marks_width,
    history,
    history_width,
    stage,
    min_p,
    seed_low,
    seed_high,
    maxima,
    masses,
    counts,
    frames,
    picked,
    found,
    arrivals,
    near_keys,
    near_ids,
    scores,
    ids,
    ceilings,
    out,
    vocab_size,
    NUM_BLOCKS: tl.constexpr,
    PADDED: tl.constexpr,
    MAX_PROGRAMS: tl.constexpr,
):
    """Choose for sampled rows: the best score, the lowest id of equals.

    Grid (rows, programs): each program takes every n-th tile of the blocks of which a token may
    stay. Listed rows take one program.
    """
    k = tl.program_id(0)
    row = tl.load(row_of + k)
    if row < 0:
        return
    scale = tl.load(inverse_temperature + row)
    most = tl.load(top_k + row)
    top = tl.load(frames + k * _FRAME)
    is_list = is_listed(most, NUM_BLOCKS) & is_limited(most, vocab_size)
    is_sampled = (is_greedy(scale, most) == 0) & (top > float("-inf")) & (top < float("inf"))
    if (is_sampled == 0) | (is_list & (tl.program_id(1) > 0)):
        return
    most = tl.where(is_limited(most, vocab_size), most, 0)
    share = tl.load(top_p + row)
    limit = _limit_of(tl.load(min_p + row))
    position = tl.load(positions + k)
    key_1, key_2 = row_keys(tl.load(seed_low + row), tl.load(seed_high + row), position)
    how = reading(
        k, row, asked, asked_stride, slots, places, positions,
        marks, marks_width, history, history_width, stage,
    )  # fmt: skip
    source = logits + k.to(tl.int64) * stride
    base_number = tl.full((), 0, tl.int32)
    base_mass = tl.full((), 0, tl.int64)
    total = tl.full((), 0, tl.int64)
    lowest = tl.full((), 0, tl.int32)
    highest = key_of_reach()
    arrived = tl.num_programs(1) - 1
    if is_list == 0:
        first = tl.full((), _BINS, tl.int32)
        last = tl.full((), -1, tl.int32)
        near = tl.full((), 0.0, tl.float32)
        step = tl.full((), 1.0, tl.float32)
        if (most > 0) | (share < 1.0):
            near = tl.load(frames + k * _FRAME + 1)
            step = tl.load(frames + k * _FRAME + 2)
            is_far = tl.load(frames + k * _FRAME + 3) >= _REACH
            first, last, base_number, base_mass, total = edge_of(
                masses, counts, k, most, share, near, step, is_far, limit
            )
            lowest, highest = keys_of_bins(first, last, near, step)
        i = tl.arange(0, PADDED)
        maximum = tl.load(maxima + k * NUM_BLOCKS + i, mask=i < NUM_BLOCKS, other=float("-inf"))
        nearest = keys_of(maximum, top, scale)
        nearest_bin = bins_of(nearest, near, step)
        wanted = ((nearest <= limit) & (nearest_bin < first)) | (nearest_bin <= last)
        number = pick(picked, k, wanted & (i < NUM_BLOCKS), NUM_BLOCKS, PADDED)
        own_best = tl.full((_CHUNK,), float("-inf"), tl.float32)
        own_id = tl.full((_CHUNK,), _NO_ID, tl.int32)
        for tile in range(tl.program_id(1), tl.cdiv(number, _CHUNK_BLOCKS), tl.num_programs(1)):
            tokens = tokens_of(picked, k, tile, number, NUM_BLOCKS)
            x = logits_of(source, tokens, tl.arange(0, _CHUNK), how, vocab_size)
            keys = keys_of(x, top, scale)
            bins = bins_of(keys, near, step)
            noise = gumbel(hash_tokens(tokens, key_1, key_2))
            score = noise - keys.to(tl.float32, bitcast=True)
            score = tl.where((keys <= limit) & (bins < first), score, float("-inf"))
            # Ids rise from tile to tile, so the first of equals is the lowest.
            own_id = tl.where(score > own_best, tokens, own_id)
            own_best = tl.maximum(score, own_best)
            if last >= 0:
                at_cut = (bins >= first) & (bins <= last) & (keys <= key_of_reach())
                append(near_keys, near_ids, found, k, keys, tokens, at_cut)
        score = tl.max(own_best, 0)
        at = k * MAX_PROGRAMS + tl.program_id(1)
        tl.store(scores + at, score)
        chosen = tl.where(own_best == score, own_id, _NO_ID)
        tl.store(ids + at, tl.min(chosen, 0))
        # The barrier orders the program's stores before its arrival, the arrival orders them
        # before whatever the last comer reads.
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals + k, 1, sem="acq_rel", scope="gpu")
    if arrived == tl.num_programs(1) - 1:
        best = tl.full((), float("-inf"), tl.float32)
        best_id = tl.full((), _NO_ID, tl.int32)
        if is_list == 0:
            i = tl.arange(0, MAX_PROGRAMS)
            at = k * MAX_PROGRAMS + i
            there = i < tl.num_programs(1)
            score = tl.load(scores + at, mask=there, other=float("-inf"), cache_modifier=".cg")
            chosen = tl.load(ids + at, mask=there, other=_NO_ID, cache_modifier=".cg")
            best, best_id = _better(score, chosen, best, best_id)
        n = tl.load(found + k, cache_modifier=".cg")
        ceiling = limit
        if n > 0:
            own_keys = near_keys + k.to(tl.int64) * _CAPACITY
            own_ids = near_ids + k.to(tl.int64) * _CAPACITY
            if n <= _CAPACITY:
                if n <= _TILE:
                    ceiling = cut_of_few(own_keys, n, most, share, base_number, base_mass, total)
                else:
                    ceiling = cut(
                        own_keys, n, top, scale, lowest, highest,
                        most, share, base_number, base_mass, total, how, False,
                    )  # fmt: skip
                ceiling = tl.minimum(ceiling, limit)
                for start in range(0, n, _TILE):
                    i = start + tl.arange(0, _TILE)
                    keys = tl.load(own_keys + i, mask=i < n, other=_NO_KEY, cache_modifier=".cg")
                    tokens = tl.load(own_ids + i, mask=i < n, other=0, cache_modifier=".cg")
                    noise = gumbel(hash_tokens(tokens, key_1, key_2))
                    score = noise - keys.to(tl.float32, bitcast=True)
                    score = tl.where(keys <= ceiling, score, float("-inf"))
                    best, best_id = _better(score, tokens, best, best_id)
            else:
                # More tokens at the cut than the list holds: the whole row, by one program.
                ceiling = cut(
                    source, vocab_size, top, scale, lowest, highest,
                    most, share, 0, 0, total, how, True,
                )  # fmt: skip
                ceiling = tl.minimum(ceiling, limit)
                for start in range(0, vocab_size, _CHUNK):
                    tokens = start + tl.arange(0, _CHUNK)
                    x = logits_of(source, tokens, tl.arange(0, _CHUNK), how, vocab_size)
                    keys = keys_of(x, top, scale)
                    noise = gumbel(hash_tokens(tokens, key_1, key_2))
                    score = noise - keys.to(tl.float32, bitcast=True)
                    score = tl.where(keys <= ceiling, score, float("-inf"))
                    best, best_id = _better(score, tokens, best, best_id)
        tl.store(out + k, best_id)
        tl.store(ceilings + k, ceiling)
