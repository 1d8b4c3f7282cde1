"""Gumbel noise keyed by (seed, position, token): draft and target, whenever they ask, see the same.

Every operation works element by element in numpy, on one thread: no value depends on which
rows or tokens share a call. (torch's element-wise kernels would wait for a thread pool.)
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

Float32s = npt.NDArray[np.float32]
UInt32s = npt.NDArray[np.uint32]

_MASK_64 = 2**64 - 1
_TILE = 16_384  # tokens; a tile's two buffers stay in the second-level cache
_SPREAD = np.uint32(0x9E3779B1)  # odd, near 2**32 / golden ratio
# The shifts and factors of C. Wellons' "triple32" integer hash, found by his search for low bias.
_ROUNDS = ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB))
_LAST_SHIFT = np.uint32(14)
# v lies in (0, 1): float32 would round the largest values to 1, and 0 has no logarithm.
_LEAST, _MOST = np.float32(2.0**-32), np.float32(1 - 2.0**-24)


def keys(seed: int, position: int) -> tuple[int, int]:
    """Two 32-bit keys of a (64-bit seed, position)."""
    mixed = _mix(_mix(seed & _MASK_64) + position * 0x9E3779B97F4A7C15)
    return mixed & 0xFFFF_FFFF, mixed >> 32


def row(seed: int, position: int, vocab_size: int) -> Float32s:
    """Noise of all tokens, float32 [vocab_size], between -2.82 and 22.19."""
    key_1, key_2 = keys(seed, position)
    spread = _spread(vocab_size)
    noise = np.empty(vocab_size, np.float32)
    for start in range(0, vocab_size, _TILE):
        tile = slice(start, start + _TILE)
        noise[tile] = _gumbel(spread[tile], key_1, key_2)
    return noise


def of_tokens(seed: int, position: int, token_ids: npt.NDArray[np.intp]) -> Float32s:
    """Noise of some tokens, float32 [len(token_ids)]: the same values as in their row."""
    return _gumbel(token_ids.astype(np.uint32) * _SPREAD, *keys(seed, position))


def _gumbel(spread: UInt32s, key_1: int, key_2: int) -> Float32s:
    x = spread + np.uint32(key_1)  # a new array; all below is in place
    shifted = np.empty_like(x)
    for i, (shift, factor) in enumerate(_ROUNDS):
        x ^= np.right_shift(x, np.uint32(shift), out=shifted)
        x *= np.uint32(factor)
        if i == 0:
            x ^= np.uint32(key_2)
    x ^= np.right_shift(x, _LAST_SHIFT, out=shifted)
    # The top 31 bits. Counted from 0, not from 1, they resolve the small v that the likeliest
    # winners among rare tokens have; the other end would starve tokens below 1e-7.
    x >>= np.uint32(1)
    v = x.astype(np.float32)
    v *= np.float32(2.0**-31)
    np.clip(v, _LEAST, _MOST, out=v)
    np.negative(v, out=v)
    np.log1p(v, out=v)  # -E, E exponentially distributed
    np.negative(v, out=v)
    np.log(v, out=v)
    np.negative(v, out=v)
    return v


def _mix(x: int) -> int:
    """SplitMix64's finalizer (Steele, Lea and Flood 2014): any bit moves all of the output."""
    x &= _MASK_64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK_64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK_64
    return x ^ (x >> 31)


@lru_cache(maxsize=4)
def _spread(vocab_size: int) -> UInt32s:
    spread = np.arange(vocab_size, dtype=np.uint32) * _SPREAD
    spread.flags.writeable = False
    return spread
