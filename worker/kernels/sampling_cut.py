"""Where top_k and top_p cut a row, on the device: as a key, which grows as logits fall.

A token's key is the bits of |z| as int32, z = (logit - largest) * inverse temperature, at most 0.
Keys order tokens as weights exp(z) do, so a cut is the largest key that stays, ties with it kept.
"""

from __future__ import annotations

import triton
import triton.language as tl

from worker.kernels.noise import REACH
from worker.kernels.processors import TILE, logits_of

BLOCK = 128  # tokens whose maximum is kept
CHUNK_BLOCKS = 16
CHUNK = BLOCK * CHUNK_BLOCKS  # tokens that are looked at together
BINS = 1024  # by |z|: the first also holds all that is nearer, the last all that is farther
CAPACITY = 4096  # tokens of a row that may lie at its cut, at most
MAX_VOCAB_SIZE = 2**18
assert CHUNK == TILE
_BLOCK = tl.constexpr(BLOCK)
_CHUNK_BLOCKS = tl.constexpr(CHUNK_BLOCKS)
_CHUNK = tl.constexpr(CHUNK)
_BINS = tl.constexpr(BINS)
_CAPACITY = tl.constexpr(CAPACITY)
_REACH = tl.constexpr(REACH)
_TILE = tl.constexpr(1024)
_ROW_TILE = tl.constexpr(TILE)
_RANKED = tl.constexpr(256)  # so few tokens are compared each with each
_AT_ONCE = tl.constexpr(8)
_NO_KEY = tl.constexpr(0x7F800000)  # infinity's, whose weight is 0; above every cut
# Weights are added as multiples of 2**-44, in any order: 2**18 of them do not overflow.
_UNIT = tl.constexpr(2.0**44)


@triton.jit
def keys_of(logits, top, scale):  # type: ignore[no-untyped-def]
    """Keys of float32 logits; `_NO_KEY` of -inf."""
    return tl.abs((logits - top) * scale).to(tl.int32, bitcast=True)


@triton.jit
def key_of_reach():  # type: ignore[no-untyped-def]
    """The largest key of a token that can be drawn."""
    return tl.full((), _REACH, tl.float32).to(tl.int32, bitcast=True)


@triton.jit
def weights_of(keys):  # type: ignore[no-untyped-def]
    """exp(z) in units of 2**-44, int64; keys up to `_NO_KEY`."""
    return (tl.exp(-keys.to(tl.float32, bitcast=True)) * _UNIT).to(tl.int64)


@triton.jit
def bins_of(keys, near, step):  # type: ignore[no-untyped-def]
    """The bin of each key, which never falls as keys grow; `step` bins per unit begin at `near`."""
    place = (keys.to(tl.float32, bitcast=True) - near) * step
    return tl.minimum(tl.maximum(place, 0.0), _BINS - 1.0).to(tl.int32)


@triton.jit
def keys_of_bins(first, last, near, step):  # type: ignore[no-untyped-def]
    """The least and the largest key, but for some more, of those in bins and within REACH."""
    low = tl.where(first > 1, near + (first - 1) / step, 0.0)
    high = tl.where(last < _BINS - 2, near + (last + 2) / step, _REACH)
    low, high = tl.maximum(low, 0.0), tl.minimum(high, _REACH)
    return low.to(tl.int32, bitcast=True), high.to(tl.int32, bitcast=True)


@triton.jit
def is_greedy(scale, top_k):  # type: ignore[no-untyped-def]
    """Whether the largest logit is taken, without noise."""
    return (scale <= 0) | (top_k == 1)


@triton.jit
def is_limited(top_k, vocab_size):  # type: ignore[no-untyped-def]
    """Whether top_k takes part."""
    return (top_k > 0) & (top_k < vocab_size)


@triton.jit
def is_listed(top_k, NUM_BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whether a limit is so small that all tokens that may stay are listed, not counted in bins."""
    return (top_k > 0) & (top_k <= NUM_BLOCKS // 4)


@triton.jit
def pick(picked, k, wanted, NUM_BLOCKS: tl.constexpr, PADDED: tl.constexpr):  # type: ignore[no-untyped-def]
    """List row k's wanted blocks, in order, and return their number.

    All programs of a row write the same list, so that each may read it at once.
    """
    own = picked + k * NUM_BLOCKS
    count = wanted.to(tl.int32)
    tl.store(own + tl.cumsum(count, 0) - 1, tl.arange(0, PADDED), mask=wanted)
    tl.debug_barrier()
    return tl.sum(count, 0)


@triton.jit
def tokens_of(picked, k, tile, number, NUM_BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Ids [CHUNK] of a tile of the picked blocks; past all of them where none is."""
    i = tl.arange(0, _CHUNK)
    at = tile * _CHUNK_BLOCKS + i // _BLOCK
    blocks = tl.load(picked + k * NUM_BLOCKS + at, mask=at < number, other=1 << 20)
    return blocks * _BLOCK + i % _BLOCK


@triton.jit
def append(near_keys, near_ids, found, k, keys, tokens, inside):  # type: ignore[no-untyped-def]
    """Add the tokens `inside` to row k's list, in any order; what does not fit is only counted."""
    places = tl.atomic_add(found + k + tokens * 0, 1, mask=inside, sem="relaxed")
    fits = inside & (places < _CAPACITY)
    at = k.to(tl.int64) * _CAPACITY + places
    tl.store(near_keys + at, keys, mask=fits)
    tl.store(near_ids + at, tokens, mask=fits)


@triton.jit
def goal_of(mass, top_p):  # type: ignore[no-untyped-def]
    """The weight that a nucleus has to hold, of that of all its row's tokens."""
    return tl.maximum((mass.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def edge_of(masses, counts, k, top_k, top_p, near, step, is_far, limit):  # type: ignore[no-untyped-def]
    """The first and last bin of the cut: those before stay, those behind go.

    Returns:
        These two, BINS and -1 where nothing is cut within REACH; number and weight of what lies
        before the first; the weight of all. A top_k of 0 is off.
    """
    i = tl.arange(0, _BINS)
    mass = tl.load(masses + k * _BINS + i)
    held = tl.cumsum(mass, 0)
    total = tl.sum(mass, 0)
    number = tl.zeros((_BINS,), tl.int32)
    left = total
    last = tl.full((), _BINS - 1, tl.int32)
    if top_k > 0:
        number = tl.load(counts + k * _BINS + i)
        last = tl.sum((tl.cumsum(number, 0) < top_k).to(tl.int32), 0)
        left = tl.sum(tl.where(i < last, mass, 0), 0)  # at least: the last may stay in part
    first = last
    if top_p < 1.0:
        first = tl.minimum(tl.sum((held < goal_of(left, top_p)).to(tl.int32), 0), last)
        last = tl.where(top_k > 0, last, first)
    # Where the last bin begins at REACH, nothing in it is drawn.
    last = tl.minimum(last, _BINS - 1 - is_far.to(tl.int32))
    first = tl.where(is_far, first, tl.minimum(first, _BINS - 1))
    is_cut = (first <= last) & (bins_of(limit, near, step) >= first)
    base_number = tl.sum(tl.where(i < first, number, 0), 0)
    base_mass = tl.sum(tl.where(i < first, mass, 0), 0)
    first = tl.where(first <= last, first, _BINS)
    return first, tl.where(is_cut, last, -1), base_number, base_mass, total


@triton.jit
def _survey(  # type: ignore[no-untyped-def]
    source, n, top, scale, ceiling, how, OF_LOGITS: tl.constexpr, WEIGH: tl.constexpr
):
    """What keys up to `ceiling` hold (weights, or their number), the largest, the next one."""
    TILE: tl.constexpr = _ROW_TILE if OF_LOGITS else _TILE
    held = tl.zeros((TILE,), tl.int64)
    last = tl.zeros((TILE,), tl.int32)
    following = tl.full((TILE,), _NO_KEY, tl.int32)
    for start in range(0, n, TILE):
        i = start + tl.arange(0, TILE)
        if OF_LOGITS:
            x = logits_of(source, i, tl.arange(0, TILE), how, n)
            keys = keys_of(x, top, scale)
        else:
            keys = tl.load(source + i, mask=i < n, other=_NO_KEY, cache_modifier=".cg")
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
    source, n, top, scale, lowest, highest, goal, how, OF_LOGITS: tl.constexpr, WEIGH: tl.constexpr
):
    """The least key from `lowest` up to which keys hold `goal`; `highest` where none does.

    Bisection between keys that occur, so it takes about log2 of the number of distinct ones.
    """
    held, last, following = _survey(source, n, top, scale, highest, how, OF_LOGITS, WEIGH)
    high = tl.where(held >= goal, last, highest)
    low = tl.where(held >= goal, lowest, highest)
    while low < high:
        middle = low + (high - low) // 2
        held, last, following = _survey(source, n, top, scale, middle, how, OF_LOGITS, WEIGH)
        high = tl.where(held >= goal, last, high)
        low = tl.where(held >= goal, low, following)
    return high


@triton.jit
def cut(  # type: ignore[no-untyped-def]
    source,
    n,
    top,
    scale,
    lowest,
    highest,
    top_k,
    top_p,
    base_number,
    base_mass,
    total,
    how,
    OF_LOGITS: tl.constexpr,
):
    """The largest key that stays: of top_k (0: off), then of top_p over what that leaves.

    `source` holds `n` keys, or a whole row's logits, to be read as `how` says, beside what the
    bases stand for, whose keys are smaller. The cut lies between `lowest` and `highest`, or is
    the latter.
    """
    ceiling = highest
    left = total
    if top_k > 0:
        goal = (top_k - base_number).to(tl.int64)
        ceiling = _least_ceiling(
            source, n, top, scale, lowest, highest, goal, how, OF_LOGITS, False
        )  # fmt: skip
        left, _last, _next = _survey(source, n, top, scale, ceiling, how, OF_LOGITS, True)
        left += base_mass
    if top_p < 1.0:
        goal = goal_of(left, top_p) - base_mass
        ceiling = _least_ceiling(source, n, top, scale, lowest, ceiling, goal, how, OF_LOGITS, True)
    return ceiling


@triton.jit
def cut_of_few(keys, n, top_k, top_p, base_number, base_mass, total):  # type: ignore[no-untyped-def]
    """What `cut` gives, for up to _RANKED keys: each token's rank by counting."""
    i = tl.arange(0, _RANKED)
    own = tl.load(keys + i, mask=i < n, other=_NO_KEY, cache_modifier=".cg")
    numbers = tl.zeros((_RANKED, _AT_ONCE), tl.int32)
    masses = tl.zeros((_RANKED, _AT_ONCE), tl.int64)
    for start in range(0, n, _AT_ONCE):
        j = start + tl.arange(0, _AT_ONCE)
        other = tl.load(keys + j, mask=j < n, other=_NO_KEY, cache_modifier=".cg")
        is_before = (other[None, :] <= own[:, None]) & (j < n)[None, :]
        numbers += is_before.to(tl.int32)
        masses += tl.where(is_before, weights_of(other)[None, :], 0)
    number = base_number + tl.sum(numbers, 1)
    mass = base_mass + tl.sum(masses, 1)
    ceiling = key_of_reach()
    left = total
    if top_k > 0:
        ceiling = tl.min(tl.where((i < n) & (number >= top_k), own, ceiling), 0)
        left = tl.max(tl.where((i < n) & (own <= ceiling), mass, base_mass), 0)
    if top_p < 1.0:
        goal = goal_of(left, top_p)
        ceiling = tl.min(tl.where((i < n) & (mass >= goal), tl.minimum(own, ceiling), ceiling), 0)
    return ceiling
