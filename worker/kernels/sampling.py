"""From logits to token ids on the device, the semantics being worker.sampling.sample's.

Three kernels: the largest logits of blocks of tokens; greedy rows' choice, and what top_k and
top_p cut; noise over what they leave, and the choice. Weights are added as integers, so their
sums have no order, and everything else is reduced row by row: neighbours and the number of rows
change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from worker.kernels.processors import TILE, Processing
from worker.kernels.sampling_cut import BINS, CAPACITY, CHUNK, CHUNK_BLOCKS, MAX_VOCAB_SIZE
from worker.kernels.sampling_draw import draw
from worker.kernels.sampling_scan import FRAME, scan, sort_out
from worker.messages import SamplingParams
from worker.sampling import sample

_SCANNING = 2048  # programs, about what an H200 holds at once
_DRAWING = 1024  # of the other kernels, whose programs hold more and begin slowly
_MAX_PROGRAMS = 128  # of a row: 2**18 tokens are so many chunks


@dataclass(frozen=True, kw_only=True)
class SampleInputs:
    """How to sample each kept row of logits, on the device."""

    row_of: torch.Tensor  # int32 [capacity], index into the arrays per batch row; -1: not sampled
    processing: Processing  # of [capacity] kept rows, positions of their choices among it
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

    maxima: torch.Tensor  # float32 [max_kept, num_blocks]; +inf where one holds NaN or +inf
    sums: torch.Tensor  # float32 [max_kept, num_blocks], weights of a block beside its largest
    samples: torch.Tensor  # float32 [max_kept, num_blocks], the first logit
    masses: torch.Tensor  # int64 [max_kept, BINS], weights
    counts: torch.Tensor  # int32 [max_kept, BINS], tokens, where top_k asks for them
    frames: torch.Tensor  # float32 [max_kept, FRAME]
    picked: torch.Tensor  # int32 [max_kept, num_blocks], blocks that are looked at
    found: torch.Tensor  # int32 [max_kept], tokens listed
    near_keys: torch.Tensor  # int32 [max_kept, CAPACITY], of listed tokens, in no order
    near_ids: torch.Tensor  # int32 [max_kept, CAPACITY]
    arrivals: torch.Tensor  # int32 [max_kept], programs that have drawn
    scores: torch.Tensor  # float32 [max_kept, _MAX_PROGRAMS], the best with noise
    ids: torch.Tensor  # int32 [max_kept, _MAX_PROGRAMS], of the best score
    stage: torch.Tensor  # int32 [programs, TILE], of rows that are processed
    ceilings: torch.Tensor  # int32 [max_kept], the largest key that could be drawn; for tests

    @classmethod
    def allocate(cls, max_kept: int, vocab_size: int, device: torch.device) -> SampleScratch:
        """Scratch of up to `max_kept` rows of logits, about 60 KiB each, and 16 MiB."""

        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.empty(max_kept, *shape, dtype=dtype, device=device)

        num_blocks = triton.cdiv(vocab_size, CHUNK) * CHUNK_BLOCKS
        return cls(
            maxima=empty(num_blocks, dtype=torch.float32),
            sums=empty(num_blocks, dtype=torch.float32),
            samples=empty(num_blocks, dtype=torch.float32),
            masses=empty(BINS, dtype=torch.int64),
            counts=empty(BINS),
            frames=empty(FRAME, dtype=torch.float32),
            picked=empty(num_blocks),
            found=empty(),
            near_keys=empty(CAPACITY),
            near_ids=empty(CAPACITY),
            arrivals=empty(),
            scores=empty(_MAX_PROGRAMS, dtype=torch.float32),
            ids=empty(_MAX_PROGRAMS),
            stage=torch.empty(max(_SCANNING, max_kept), TILE, dtype=torch.int32, device=device),
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
    scanning = (num_kept, max(1, min(num_chunks, _SCANNING // num_kept)))
    drawing = (num_kept, max(1, min(num_chunks, _DRAWING // num_kept)))
    num_blocks = num_chunks * CHUNK_BLOCKS
    padded = triton.next_power_of_2(num_blocks)
    row = (logits, logits.stride(0), inputs.row_of, inputs.inverse_temperature)
    cuts = (inputs.top_k, inputs.top_p, *inputs.processing.arguments, scratch.stage)
    statistics = (scratch.maxima, scratch.sums, scratch.samples, scratch.masses, scratch.counts)
    near = (scratch.near_keys, scratch.near_ids)
    options = {
        "NUM_BLOCKS": num_blocks,
        "enable_fp_fusion": False,
    }
    # Three programs of 256 threads fit a multiprocessor's registers.
    wide = {"PADDED": padded, "num_warps": 8, "maxnreg": 80}
    scan[scanning](*row, *cuts, *statistics, scratch.found, scratch.arrivals, vocab_size, **options)
    sort_out[drawing](
        *row,
        *cuts,
        *statistics,
        scratch.frames,
        scratch.picked,
        scratch.found,
        *near,
        out,
        vocab_size,
        **wide,
        **options,
    )
    draw[drawing](
        *row,
        *cuts,
        inputs.min_p,
        inputs.seed_low,
        inputs.seed_high,
        scratch.maxima,
        scratch.masses,
        scratch.counts,
        scratch.frames,
        scratch.picked,
        scratch.found,
        scratch.arrivals,
        *near,
        scratch.scores,
        scratch.ids,
        scratch.ceilings,
        out,
        vocab_size,
        MAX_PROGRAMS=_MAX_PROGRAMS,
        **wide,
        **options,
    )


def reference_sample(
    logits: torch.Tensor, inputs: SampleInputs, *, vocab_size: int
) -> torch.Tensor:
    """What `sample_rows` writes, by worker.sampling.sample: int32 [num_kept]; -2: left as is.

    The logits are those that processors left, if any row's request has some.
    """
    ids = torch.full((logits.shape[0],), -2, dtype=torch.int32)
    rows = inputs.row_of[: logits.shape[0]].tolist()
    kept = [k for k, row in enumerate(rows) if row >= 0]
    if not kept:
        return ids
    positions = inputs.processing.positions.tolist()
    params = params_of(inputs)
    values = logits[:, :vocab_size].detach().cpu().float()
    ids[kept] = torch.tensor(
        sample(values[kept], [params[rows[k]] for k in kept], [positions[k] for k in kept]),
        dtype=torch.int32,
    )
    return ids


def params_of(inputs: SampleInputs) -> list[SamplingParams]:
    """The parameters of each batch row, as the CPU takes them."""
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
    capacity = min(inputs.row_of.shape[0], inputs.processing.positions.shape[0], out.shape[0])
    if num_kept > min(capacity, scratch.maxima.shape[0]) or not out.is_contiguous():
        raise ValueError(f"{num_kept} rows of logits are more than inputs, scratch or out hold")
    if scratch.maxima.shape[1] != triton.cdiv(vocab_size, CHUNK) * CHUNK_BLOCKS:
        raise ValueError("scratch of another vocabulary size")
