"""The shared Gumbel noise on the device: worker.sampling.noise, its reference, in Triton.

The integers are the same. The logarithms are written out in adds, multiplies and explicit fused
multiply-adds, so they have the same bits in every kernel and on every device.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import triton
import triton.language as tl

from worker.sampling import noise

# No two values of the noise lie further apart (22.19 + 2.82): a token this far below the largest
# logit, temperature applied, is never drawn.
REACH = 25.1

# SplitMix64's finalizer and increment, as in worker.sampling.noise; each needs all 64 bits.
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)
_INCREMENT = tl.constexpr(0x9E3779B97F4A7C15)
# Tokens' spread, and the factors of the "triple32" hash.
_SPREAD = tl.constexpr(0x9E3779B1)
_FACTOR_1 = tl.constexpr(0xED5AD4BB)
_FACTOR_2 = tl.constexpr(0xAC4C1B51)
_FACTOR_3 = tl.constexpr(0x31848BAB)
_LEAST = tl.constexpr(2.0**-32)
_MOST = tl.constexpr(1 - 2.0**-24)

# Logarithms of 2**e * m, m in [2/3, 4/3): e * log 2 + f + f**2 * P(f), f = m - 1. P is fitted to
# log1p by iteratively reweighted least squares (Lawson 1961): relative error below 3e-8.
_LOG_2 = tl.constexpr(0.6931471805599453)
_TWO_THIRDS = tl.constexpr(0x3F2AAAAB)  # bits of the float32 next above 2/3
_ONE = tl.constexpr(0x3F800000)
_EXPONENT = tl.constexpr(-0x800000)  # the sign and exponent bits
_P_0 = tl.constexpr(-0.49999937415122986)
_P_1 = tl.constexpr(0.33333197236061096)
_P_2 = tl.constexpr(-0.2500782012939453)
_P_3 = tl.constexpr(0.20011168718338013)
_P_4 = tl.constexpr(-0.1641596108675003)
_P_5 = tl.constexpr(0.13995808362960815)
_P_6 = tl.constexpr(-0.15388540923595428)
_P_7 = tl.constexpr(0.14026351273059845)


def reference_noise(
    seed: int, position: int, token_ids: npt.NDArray[np.intp]
) -> npt.NDArray[np.float32]:
    """What `gumbel(hash_tokens(token_ids, *row_keys(...)))` gives, within 1e-6."""
    return noise.of_tokens(seed, position, token_ids)


@triton.jit
def _mix(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    return x ^ (x >> 31)


@triton.jit
def row_keys(seed_low, seed_high, position):  # type: ignore[no-untyped-def]
    """Two uint32 keys of a seed, given as int32 bit patterns, and a position of at least 0."""
    low = seed_low.to(tl.uint32, bitcast=True).to(tl.uint64)
    high = seed_high.to(tl.uint32, bitcast=True).to(tl.uint64)
    mixed = _mix(_mix(low | (high << 32)) + position.to(tl.uint64) * _INCREMENT)
    return mixed.to(tl.uint32), (mixed >> 32).to(tl.uint32)


@triton.jit
def hash_tokens(token_ids, key_1, key_2):  # type: ignore[no-untyped-def]
    """31 random bits per int32 token id, as int32; keys are `row_keys`'s."""
    x = token_ids.to(tl.uint32, bitcast=True) * _SPREAD + key_1
    x = (x ^ (x >> 17)) * _FACTOR_1
    x ^= key_2
    x = (x ^ (x >> 11)) * _FACTOR_2
    x = (x ^ (x >> 15)) * _FACTOR_3
    x ^= x >> 14
    return (x >> 1).to(tl.int32, bitcast=True)


@triton.jit
def _log_of_parts(f, exponent):  # type: ignore[no-untyped-def]
    """log(2**exponent * (1 + f)), f in [-1/3, 1/3)."""
    p = tl.fma(f, _P_7, _P_6)
    p = tl.fma(p, f, _P_5)
    p = tl.fma(p, f, _P_4)
    p = tl.fma(p, f, _P_3)
    p = tl.fma(p, f, _P_2)
    p = tl.fma(p, f, _P_1)
    p = tl.fma(p, f, _P_0)
    return tl.fma(exponent.to(tl.float32), _LOG_2, tl.fma(f * f, p, f))


@triton.jit
def log(x):  # type: ignore[no-untyped-def]
    """The logarithm of positive, normal float32 values, within 1e-7 of itself or 2e-7."""
    bits = x.to(tl.int32, bitcast=True)
    shift = (bits - _TWO_THIRDS) & _EXPONENT
    f = (bits - shift).to(tl.float32, bitcast=True) - 1.0
    return _log_of_parts(f, shift >> 23)


@triton.jit
def log_of_rest(v):  # type: ignore[no-untyped-def]
    """log(1 - v), v in (0, 1): as exact in itself for the smallest v as for others."""
    bits = (1.0 - v).to(tl.int32, bitcast=True)
    shift = (bits - _TWO_THIRDS) & _EXPONENT
    scale = (-(shift - _ONE)).to(tl.float32, bitcast=True)  # 2**-exponent, 1 to 2**24
    # (1 - v) * scale - 1 from v itself: `scale - 1` and `v * scale` are exact.
    f = (scale - 1.0) - v * scale
    return _log_of_parts(f, shift >> 23)


@triton.jit
def gumbel(bits):  # type: ignore[no-untyped-def]
    """The noise of `hash_tokens`'s bits, float32, between -2.82 and 22.19."""
    v = bits.to(tl.float32) * 4.656612873077393e-10  # 2**-31
    v = tl.minimum(tl.maximum(v, _LEAST), _MOST)
    return -log(-log_of_rest(v))
