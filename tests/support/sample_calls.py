"""Calls of the device's sampler, over poisoned scratch and output, for tests."""

from __future__ import annotations

import math
from dataclasses import fields

import numpy as np
import torch
import triton
import triton.language as tl

from worker.kernels.noise import gumbel, hash_tokens, log, row_keys
from worker.kernels.processors import NUM_ASKED, Processing, marks_width, reading
from worker.kernels.sampling import SampleInputs, SampleScratch, sample_rows
from worker.kernels.sampling_cut import cut, cut_of_few, key_of_reach, keys_of, weights_of
from worker.messages import SamplingParams
from worker.sampling import noise, sampler

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
POISON = -77  # what `out` holds before; no id and no verdict
GRID = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.3},
    {"temperature": 2.0},
    {"top_k": 1},
    {"top_k": 2},
    {"top_k": 50},
    {"top_k": 200},
    {"top_k": 2**31 - 1},
    {"top_p": 0.9},
    {"top_p": 0.999999},
    {"top_p": 1e-9},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 1.5, "top_k": 150, "top_p": 0.7},
    {"temperature": 0.05, "top_k": 50, "top_p": 0.9},
]


def params(**values: object) -> SamplingParams:
    """Parameters with a seed and max_tokens filled in."""
    return SamplingParams(**{"seed": 1, "max_tokens": 1, **values})  # type: ignore[arg-type]


def as_int32(value: int) -> int:
    """The int32 with the value's low 32 bits."""
    return (value + 2**31) % 2**32 - 2**31


def inputs_of(
    rows: list[SamplingParams], row_of: list[int], positions: list[int], device: torch.device
) -> SampleInputs:
    """Inputs on the device."""

    def column(values: list[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    def inverse(p: SamplingParams) -> float:
        return 0.0 if p.temperature <= sampler.GREEDY_UP_TO else 1 / p.temperature

    return SampleInputs(
        row_of=column(row_of, torch.int32),
        processing=unprocessed(len(rows), column(positions, torch.int32)),
        inverse_temperature=column([inverse(p) for p in rows], torch.float32),
        top_k=column([p.top_k for p in rows], torch.int32),
        top_p=column([p.top_p for p in rows], torch.float32),
        min_p=column([p.min_p for p in rows], torch.float32),
        seed_low=column([as_int32(p.seed) for p in rows], torch.int32),
        seed_high=column([as_int32(p.seed >> 32) for p in rows], torch.int32),
    )


def unprocessed(num_rows: int, positions: torch.Tensor) -> Processing:
    """Of rows that ask for nothing; what is not to be read is not there."""
    device, ints = positions.device, torch.int32
    return Processing(
        asked=torch.zeros(NUM_ASKED, num_rows, dtype=ints, device=device),
        slots=torch.full((num_rows,), 2**30, dtype=ints, device=device),
        places=torch.full_like(positions, 2**30),
        positions=positions,
        marks=torch.zeros(1, marks_width(1), dtype=ints, device=device),
        tokens=torch.zeros(1, 1, dtype=ints, device=device),
    )


def draw(
    logits: torch.Tensor,
    rows: list[SamplingParams],
    positions: list[int],
    *,
    vocab_size: int | None = None,
    row_of: list[int] | None = None,
) -> list[int]:
    """Ids from the kernels, over poisoned scratch and output."""
    vocab_size = vocab_size or logits.shape[1]
    device = logits.device
    row_of = list(range(len(rows))) if row_of is None else row_of
    scratch = SampleScratch.allocate(len(logits) + 1, vocab_size, device)
    for field in fields(scratch):
        tensor = getattr(scratch, field.name)
        tensor.fill_(math.nan if tensor.is_floating_point() else 2**30 + 5)
    out = torch.full((len(logits),), POISON, dtype=torch.int32, device=device)
    inputs = inputs_of(rows, row_of, positions, device)
    sample_rows(logits, inputs, scratch, out, vocab_size=vocab_size)
    return out.tolist()


def random_logits(num_rows: int, vocab_size: int, *, seed: int, scale: float) -> torch.Tensor:
    """Logits as a bfloat16 model gives them, many of them equal, on the device."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * scale
    return logits.to(torch.bfloat16).to(DEVICE)


def bits_and_noise(
    seed: int, position: int, tokens: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:
    """The device's hash bits and noise of tokens."""
    n = len(tokens)
    bits = torch.full((n,), POISON, dtype=torch.int32, device=DEVICE)
    values = torch.full((n,), math.nan, device=DEVICE)
    low, high, at, ids = (
        torch.tensor(column, dtype=torch.int32, device=DEVICE)
        for column in ([as_int32(seed)], [as_int32(seed >> 32)], [position], tokens)
    )
    grid = (triton.cdiv(n, 1024),)
    _noise_kernel[grid](low, high, at, ids, bits, values, n, BLOCK=1024, enable_fp_fusion=False)
    return bits, values


def gumbel_and_log(
    bits: torch.Tensor, magnitudes: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The device's noise of bits and logarithms of as many positive float32 values."""
    n = len(bits)
    values = torch.full((n,), math.nan, device=DEVICE)
    logs = torch.full((n,), math.nan, device=DEVICE)
    grid = (triton.cdiv(n, 1024),)
    _gumbel_kernel[grid](bits, values, magnitudes, logs, n, BLOCK=1024, enable_fp_fusion=False)
    return values, logs


def cuts(logits: torch.Tensor, p: SamplingParams) -> list[int]:
    """Where a row of up to 256 logits is cut: by ranks, by a search of keys, by one of logits."""
    n = len(logits)
    keys = torch.full((n,), POISON, dtype=torch.int32, device=DEVICE)
    got = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    _cut_kernel[(1,)](
        logits, keys, got, n, logits.max().item(), p.top_k, p.top_p, 256, enable_fp_fusion=False
    )
    return got.tolist()


def reference_bits(seed: int, position: int, tokens: np.ndarray) -> np.ndarray:
    """The 31 bits of worker.sampling.noise, in 64-bit integers cut to 32."""
    key_1, key_2 = noise.keys(seed, position)
    low = np.uint64(2**32 - 1)
    x = (tokens.astype(np.uint64) * np.uint64(noise._SPREAD) + np.uint64(key_1)) & low
    for i, (shift, factor) in enumerate(noise._ROUNDS):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor) & low
        x ^= np.uint64(key_2 if i == 0 else 0)
    return (x ^ (x >> np.uint64(noise._LAST_SHIFT))) >> np.uint64(1)


@triton.jit
def _noise_kernel(low, high, position, tokens, bits, values, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key_1, key_2 = row_keys(tl.load(low), tl.load(high), tl.load(position))
    hashed = hash_tokens(tl.load(tokens + i, mask=i < n, other=0), key_1, key_2)
    tl.store(bits + i, hashed, mask=i < n)
    tl.store(values + i, gumbel(hashed), mask=i < n)


@triton.jit
def _gumbel_kernel(bits, values, magnitudes, logs, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    one = tl.load(bits + i, mask=i < n, other=1)
    tl.store(values + i, gumbel(one), mask=i < n)
    x = tl.load(magnitudes + i, mask=i < n, other=1.0)
    tl.store(logs + i, log(x), mask=i < n)


@triton.jit
def _cut_kernel(logits, keys, out, n, top, top_k, top_p, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    own = keys_of(tl.load(logits + i, mask=i < n, other=float("-inf")).to(tl.float32), top, 1.0)
    tl.store(keys + i, own, mask=i < n)
    tl.debug_barrier()
    total = tl.sum(tl.where(i < n, weights_of(own), 0), 0)
    zero = tl.full((), 0, tl.int32)
    top_p = tl.full((), 0.0, tl.float32) + top_p
    top_k = zero + top_k
    reach = key_of_reach()
    none = total * 0
    how = reading(0, 0, out, 0, out, out, out, out, 0, out, 0, out)
    tl.store(out, cut_of_few(keys, n, top_k, top_p, zero, none, total))
    ceiling = cut(keys, n, top, 1.0, zero, reach, top_k, top_p, zero, none, total, how, False)
    tl.store(out + 1, ceiling)
    ceiling = cut(logits, n, top, 1.0, zero, reach, top_k, top_p, zero, none, total, how, True)
    tl.store(out + 2, ceiling)
