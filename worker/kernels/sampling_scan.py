"""The first two kernels of sampling: maxima of blocks of tokens, then what each row is made of.

The second one ends greedy and unusable rows. Of rows that use top_k or top_p it lists the tokens
that may stay where those are few, and else adds weights up in bins around the likely cut.
"""

from __future__ import annotations

import triton
import triton.language as tl

from worker.kernels.noise import REACH
from worker.kernels.processors import few_logits_of, logits_of, reading
from worker.kernels.sampling_cut import (
    BINS,
    BLOCK,
    CHUNK,
    CHUNK_BLOCKS,
    append,
    bins_of,
    is_greedy,
    is_limited,
    is_listed,
    keys_of,
    pick,
    tokens_of,
    weights_of,
)
from worker.sampling import UNUSABLE

FRAME = 4  # largest logit, nearest |z| of the bins, bins per unit, |z| where the last begins
_REACH = tl.constexpr(REACH)
_BINS = tl.constexpr(BINS)
_BLOCK = tl.constexpr(BLOCK)
_CHUNK = tl.constexpr(CHUNK)
_CHUNK_BLOCKS = tl.constexpr(CHUNK_BLOCKS)
_FRAME = tl.constexpr(FRAME)
_UNUSABLE = tl.constexpr(UNUSABLE)
_NO_ID = tl.constexpr(2**31 - 1)
_NO_KEY = tl.constexpr(0x7F800000)
_THREADS = tl.constexpr(256)
_STEPS = tl.constexpr(11)  # of bisection, to a hundredth in |z|


@triton.jit
def scan(  # type: ignore[no-untyped-def]
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
    maxima,
    sums,
    samples,
    masses,
    counts,
    found,
    arrivals,
    vocab_size,
    NUM_BLOCKS: tl.constexpr,
):
    """Each block's largest logit, +inf where it holds NaN or +inf; zeros for what is to be added.

    Of rows whose bins are used, also its weights' sum beside the largest, and its first logit.
    Grid (rows, programs): each program takes every n-th chunk of its row.
    """
    k = tl.program_id(0)
    row = tl.load(row_of + k)
    if row < 0:
        return
    scale = tl.load(inverse_temperature + row)
    most = tl.load(top_k + row)
    is_nucleus = tl.load(top_p + row) < 1.0
    is_binned = is_limited(most, vocab_size) | is_nucleus
    is_binned = is_binned & (is_listed(most, NUM_BLOCKS) == 0) & (is_greedy(scale, most) == 0)
    if tl.program_id(1) == 0:
        tl.store(found + k, 0)
        tl.store(arrivals + k, 0)
    if is_binned:
        for start in range(tl.program_id(1) * _BLOCK, _BINS, tl.num_programs(1) * _BLOCK):
            at = k * _BINS + start + tl.arange(0, _BLOCK)
            tl.store(masses + at, tl.zeros((_BLOCK,), tl.int64))
            tl.store(counts + at, tl.zeros((_BLOCK,), tl.int32))
    how = reading(
        k, row, asked, asked_stride, slots, places, positions,
        marks, marks_width, history, history_width, stage,
    )  # fmt: skip
    source = logits + k.to(tl.int64) * stride
    for chunk in range(tl.program_id(1), NUM_BLOCKS // _CHUNK_BLOCKS, tl.num_programs(1)):
        blocks = chunk * _CHUNK_BLOCKS + tl.arange(0, _CHUNK_BLOCKS)
        tokens = blocks[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
        x = logits_of(source, tokens, tokens - chunk * _CHUNK, how, vocab_size)
        x = tl.where(x == x, x, float("inf"))  # NaN alone differs from itself
        best = tl.max(x, 1)
        at = k * NUM_BLOCKS + blocks
        tl.store(maxima + at, best)
        if is_binned:
            base = tl.where(tl.abs(best) < float("inf"), best, 0.0)
            weights = tl.exp((x - base[:, None]) * scale)
            tl.store(sums + at, tl.sum(weights, 1))
            firsts = blocks * _BLOCK
            tl.store(samples + at, few_logits_of(source, firsts, how, vocab_size))


@triton.jit
def _end_of_top_k(z, top_k):  # type: ignore[no-untyped-def]
    """Within which |z| at least `top_k` tokens lie: as many blocks' maxima do."""
    low = tl.full((), 0.0, tl.float32)
    high = tl.full((), _REACH, tl.float32)
    for _step in range(_STEPS):
        middle = (low + high) * 0.5
        enough = tl.sum((z >= -middle).to(tl.int32), 0) >= top_k
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle)
    # Inside the last bin's near end, whatever the rounding.
    return tl.minimum(high * 1.002 + 0.01, _REACH)


@triton.jit
def _band_of_top_p(z, sums, samples, top_p):  # type: ignore[no-untyped-def]
    """Between which |z| the cut lies, by the blocks' sums, and a sample for the unlikely tokens.

    A sum S of sampled weights below e**t is off by about sqrt(S * e**t), five times which is
    less than S / 4 + 25 * e**t. A cut outside is found all the same, but slowly.
    """
    total = tl.sum(sums * tl.exp(z), 0)
    out = (1.0 - top_p) * total * (1.0 / _BLOCK)
    weights = tl.exp(samples)
    near = tl.full((), 0.0, tl.float32)
    far = tl.full((), _REACH, tl.float32)
    nearer = near
    farther = far
    for _step in range(_STEPS):
        first = (near + farther) * 0.5
        second = (nearer + far) * 0.5
        behind = tl.sum(tl.where(samples < -first, weights, 0.0), 0)
        is_near = behind * 0.75 - 25.0 * tl.exp(-first) >= out
        near = tl.where(is_near, first, near)
        farther = tl.where(is_near, farther, first)
        behind = tl.sum(tl.where(samples < -second, weights, 0.0), 0)
        is_far = behind * 1.25 + 25.0 * tl.exp(-second) <= out
        far = tl.where(is_far, second, far)
        nearer = tl.where(is_far, nearer, second)
    return near, tl.maximum(far, near + 0.01)


@triton.jit
def _by_thread(weights):  # type: ignore[no-untyped-def]
    """Sums of CHUNK integers, as many as threads, whichever each adds: so few fit its registers."""
    return tl.sum(tl.reshape(weights, (_THREADS, _CHUNK // _THREADS)), 1)


@triton.jit
def sort_out(  # type: ignore[no-untyped-def]
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
    maxima,
    sums,
    samples,
    masses,
    counts,
    frames,
    picked,
    found,
    near_keys,
    near_ids,
    out,
    vocab_size,
    NUM_BLOCKS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Choose for greedy and unusable rows; list or add up what top_k and top_p cut.

    Grid (rows, programs). Sums are of integers, and what is made of lists has no order.
    """
    k = tl.program_id(0)
    row = tl.load(row_of + k)
    if row < 0:
        return
    scale = tl.load(inverse_temperature + row)
    most = tl.load(top_k + row)
    share = tl.load(top_p + row)
    is_top_k = is_limited(most, vocab_size)
    is_cut = (is_top_k | (share < 1.0)) & (is_greedy(scale, most) == 0)
    is_first = tl.program_id(1) == 0
    if is_first | is_cut:
        how = reading(
            k, row, asked, asked_stride, slots, places, positions,
            marks, marks_width, history, history_width, stage,
        )  # fmt: skip
        source = logits + k.to(tl.int64) * stride
        i = tl.arange(0, PADDED)
        at = k * NUM_BLOCKS + i
        maximum = tl.load(maxima + at, mask=i < NUM_BLOCKS, other=float("-inf"))
        top = tl.max(maximum, 0)
        is_usable = (top > float("-inf")) & (top < float("inf"))
        if is_first:
            tl.store(frames + k * _FRAME, top)
            if is_greedy(scale, most) | (is_usable == 0):
                block = tl.min(tl.where(maximum == top, i, PADDED), 0)
                tokens = block * _BLOCK + tl.arange(0, _BLOCK)
                x = few_logits_of(source, tokens, how, vocab_size)
                best = tl.min(tl.where(x == top, tokens, _NO_ID), 0)
                tl.store(out + k, tl.where(is_usable, best, _UNUSABLE))
        if is_cut & is_usable:
            near = tl.full((), 0.0, tl.float32)
            far = tl.full((), _REACH, tl.float32)
            if is_top_k:
                far = _end_of_top_k((maximum - top) * scale, most)
            else:
                sample = tl.load(samples + at, mask=i < NUM_BLOCKS, other=float("-inf"))
                near, far = _band_of_top_p(
                    (maximum - top) * scale,
                    tl.load(sums + at, mask=i < NUM_BLOCKS, other=0.0),
                    (sample - top) * scale,
                    share,
                )
            step = (_BINS - 1.0) / (far - near)
            end = far.to(tl.int32, bitcast=True)
            if is_first:
                tl.store(frames + k * _FRAME + 1, near)
                tl.store(frames + k * _FRAME + 2, step)
                tl.store(frames + k * _FRAME + 3, far)
            is_list = is_listed(most, NUM_BLOCKS)
            # Behind a top_k's end nothing matters; of a nucleus all weights do.
            mattering = tl.where(is_top_k, end, _NO_KEY)
            wanted = (keys_of(maximum, top, scale) <= mattering) & (maximum > float("-inf"))
            number = pick(picked, k, wanted, NUM_BLOCKS, PADDED)
            front = tl.zeros((_THREADS,), tl.int64)
            rest = tl.zeros((_THREADS,), tl.int64)
            front_number = tl.zeros((), tl.int32)
            for tile in range(tl.program_id(1), tl.cdiv(number, _CHUNK_BLOCKS), tl.num_programs(1)):
                tokens = tokens_of(picked, k, tile, number, NUM_BLOCKS)
                x = logits_of(source, tokens, tl.arange(0, _CHUNK), how, vocab_size)
                keys = keys_of(x, top, scale)
                if is_list:
                    append(near_keys, near_ids, found, k, keys, tokens, keys <= end)
                else:
                    bins = bins_of(keys, near, step)
                    weights = weights_of(keys)
                    front += _by_thread(tl.where(bins == 0, weights, 0))
                    rest += _by_thread(tl.where(bins == _BINS - 1, weights, 0))
                    inside = (bins > 0) & (bins < _BINS - 1)
                    to = k * _BINS + bins
                    tl.atomic_add(masses + to, weights, mask=inside, sem="relaxed")
                    if is_top_k:
                        front_number += tl.sum((bins == 0).to(tl.int32), 0)
                        tl.atomic_add(counts + to, 1, mask=inside, sem="relaxed")
            if is_list == 0:
                first = masses + k * _BINS
                tl.atomic_add(first, tl.sum(front, 0), sem="relaxed")
                tl.atomic_add(first + _BINS - 1, tl.sum(rest, 0), sem="relaxed")
                tl.atomic_add(counts + k * _BINS, front_number, sem="relaxed")
