"""From logits to token ids on the device, the semantics being worker.sampling.sample's.

Five kernels: the largest logit of each chunk of tokens; the likely candidates of rows that use
top_k or top_p; those rows' cut; noise over the chunks that the cut leaves; the choice. Greedy
rows leave the middle three at once. Weights are added as integers, so their sums have no order,
and everything else is reduced row by row: neighbours and the number of rows change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from worker.kernels import sampling_cut as cut
from worker.kernels.launch import begin, launch_options
from worker.kernels.noise import gumbel, hash_tokens, row_keys
from worker.kernels.sampling_cut import (
    CAPACITY,
    CHUNK,
    MAX_VOCAB_SIZE,
    chunk_maxima,
    is_sampled,
    keys_of,
)
from worker.messages import SamplingParams
from worker.sampling import UNUSABLE, sample

_PROGRAMS = 2048  # about what an H200 holds at once; each takes every n-th chunk of its row
_UNUSABLE = tl.constexpr(UNUSABLE)
_CHUNK = tl.constexpr(CHUNK)
_NO_ID = tl.constexpr(2**31 - 1)


@dataclass(frozen=True, kw_only=True)
class SampleInputs:
    """How to sample each kept row of logits, on the device."""

    row_of: torch.Tensor  # int32 [capacity], index into the arrays per batch row; -1: not sampled
    positions: torch.Tensor  # int32 [capacity], absolute index, in its sequence, of the choice
    # Of each batch row:
    inverse_temperature: torch.Tensor  # float32 [max_rows]; 0: greedy
    top_k: torch.Tensor  # int32 [max_rows], 0: off, 1: greedy
    top_p: torch.Tensor  # float32 [max_rows], 1 or more: off
    min_p: torch.Tensor  # float32 [max_rows], up to 0: off
    seed_low: torch.Tensor  # int32 [max_rows], bits of the 64-bit seed
    seed_high: torch.Tensor  # int32 [max_rows]


@dataclass(frozen=True, kw_only=True)
class SampleScratch:
    """What the kernels leave each other, at addresses that a captured graph keeps."""

    maxima: torch.Tensor  # float32 [max_kept, num_chunks]; +inf where a chunk holds NaN or +inf
    scores: torch.Tensor  # float32 [max_kept, num_chunks], the best with noise
    ids: torch.Tensor  # int32 [max_kept, num_chunks], of the maximum; of sampled rows, of the score
    counts: torch.Tensor  # int32 [max_kept], candidates found
    masses: torch.Tensor  # int64 [max_kept], all tokens' weights
    candidates: torch.Tensor  # int32 [max_kept, CAPACITY], keys in no order
    ceilings: torch.Tensor  # int32 [max_kept], the largest key that may be drawn

    @classmethod
    def allocate(cls, max_kept: int, vocab_size: int, device: torch.device) -> SampleScratch:
        """Scratch of up to `max_kept` rows of logits, about 32 KiB each."""

        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.empty(max_kept, *shape, dtype=dtype, device=device)

        num_chunks = triton.cdiv(vocab_size, CHUNK)
        return cls(
            maxima=empty(num_chunks, dtype=torch.float32),
            scores=empty(num_chunks, dtype=torch.float32),
            ids=empty(num_chunks),
            counts=empty(),
            masses=empty(dtype=torch.int64),
            candidates=empty(CAPACITY),
            ceilings=empty(),
        )


def sample_rows(
    logits: torch.Tensor,
    inputs: SampleInputs,
    scratch: SampleScratch,
    out: torch.Tensor,
    *,
    vocab_size: int,
) -> None:
    """Choose a token per row of logits; rows whose `row_of` is -1 are left as they are.

    Args:
        logits: [num_kept, at least vocab_size] bfloat16, float16 or float32, unit column stride;
            left as they are.
        inputs: Of at least num_kept rows.
        scratch: Of at least num_kept rows and exactly `vocab_size`.
        out: int32 [num_kept]: ids; -1 where a row holds NaN or +inf, or nothing but -inf.
        vocab_size: Ids from here on are padding of the model, never read.
    """
    num_kept, num_chunks = logits.shape[0], triton.cdiv(vocab_size, CHUNK)
    _check(logits, inputs, scratch, out, vocab_size)
    if not num_kept:
        return
    grid = (num_kept, max(1, min(num_chunks, _PROGRAMS // num_kept)))
    padded = triton.next_power_of_2(num_chunks)
    logits_and_stride = (logits, logits.stride(0))
    rows = (inputs.row_of, inputs.inverse_temperature, inputs.top_k)
    found = (scratch.counts, scratch.masses, scratch.candidates)
    early = launch_options(logits.device)
    sizes = {"NUM_CHUNKS": num_chunks, "PADDED": padded, "enable_fp_fusion": False, **early}
    _scan[grid](
        *logits_and_stride,
        inputs.row_of,
        scratch.maxima,
        scratch.ids,
        scratch.counts,
        scratch.masses,
        vocab_size,
        NUM_CHUNKS=num_chunks,
        **early,
    )
    cut.collect[grid](
        *logits_and_stride,
        *rows,
        inputs.top_p,
        scratch.maxima,
        *found,
        vocab_size,
        MARGIN=cut.MARGIN,
        **sizes,
    )
    cut.find[(num_kept,)](
        *logits_and_stride,
        *rows,
        inputs.top_p,
        inputs.min_p,
        scratch.maxima,
        *found,
        scratch.ceilings,
        vocab_size,
        num_warps=16,
        **sizes,
    )
    _draw[grid](
        *logits_and_stride,
        *rows,
        inputs.positions,
        inputs.seed_low,
        inputs.seed_high,
        scratch.maxima,
        scratch.ceilings,
        scratch.scores,
        scratch.ids,
        vocab_size,
        **sizes,
    )
    _choose[(num_kept,)](
        *rows, scratch.maxima, scratch.scores, scratch.ids, out, num_warps=1, **sizes
    )


def reference_sample(
    logits: torch.Tensor, inputs: SampleInputs, *, vocab_size: int
) -> torch.Tensor:
    """What `sample_rows` writes, by worker.sampling.sample: int32 [num_kept]; -2: left as is."""
    ids = torch.full((logits.shape[0],), -2, dtype=torch.int32)
    rows = inputs.row_of[: logits.shape[0]].tolist()
    kept = [k for k, row in enumerate(rows) if row >= 0]
    if not kept:
        return ids
    positions = inputs.positions.tolist()
    params = _params(inputs)
    values = logits[:, :vocab_size].detach().cpu().float()
    ids[kept] = torch.tensor(
        sample(values[kept], [params[rows[k]] for k in kept], [positions[k] for k in kept]),
        dtype=torch.int32,
    )
    return ids


def _params(inputs: SampleInputs) -> list[SamplingParams]:
    columns = (
        inputs.inverse_temperature,
        inputs.top_k,
        inputs.top_p,
        inputs.min_p,
        inputs.seed_low,
        inputs.seed_high,
    )
    return [
        SamplingParams(
            temperature=1 / inverse if inverse > 0 else 0.0,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=(low % 2**32) | (high % 2**32) << 32,
            max_tokens=1,
        )
        for inverse, top_k, top_p, min_p, low, high in zip(
            *(column.tolist() for column in columns), strict=True
        )
    ]


def _check(
    logits: torch.Tensor,
    inputs: SampleInputs,
    scratch: SampleScratch,
    out: torch.Tensor,
    vocab_size: int,
) -> None:
    num_kept, width = logits.shape
    if not 0 < vocab_size <= min(width, MAX_VOCAB_SIZE):
        raise ValueError(f"a vocabulary of {vocab_size} with {width} logits a row; at most 2**18")
    if logits.stride(1) != 1 or logits.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError("logits of bfloat16, float16 or float32, each row contiguous")
    capacity = min(inputs.row_of.shape[0], inputs.positions.shape[0], out.shape[0])
    if num_kept > min(capacity, scratch.maxima.shape[0]) or not out.is_contiguous():
        raise ValueError(f"{num_kept} rows of logits are more than inputs, scratch or out hold")
    if scratch.maxima.shape[1] != triton.cdiv(vocab_size, CHUNK):
        raise ValueError("scratch of another vocabulary size")


@triton.jit
def _scan(  # type: ignore[no-untyped-def]
    logits,
    stride,
    row_of,
    maxima,
    ids,
    counts,
    masses,
    vocab_size,
    NUM_CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each chunk's largest logit and its lowest id; +inf where it holds NaN or +inf.

    Grid (rows, programs): each program takes every n-th chunk of its row.
    """
    begin(PDL)
    k = tl.program_id(0)
    if tl.load(row_of + k) < 0:
        return
    if tl.program_id(1) == 0:
        tl.store(counts + k, 0)
        tl.store(masses + k, 0)
    source = logits + k.to(tl.int64) * stride
    for chunk in range(tl.program_id(1), NUM_CHUNKS, tl.num_programs(1)):
        tokens = chunk * _CHUNK + tl.arange(0, _CHUNK)
        x = tl.load(source + tokens, mask=tokens < vocab_size, other=float("-inf"))
        x = x.to(tl.float32)
        x = tl.where(x == x, x, float("inf"))  # NaN alone differs from itself
        best = tl.max(x, 0)
        place = k * NUM_CHUNKS + chunk
        tl.store(maxima + place, best)
        tl.store(ids + place, tl.min(tl.where(x == best, tokens, _NO_ID), 0))


@triton.jit
def _draw(  # type: ignore[no-untyped-def]
    logits,
    stride,
    row_of,
    inverse_temperature,
    top_k,
    positions,
    seed_low,
    seed_high,
    maxima,
    ceilings,
    scores,
    ids,
    vocab_size,
    NUM_CHUNKS: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each chunk's best score and its lowest id, of sampled rows, among keys up to the ceiling.

    Grid as `_scan`'s. A chunk whose maximum is cut costs nothing.
    """
    begin(PDL)
    k = tl.program_id(0)
    row = tl.load(row_of + k)
    if row < 0:
        return
    scale = tl.load(inverse_temperature + row)
    top = tl.max(chunk_maxima(maxima, k, NUM_CHUNKS, PADDED), 0)
    if is_sampled(scale, tl.load(top_k + row), top):
        ceiling = tl.load(ceilings + k)
        position = tl.load(positions + k)
        key_1, key_2 = row_keys(tl.load(seed_low + row), tl.load(seed_high + row), position)
        source = logits + k.to(tl.int64) * stride
        for chunk in range(tl.program_id(1), NUM_CHUNKS, tl.num_programs(1)):
            place = k * NUM_CHUNKS + chunk
            if keys_of(tl.load(maxima + place), top, scale) <= ceiling:
                tokens = chunk * _CHUNK + tl.arange(0, _CHUNK)
                x = tl.load(source + tokens, mask=tokens < vocab_size, other=float("-inf"))
                x = x.to(tl.float32)
                score = (x - top) * scale + gumbel(hash_tokens(tokens, key_1, key_2))
                score = tl.where(keys_of(x, top, scale) <= ceiling, score, float("-inf"))
                best = tl.max(score, 0)
                tl.store(scores + place, best)
                tl.store(ids + place, tl.min(tl.where(score == best, tokens, _NO_ID), 0))
            else:
                tl.store(scores + place, float("-inf"))


@triton.jit
def _choose(  # type: ignore[no-untyped-def]
    row_of,
    inverse_temperature,
    top_k,
    maxima,
    scores,
    ids,
    out,
    NUM_CHUNKS: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """The best chunk's id of each row, the lowest of equals. Grid (rows)."""
    begin(PDL)
    k = tl.program_id(0)
    row = tl.load(row_of + k)
    if row < 0:
        return
    scale = tl.load(inverse_temperature + row)
    value = chunk_maxima(maxima, k, NUM_CHUNKS, PADDED)
    top = tl.max(value, 0)
    if is_sampled(scale, tl.load(top_k + row), top):
        value = chunk_maxima(scores, k, NUM_CHUNKS, PADDED)
    i = tl.arange(0, PADDED)
    chosen = tl.load(ids + k * NUM_CHUNKS + i, mask=i < NUM_CHUNKS, other=_NO_ID)
    best = tl.min(tl.where(value == tl.max(value, 0), chosen, _NO_ID), 0)
    usable = (top > float("-inf")) & (top < float("inf"))
    tl.store(out + k, tl.where(usable, best, _UNUSABLE))
