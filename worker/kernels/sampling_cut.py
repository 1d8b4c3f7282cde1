"""Where top_k, top_p and min_p cut a row, on the device: as a key, which grows as logits fall.

A token's key is the bits of |z| as int32, z = (logit - largest) * inverse temperature, at most 0.
Keys order tokens as weights exp(z) do, so a cut is the largest key that stays, ties with it kept.
"""

from __future__ import annotations

import triton
import triton.language as tl

from worker.kernels.launch import begin
from worker.kernels.noise import REACH, log

CHUNK = 2048  # tokens whose maximum is kept
CAPACITY = 8192  # candidates of a row, at most
_REACH = tl.constexpr(REACH)
_CHUNK = tl.constexpr(CHUNK)
_CAPACITY = tl.constexpr(CAPACITY)
# Candidates are the tokens down to this far below the mean of the chunks' maxima: some hundreds
# or thousands of the likeliest, however flat the row. The cut is the same wherever they end.
MARGIN = 3.0
_TILE = tl.constexpr(4096)
_NO_KEY = tl.constexpr(0x7F800000)  # infinity's, whose weight is 0; above every cut
# Weights are added as multiples of 2**-44, in any order: 2**18 of them do not overflow.
_UNIT = tl.constexpr(2.0**44)
MAX_VOCAB_SIZE = 2**18


@triton.jit
def keys_of(logits, top, scale):  # type: ignore[no-untyped-def]
    """Keys of float32 logits; `_NO_KEY` of -inf."""
    return tl.abs((logits - top) * scale).to(tl.int32, bitcast=True)


@triton.jit
def weights_of(keys):  # type: ignore[no-untyped-def]
    """exp(z) in units of 2**-44, int64; keys up to `_NO_KEY`."""
    return (tl.exp(-keys.to(tl.float32, bitcast=True)) * _UNIT).to(tl.int64)


@triton.jit
def chunk_maxima(maxima, k, NUM_CHUNKS: tl.constexpr, PADDED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Row k's, float32 [PADDED], -inf where there is no chunk."""
    i = tl.arange(0, PADDED)
    return tl.load(maxima + k * NUM_CHUNKS + i, mask=i < NUM_CHUNKS, other=float("-inf"))


@triton.jit
def is_sampled(scale, top_k, top):  # type: ignore[no-untyped-def]
    """Whether noise decides: neither greedy nor unusable."""
    return (scale > 0) & (top_k != 1) & (top > float("-inf")) & (top < float("inf"))


@triton.jit
def is_searched(top_k, top_p, vocab_size):  # type: ignore[no-untyped-def]
    """Whether a row's cut has to be looked for."""
    return ((top_k > 0) & (top_k < vocab_size)) | (top_p < 1.0)


@triton.jit
def collect(  # type: ignore[no-untyped-def]
    logits,
    stride,
    row_of,
    inverse_temperature,
    top_k,
    top_p,
    maxima,
    counts,
    masses,
    candidates,
    vocab_size,
    NUM_CHUNKS: tl.constexpr,
    PADDED: tl.constexpr,
    MARGIN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Gather the keys of a searched row's candidates, their number, and the sum of all weights.

    Grid (rows, programs): each program takes every n-th chunk. Candidates land in any order;
    what is made of them has none. More than CAPACITY are counted but not kept.
    """
    begin(PDL)
    k = tl.program_id(0)
    row = tl.load(row_of + k)
    if row < 0:
        return
    scale = tl.load(inverse_temperature + row)
    most = tl.load(top_k + row)
    maximum = chunk_maxima(maxima, k, NUM_CHUNKS, PADDED)
    top = tl.max(maximum, 0)
    if is_sampled(scale, most, top) & is_searched(most, tl.load(top_p + row), vocab_size):
        usable = maximum > float("-inf")
        z = tl.where(usable, (maximum - top) * scale, 0.0)
        mean = tl.sum(z, 0) / tl.sum(usable.to(tl.float32), 0)
        window = tl.minimum(-mean + MARGIN, _REACH).to(tl.int32, bitcast=True)
        source = logits + k.to(tl.int64) * stride
        into = candidates + k.to(tl.int64) * _CAPACITY
        mass = tl.zeros((_CHUNK,), tl.int64)
        for chunk in range(tl.program_id(1), NUM_CHUNKS, tl.num_programs(1)):
            tokens = chunk * _CHUNK + tl.arange(0, _CHUNK)
            x = tl.load(source + tokens, mask=tokens < vocab_size, other=float("-inf"))
            keys = keys_of(x.to(tl.float32), top, scale)
            mass += weights_of(keys)
            inside = keys <= window
            num_inside = tl.sum(inside.to(tl.int32), 0)
            if num_inside > 0:
                first = tl.atomic_add(counts + k, num_inside)
                places = first + tl.cumsum(inside.to(tl.int32), 0) - 1
                tl.store(into + places, keys, mask=inside & (places < _CAPACITY))
        tl.atomic_add(masses + k, tl.sum(mass, 0))


@triton.jit
def _survey(  # type: ignore[no-untyped-def]
    source, n, top, scale, ceiling, OF_LOGITS: tl.constexpr, WEIGH: tl.constexpr
):
    """What keys up to `ceiling` hold (weights, or their number), the largest, the next one."""
    held = tl.zeros((_TILE,), tl.int64)
    last = tl.zeros((_TILE,), tl.int32)
    following = tl.full((_TILE,), _NO_KEY, tl.int32)
    for start in range(0, n, _TILE):
        i = start + tl.arange(0, _TILE)
        if OF_LOGITS:
            x = tl.load(source + i, mask=i < n, other=float("-inf"))
            keys = keys_of(x.to(tl.float32), top, scale)
        else:
            keys = tl.load(source + i, mask=i < n, other=_NO_KEY)
        inside = keys <= ceiling
        if WEIGH:
            held += tl.where(inside, weights_of(keys), 0)
        else:
            held += inside.to(tl.int64)
        last = tl.where(inside, tl.maximum(last, keys), last)
        following = tl.where(inside, following, tl.minimum(following, keys))
    return tl.sum(held, 0), tl.max(last, 0), tl.min(following, 0)


@triton.jit
def _least_ceiling(  # type: ignore[no-untyped-def]
    source, n, top, scale, highest, goal, OF_LOGITS: tl.constexpr, WEIGH: tl.constexpr
):
    """The least key up to which keys hold `goal`; `highest` where those up to it do not.

    Bisection between keys that occur, so it takes about log2 of the number of distinct ones.
    """
    held, last, following = _survey(source, n, top, scale, highest, OF_LOGITS, WEIGH)
    high = tl.where(held >= goal, last, highest)
    low = tl.where(held >= goal, 0, highest)
    while low < high:
        middle = low + (high - low) // 2
        held, last, following = _survey(source, n, top, scale, middle, OF_LOGITS, WEIGH)
        high = tl.where(held >= goal, last, high)
        low = tl.where(held >= goal, low, following)
    return high


@triton.jit
def _goal_of(mass, top_p):  # type: ignore[no-untyped-def]
    return tl.maximum((mass.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def _cut(  # type: ignore[no-untyped-def]
    source, n, top, scale, highest, top_k, top_p, mass, OF_LOGITS: tl.constexpr
):
    """The ceiling of top_k (0: off), then of top_p over what that leaves."""
    ceiling = highest
    left = mass
    if top_k > 0:
        goal = top_k.to(tl.int64)
        ceiling = _least_ceiling(source, n, top, scale, highest, goal, OF_LOGITS, False)
        left, _last, _next = _survey(source, n, top, scale, ceiling, OF_LOGITS, True)
    if top_p < 1.0:
        goal = _goal_of(left, top_p)
        ceiling = _least_ceiling(source, n, top, scale, ceiling, goal, OF_LOGITS, True)
    return ceiling


@triton.jit
def find(  # type: ignore[no-untyped-def]
    logits,
    stride,
    row_of,
    inverse_temperature,
    top_k,
    top_p,
    min_p,
    maxima,
    counts,
    masses,
    candidates,
    ceilings,
    vocab_size,
    NUM_CHUNKS: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write every sampled row's ceiling: REACH, or what its processors make of it.

    Grid (rows). The candidates suffice where they are all kept and hold what is asked for; else
    the whole row is searched, with the same result.
    """
    begin(PDL)
    k = tl.program_id(0)
    row = tl.load(row_of + k)
    if row < 0:
        return
    scale = tl.load(inverse_temperature + row)
    most = tl.load(top_k + row)
    top = tl.max(chunk_maxima(maxima, k, NUM_CHUNKS, PADDED), 0)
    if is_sampled(scale, most, top):
        share = tl.load(top_p + row)
        least = tl.load(min_p + row)
        reach = tl.full((), _REACH, tl.float32)
        if least > 0:
            # A normal float32 of at most 1, so that there is a logarithm, of at most 0.
            reach = tl.minimum(reach, tl.abs(log(tl.minimum(tl.maximum(least, 1e-30), 1.0))))
        ceiling = tl.full((), _REACH, tl.float32).to(tl.int32, bitcast=True)
        if is_searched(most, share, vocab_size):
            most = tl.where(most < vocab_size, tl.maximum(most, 0), 0)
            found = tl.load(counts + k)
            mass = tl.load(masses + k)
            near = candidates + k.to(tl.int64) * _CAPACITY
            kept = tl.minimum(found, _CAPACITY)
            held, _last, _next = _survey(near, kept, top, scale, ceiling, False, True)
            enough = tl.where(most > 0, found >= most, held >= _goal_of(mass, share))
            if enough & (found <= _CAPACITY):
                ceiling = _cut(near, kept, top, scale, ceiling, most, share, mass, False)
            else:
                source = logits + k.to(tl.int64) * stride
                ceiling = _cut(source, vocab_size, top, scale, ceiling, most, share, mass, True)
        ceiling = tl.minimum(ceiling, reach.to(tl.int32, bitcast=True))
        tl.store(ceilings + k, ceiling)
