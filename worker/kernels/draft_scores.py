"""How likely the draft's choices are, on the device; semantics: worker.sampling.log_probabilities.

The weights of each chunk of the vocabulary are added by themselves, and the chunks' sums in one
order, so neither neighbours nor the number of rows change a value.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from worker.kernels.processors import TILE, few_logits_of, logits_of, reading
from worker.kernels.row_state import MAX_CHOICES, RowState
from worker.kernels.sampling import SampleInputs, SampleScratch, params_of
from worker.kernels.sampling_cut import is_greedy
from worker.kernels.sampling_scan import FRAME
from worker.sampling import log_probabilities

MAX_DRAFTS = MAX_CHOICES - 1  # a power of two
_PROGRAMS = 1024  # of a launch, about
_FRAME = tl.constexpr(FRAME)


@triton.jit
def _scale_of(row, inverse_temperature, top_k):  # type: ignore[no-untyped-def]
    """A row's inverse temperature; a greedy one's is that of the plain softmax."""
    scale = tl.load(inverse_temperature + row)
    return tl.where(is_greedy(scale, tl.load(top_k + row)), 1.0, scale)


@triton.jit
def _add_weights(  # type: ignore[no-untyped-def]
    logits,
    stride,
    row_of,
    inverse_temperature,
    top_k,
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
    ids,
    frames,
    sums,
    vocab_size,
    NUM_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Each chunk's sum of exp(z), z = (logit - largest) * inverse temperature; grid (rows, any)."""
    k = tl.program_id(0)
    row = tl.load(row_of + k)
    chosen = tl.load(ids + k)
    if (row >= 0) & (chosen >= 0):
        top = tl.load(frames + k * _FRAME)
        scale = _scale_of(row, inverse_temperature, top_k)
        how = reading(
            k, row, asked, asked_stride, slots, places, positions,
            marks, marks_width, history, history_width, stage,
        )  # fmt: skip
        source = logits + k.to(tl.int64) * stride
        for chunk in range(tl.program_id(1), NUM_CHUNKS, tl.num_programs(1)):
            tokens = chunk * CHUNK + tl.arange(0, CHUNK)
            x = logits_of(source, tokens, tl.arange(0, CHUNK), how, vocab_size)
            weights = tl.exp((x - top) * scale)
            tl.store(sums + k * NUM_CHUNKS + chunk, tl.sum(weights, 0))


@triton.jit
def _add_score(  # type: ignore[no-untyped-def]
    logits,
    stride,
    row_of,
    inverse_temperature,
    top_k,
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
    ids,
    frames,
    sums,
    num_tokens,
    scores,
    vocab_size,
    NUM_CHUNKS: tl.constexpr,
    PADDED: tl.constexpr,
    MAX_DRAFTS: tl.constexpr,
):
    """Add the choice's log-probability to those of its row's drafts before it; grid (rows,)."""
    k = tl.program_id(0)
    row = tl.load(row_of + k)
    if row >= 0:
        slot = tl.load(slots + row)
        at = tl.load(positions + k) - tl.load(num_tokens + slot)
        chosen = tl.load(ids + k)
        is_usable = chosen >= 0
        top = tl.load(frames + k * _FRAME)
        scale = _scale_of(row, inverse_temperature, top_k)
        i = tl.arange(0, PADDED)
        mine = i < tl.where(is_usable, NUM_CHUNKS, 0)
        total = tl.sum(tl.load(sums + k * NUM_CHUNKS + i, mask=mine, other=0.0), 0)
        total = tl.where(is_usable, total, 1.0)
        how = reading(
            k, row, asked, asked_stride, slots, places, positions,
            marks, marks_width, history, history_width, stage,
        )  # fmt: skip
        own = few_logits_of(
            logits + k.to(tl.int64) * stride, tl.maximum(chosen, 0), how, vocab_size
        )
        z = (own - top) * scale
        # The largest weight is 1; its logarithm may round to less than 0, and no score may rise.
        score = tl.where(is_usable, tl.minimum(z - tl.log(total), 0.0), float("-inf"))
        to = scores + row * MAX_DRAFTS + at
        inside = (at >= 0) & (at < MAX_DRAFTS)
        before = tl.load(to - 1, mask=inside & (at > 0), other=0.0)
        tl.store(to, before + score.to(tl.float64), mask=inside)


class DraftScores:
    """Sums of log-probabilities of each row's drafts, up to each of them."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        """Allocate for `max_rows` rows, of a batch and of the draft's logits."""
        self._vocab_size, self._num_chunks = vocab_size, triton.cdiv(vocab_size, TILE)
        self._sums = torch.zeros(max_rows, self._num_chunks, dtype=torch.float32, device=device)
        # [max_rows, MAX_DRAFTS], by row of the batch. In float64 as on the CPU: sums of float32
        # then tie where the CPU's do.
        self.scores = torch.zeros(max_rows, MAX_DRAFTS, dtype=torch.float64, device=device)

    def add(
        self,
        logits: torch.Tensor,
        inputs: SampleInputs,
        scratch: SampleScratch,
        ids: torch.Tensor,
        state: RowState,
    ) -> None:
        """Score the `ids` just sampled: `inputs` as they were for it, `scratch` as it was left."""
        num_rows = len(logits)
        row = (logits, logits.stride(0), inputs.row_of, inputs.inverse_temperature, inputs.top_k)
        how = (*inputs.processing.arguments, scratch.stage)
        found = (ids, scratch.frames, self._sums)
        programs = max(1, min(self._num_chunks, _PROGRAMS // num_rows))
        _add_weights[(num_rows, programs)](
            *row,
            *how,
            *found,
            self._vocab_size,
            NUM_CHUNKS=self._num_chunks,
            CHUNK=TILE,
            num_warps=4,
        )
        _add_score[(num_rows,)](
            *row,
            *how,
            *found,
            state.num_tokens,
            self.scores,
            self._vocab_size,
            NUM_CHUNKS=self._num_chunks,
            PADDED=triton.next_power_of_2(self._num_chunks),
            MAX_DRAFTS=MAX_DRAFTS,
            num_warps=1,
        )


def reference_scores(
    logits: torch.Tensor, inputs: SampleInputs, ids: torch.Tensor, *, vocab_size: int
) -> list[float]:
    """The log-probability of each row's choice by the CPU; 0 where `row_of` is -1."""
    rows = inputs.row_of[: len(logits)].tolist()
    params, chosen = params_of(inputs), ids.tolist()
    values = logits[:, :vocab_size].detach().cpu().float()
    return [
        0.0 if row < 0 else log_probabilities(values[k : k + 1], [params[row]], [chosen[k]])[0]
        for k, row in enumerate(rows)
    ]
