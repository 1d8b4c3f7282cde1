"""Log-probabilities of tokens and the likeliest ones, of logits before any processor.

One launch: programs add up the weights of chunks of the vocabulary and find the largest logit of
each block, and the last program of a row to arrive reports. A row of which nobody asks takes the
time that its programs need to see it. Chunks' sums are added in one order, so neither neighbours
nor the number of rows change a bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from worker.kernels.noise import log
from worker.kernels.processors import Asked, Processing
from worker.kernels.sampling_cut import BLOCK, CHUNK, CHUNK_BLOCKS

Int32s = npt.NDArray[np.int32]
Float32s = npt.NDArray[np.float32]

MAX_TOP = 20
# Of a report: the token's log-probability, then up to MAX_TOP of the likeliest, then their ids.
REPORT_WIDTH = 48
_TOP_IDS = 1 + MAX_TOP
_PROGRAMS = 1024  # of a launch, about
_AT_IDS = tl.constexpr(_TOP_IDS)
_BLOCK = tl.constexpr(BLOCK)
_CHUNK = tl.constexpr(CHUNK)
_CHUNK_BLOCKS = tl.constexpr(CHUNK_BLOCKS)
_WIDTH = tl.constexpr(REPORT_WIDTH)
_LOW = tl.constexpr(2**31 - 1)
_NO_KEY = tl.constexpr(-(2**63))


@dataclass(frozen=True, kw_only=True)
class ReportScratch:
    """What a row's programs leave each other, at addresses that a captured graph keeps."""

    tops: torch.Tensor  # float32 [max_kept, num_chunks], largest logits
    sums: torch.Tensor  # float32 [max_kept, num_chunks], weights beside the largest
    keys: torch.Tensor  # int64 [max_kept, num_blocks], of each block's best token
    arrivals: torch.Tensor  # int32 [max_kept], programs that are done; 0 between launches

    @classmethod
    def allocate(cls, max_kept: int, vocab_size: int, device: torch.device) -> ReportScratch:
        """Scratch of up to `max_kept` rows of logits, 10 KiB each for 150,000 ids."""
        num_chunks = triton.cdiv(vocab_size, CHUNK)
        shape, floats = (max_kept, num_chunks), torch.float32
        return cls(
            tops=torch.empty(shape, dtype=floats, device=device),
            sums=torch.empty(shape, dtype=floats, device=device),
            keys=torch.empty(max_kept, num_chunks * CHUNK_BLOCKS, dtype=torch.int64, device=device),
            arrivals=torch.zeros(max_kept, dtype=torch.int32, device=device),
        )


@triton.jit
def _keys_of(x, tokens, vocab_size):  # type: ignore[no-untyped-def]
    """int64 keys that grow with the float32 logit and, of equals, fall with the id."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)  # both zeros are equal
    rising = bits ^ ((bits >> 31) & _LOW)
    keys = (rising.to(tl.int64) << 32) | (-tokens + _LOW).to(tl.int64)
    return tl.where(tokens < vocab_size, keys, _NO_KEY)


@triton.jit
def _logit_of(key):  # type: ignore[no-untyped-def]
    rising = (key >> 32).to(tl.int32)
    return (rising ^ ((rising >> 31) & _LOW)).to(tl.float32, bitcast=True)


@triton.jit
def _report(  # type: ignore[no-untyped-def]
    logits,
    stride,
    owners,
    kept_at,
    num_prompts,
    asked,
    asked_stride,
    slots,
    positions,
    history,
    history_width,
    ids,
    tops,
    sums,
    keys,
    arrivals,
    reports,
    vocab_size,
    NUM_TOP: tl.constexpr,
    NUM_PROMPT_TOP: tl.constexpr,
    REPORT: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    PADDED_CHUNKS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Report row k of the logits where its request asks; grid (rows, programs)."""
    k = tl.program_id(0)
    row = tl.load(owners + k)
    if row < 0:
        return
    place = k - tl.load(kept_at + row)
    is_prompt = place < tl.load(num_prompts + row)
    most = tl.load(asked + NUM_TOP * asked_stride + row)
    prompt_most = tl.load(asked + NUM_PROMPT_TOP * asked_stride + row)
    most = tl.where(is_prompt, prompt_most, most)
    if most < 0:
        return
    source = logits + k.to(tl.int64) * stride
    for chunk in range(tl.program_id(1), NUM_CHUNKS, tl.num_programs(1)):
        blocks = chunk * _CHUNK_BLOCKS + tl.arange(0, _CHUNK_BLOCKS)
        tokens = blocks[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
        x = tl.load(source + tokens, mask=tokens < vocab_size, other=float("-inf")).to(tl.float32)
        x = tl.where(x == x, x, float("inf"))  # NaN alone differs from itself
        top = tl.max(tl.max(x, 1), 0)
        base = tl.where(tl.abs(top) < float("inf"), top, 0.0)
        tl.store(tops + k * NUM_CHUNKS + chunk, top)
        tl.store(sums + k * NUM_CHUNKS + chunk, tl.sum(tl.sum(tl.exp(x - base), 1), 0))
        best = tl.max(_keys_of(x, tokens, vocab_size), 1)
        tl.store(keys + k.to(tl.int64) * NUM_BLOCKS + blocks, best)
    # The barrier orders the program's stores before its arrival, the arrival orders them before
    # whatever the last comer reads.
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals + k, 1, sem="acq_rel", scope="gpu")
    if arrived == tl.num_programs(1) - 1:
        tl.store(arrivals + k, 0)
        i = tl.arange(0, PADDED_CHUNKS)
        at = k * NUM_CHUNKS + i
        mine = i < NUM_CHUNKS
        chunk_tops = tl.load(tops + at, mask=mine, other=float("-inf"), cache_modifier=".cg")
        chunk_sums = tl.load(sums + at, mask=mine, other=0.0, cache_modifier=".cg")
        top = tl.max(chunk_tops, 0)
        # The likeliest token's weight is 1 of it, so it has a logarithm, of at least 0.
        total = tl.sum(chunk_sums * tl.exp(chunk_tops - top), 0)
        rest = log(tl.where((total >= 1.0) & (total < float("inf")), total, 1.0))
        chosen = tl.load(ids + k)
        if is_prompt:
            own = history + tl.load(slots + row).to(tl.int64) * history_width
            chosen = tl.load(own + tl.load(positions + k))
        chosen = tl.minimum(tl.maximum(chosen, 0), vocab_size - 1)
        report = reports + (tl.load(asked + REPORT * asked_stride + row) + place) * _WIDTH
        own_logit = tl.load(source + chosen).to(tl.float32)
        own_value = tl.where(tl.abs(top) < float("inf"), own_logit - top - rest, float("nan"))
        tl.store(report, own_value.to(tl.int32, bitcast=True))
        j = tl.arange(0, PADDED)
        own_keys = keys + k.to(tl.int64) * NUM_BLOCKS
        left = tl.load(own_keys + j, mask=j < NUM_BLOCKS, other=_NO_KEY, cache_modifier=".cg")
        for n in range(0, tl.minimum(most, vocab_size)):
            key = tl.max(left, 0)
            token = -(key & _LOW).to(tl.int32) + _LOW
            value = _logit_of(key) - top - rest
            tl.store(report + 1 + n, value.to(tl.int32, bitcast=True))
            tl.store(report + _AT_IDS + n, token)
            block = token // _BLOCK
            tokens = block * _BLOCK + tl.arange(0, _BLOCK)
            x = tl.load(source + tokens, mask=tokens < vocab_size, other=float("-inf"))
            others = _keys_of(x.to(tl.float32), tokens, vocab_size)
            following = tl.max(tl.where(others < key, others, _NO_KEY), 0)
            left = tl.where(j == block, following, left)


def report_rows(
    logits: torch.Tensor,
    owners: torch.Tensor,
    fields: tuple[torch.Tensor, torch.Tensor],
    processing: Processing,
    scratch: ReportScratch,
    ids: torch.Tensor,
    reports: torch.Tensor,
    *,
    vocab_size: int,
) -> None:
    """Write the report of every kept row whose request asks for one; others are left alone.

    Args:
        logits: [num_kept, at least vocab_size] bfloat16, float16 or float32, unit column stride.
        owners: int32 [num_kept], rows of the batch; -1: padding.
        fields: int32 [max_rows] each, of a batch row: the first of its kept logits, and how
            many of these, before the others, are of a prompt's tokens.
        processing: Of the rows; a prompt's tokens are read from it.
        scratch: Of at least num_kept rows and exactly `vocab_size`.
        ids: int32 [num_kept], what was chosen of the others.
        reports: int32 [any, REPORT_WIDTH], values as float32 bits; a request's begin where
            `Asked.REPORT` says, in the order of its kept logits. NaN for the token where a row
            holds NaN or +inf, or nothing but -inf.
        vocab_size: Ids from here on are padding of the model, never read.
    """
    num_kept, num_chunks = len(logits), scratch.tops.shape[1]
    if num_kept > min(len(scratch.arrivals), len(owners), len(ids)):
        raise ValueError(f"{num_kept} rows of logits are more than scratch, owners or ids hold")
    if num_chunks != triton.cdiv(vocab_size, CHUNK) or logits.stride(1) != 1:
        raise ValueError("scratch of another vocabulary size, or rows that are not contiguous")
    if not num_kept:
        return
    programs = max(1, min(num_chunks, _PROGRAMS // num_kept))
    num_blocks = num_chunks * CHUNK_BLOCKS
    _report[(num_kept, programs)](
        logits,
        logits.stride(0),
        owners,
        *fields,
        processing.asked,
        processing.asked.stride(0),
        processing.slots,
        processing.positions,
        processing.tokens,
        processing.tokens.stride(0),
        ids,
        scratch.tops,
        scratch.sums,
        scratch.keys,
        scratch.arrivals,
        reports,
        vocab_size,
        NUM_TOP=int(Asked.NUM_TOP),
        NUM_PROMPT_TOP=int(Asked.NUM_PROMPT_TOP),
        REPORT=int(Asked.REPORT),
        NUM_CHUNKS=num_chunks,
        PADDED_CHUNKS=triton.next_power_of_2(num_chunks),
        NUM_BLOCKS=num_blocks,
        PADDED=triton.next_power_of_2(num_blocks),
        num_warps=4,
        enable_fp_fusion=False,
    )


def read_reports(reports: Int32s, num_top: int) -> tuple[Float32s, Int32s, Float32s]:
    """Copies of reports [n, REPORT_WIDTH]: tokens' [n], the likeliest's ids and values [n, k]."""
    values = reports.view(np.float32)
    ids = reports[:, _TOP_IDS : _TOP_IDS + num_top].copy()
    return values[:, 0].copy(), ids, values[:, 1 : 1 + num_top].copy()


def reference_report(
    logits: torch.Tensor, token_id: int, num_top: int
) -> tuple[float, list[int], list[float]]:
    """A token's log-probability, and ids and values of the likeliest, of logits [vocab_size]."""
    values = torch.log_softmax(logits.double().cpu(), 0)
    order = sorted(range(len(values)), key=lambda i: (-float(logits[i]), i))[:num_top]
    return float(values[token_id]), order, [float(values[i]) for i in order]
