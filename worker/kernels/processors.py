"""Logits as a request's processors leave them, made as they are read: worker.sampling.processors.

No processed logits are stored: every kernel of sampling reads through `logits_of`, in float32
whatever the model's type, from what the slot of the row knows of each token. A row that asks for
nothing is read as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

# A token's mark, int32: how often it is in the output; whether it is in the prompt; which bias it
# has, 0 for none; the sign bit where it would end the answer.
IN_PROMPT = 1 << 21
MAX_BIAS = 511  # entries of logit_bias
MAX_COUNT = IN_PROMPT - 1
_BIAS_SHIFT = 22
_NUM_BIAS = MAX_BIAS + 1  # behind a slot's marks: values as float32 bits; the first is unused
TILE = 2048  # token ids that a program reads at once
_LANES = tl.constexpr(256)  # of them that it processes at once
_TILE = tl.constexpr(TILE)
_LINE = 128  # marks, so that a slot's begin at the same alignment
_COUNT = tl.constexpr(MAX_COUNT)
_PROMPT = tl.constexpr(IN_PROMPT)
_SHIFT = tl.constexpr(_BIAS_SHIFT)
_BIASES = tl.constexpr(_NUM_BIAS)


class Asked(IntEnum):
    """Columns of what a staged row's request asks beside its sampling; int32 or float32 bits."""

    CHANGES = 0  # 1 where its logits are processed
    INVERSE = 1  # factor of positive logits of known tokens
    REPETITION = 2  # of others
    FREQUENCY = 3
    PRESENCE = 4
    MIN_LENGTH = 5  # tokens, prompt included, before one may end the answer
    NUM_TOP = 6  # alternatives reported of each token; -1: no report
    NUM_PROMPT_TOP = 7  # the same of the prompt's
    REPORT = 8  # index of the report of its first kept logits


NUM_ASKED = len(Asked)


@dataclass(frozen=True, kw_only=True)
class Processing:
    """What tells a kept row of logits how its request changes it."""

    asked: torch.Tensor  # int32 [NUM_ASKED, max_rows], of each batch row
    slots: torch.Tensor  # int32 [max_rows], of each batch row
    places: torch.Tensor  # int32 [capacity], drafts of its step before the choice
    positions: torch.Tensor  # int32 [capacity], absolute index, in its sequence, of the choice
    marks: torch.Tensor  # int32 [num_slots, marks_width(vocab_size)]
    tokens: torch.Tensor  # int32 [num_slots, width], of the rows, the step's drafts included

    @property
    def arguments(self) -> tuple[torch.Tensor | int, ...]:
        """As kernels take it, in the order of `reading`'s."""
        return (
            self.asked,
            self.asked.stride(0),
            self.slots,
            self.places,
            self.positions,
            self.marks,
            self.marks.stride(0),
            self.tokens,
            self.tokens.stride(0),
        )


def marks_width(vocab_size: int) -> int:
    """Of a slot's marks, int32s: a mark for each token, then the values of its logit_bias."""
    return -(-vocab_size // _LINE) * _LINE + _NUM_BIAS


def write_marks(
    marks: npt.NDArray[np.int32],
    vocab_size: int,
    prompt: npt.NDArray[np.int64],
    output: npt.NDArray[np.int64],
    bias: tuple[tuple[int, float], ...],
    ending_ids: npt.NDArray[np.int64],
) -> None:
    """Fill in a slot's marks.

    Args:
        marks: [marks_width(vocab_size)], zeros.
        vocab_size: Ids from here on have no mark, whoever names them.
        prompt: Token ids.
        output: Token ids generated so far.
        bias: (token id, added), no id twice, at most MAX_BIAS.
        ending_ids: What would end the answer.
    """
    assert len(bias) <= MAX_BIAS
    np.add.at(marks, output[output < vocab_size], 1)
    marks[prompt[prompt < vocab_size]] |= IN_PROMPT
    values = marks[-_NUM_BIAS:].view(np.float32)
    for entry, (token_id, value) in enumerate(bias, start=1):
        if token_id < vocab_size:
            marks[token_id] |= entry << _BIAS_SHIFT
            values[entry] = value
    marks[ending_ids[ending_ids < vocab_size]] |= np.int32(-(2**31))


@triton.jit
def reading(  # type: ignore[no-untyped-def]
    k, row, asked, asked_stride, slots, places, positions, marks, marks_width, tokens, tokens_width,
    stage,
):  # fmt: skip
    """How row k of logits is read, which is `row`'s of the batch."""
    return (
        tl.load(asked + row) != 0, k, row, asked, asked_stride, slots, places, positions,
        marks, marks_width, tokens, tokens_width, stage,
    )  # fmt: skip


@triton.jit
def logits_of(source, ids, at, how, vocab_size):  # type: ignore[no-untyped-def]
    """Float32 logits of int32 token ids, processed; -inf from `vocab_size` on.

    `ids` are TILE ones of any shape, `at` their index in [0, TILE). What is processed goes through
    memory, a few at a time: kept in registers, it would cost the rows that are not their speed.
    """
    if how[0]:
        program = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
        own = how[12] + program * _TILE
        tl.debug_barrier()  # all have read what the last call left
        tl.store(own + at, ids)
        tl.debug_barrier()
        for start in range(0, _TILE, _LANES):
            lane = own + start + tl.arange(0, _LANES)
            x = few_logits_of(source, tl.load(lane), how, vocab_size)
            tl.store(lane, x.to(tl.int32, bitcast=True))
        tl.debug_barrier()
        logits = tl.load(own + at).to(tl.float32, bitcast=True)
    else:
        logits = tl.load(source + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    return logits


@triton.jit
def few_logits_of(source, ids, how, vocab_size):  # type: ignore[no-untyped-def]
    """The same of a few ids, or of one, without a detour."""
    x = tl.load(source + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    if how[0]:
        x = _process(x, ids, how, vocab_size)
    return x


@triton.jit
def _process(x, ids, how, vocab_size):  # type: ignore[no-untyped-def]
    _, k, row, asked, stride, slots, places, positions, marks, width, tokens, tokens_width, _ = how
    # Loaded here, each time, so that rows that are not processed hold none of it.
    slot = tl.load(slots + row).to(tl.int64)
    place = tl.load(places + k)
    position = tl.load(positions + k)
    own = asked + row
    inverse = tl.load(own + stride).to(tl.float32, bitcast=True)
    repetition = tl.load(own + 2 * stride).to(tl.float32, bitcast=True)
    frequency = tl.load(own + 3 * stride).to(tl.float32, bitcast=True)
    presence = tl.load(own + 4 * stride).to(tl.float32, bitcast=True)
    min_length = tl.load(own + 5 * stride)
    own = marks + slot * width
    mark = tl.load(own + ids, mask=ids < vocab_size, other=0)
    entry = (mark >> _SHIFT) & (_BIASES - 1)
    bias = tl.load(own + width - _BIASES + entry, mask=entry > 0, other=0)
    x = tl.where(entry > 0, x + bias.to(tl.float32, bitcast=True), x)
    count = mark & _COUNT
    drafts = tokens + slot * tokens_width + position - place
    for i in range(0, place):
        count += (ids == tl.load(drafts + i)).to(tl.int32)
    is_output = count > 0
    is_known = is_output | ((mark & _PROMPT) != 0)
    x = tl.where(is_known, x * tl.where(x > 0, inverse, repetition), x)
    less = x - frequency * count.to(tl.float32)
    x = tl.where(is_output, less - presence, x)
    return tl.where((mark < 0) & (position < min_length), float("-inf"), x)
