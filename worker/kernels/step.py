"""Around a forward: its inputs made from the rows' device state, and the state moved on.

A row's tokens lie in `tokens[slot]`, its length in `num_tokens[slot]`; only these kernels and
uploads of new rows write them. Where a decode row stands is therefore known without the host,
which plans a step while the one before it still runs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from worker.kernels.attention_inputs import LONG_HEIGHT
from worker.kernels.inputs import ForwardInputs, InputBuffers
from worker.kernels.row_state import RESULT_WIDTH, Choices, RowState, StagedRows

_BLOCK = 128
_PADDING = 1024


@triton.jit
def _prepare(  # type: ignore[no-untyped-def]
    fields,
    header,
    tokens,
    num_tokens,
    tables,
    input_ids,
    positions,
    slots,
    keep,
    owners,
    row_of,
    choice_positions,
    choice_places,
    short_tiles,
    long_tiles,
    bases,
    num_inputs,
    num_kept_inputs,
    num_short,
    num_long,
    table_width,
    state_width,
    fields_stride,
    short_stride,
    long_stride,
    max_position,
    row_capacity,
    BLOCK_SIZE: tl.constexpr,
    HEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
    PADDING: tl.constexpr,
):
    """Program r lays out row r; programs from `row_capacity` on fill in padding."""
    row = tl.program_id(0)
    num_rows = tl.load(header)
    if row >= row_capacity:
        i = (row - row_capacity) * PADDING + tl.arange(0, PADDING)
        pad = (i >= tl.load(header + 1)) & (i < num_inputs)
        tl.store(input_ids + i, tl.zeros((PADDING,), tl.int64), mask=pad)
        tl.store(positions + i, tl.zeros((PADDING,), tl.int64), mask=pad)
        tl.store(slots + i, tl.full((PADDING,), -1, tl.int32), mask=pad)
        pad = (i >= tl.load(header + 2)) & (i < num_kept_inputs)
        tl.store(keep + i, tl.zeros((PADDING,), tl.int64), mask=pad)
        tl.store(row_of + i, tl.full((PADDING,), -1, tl.int32), mask=pad)
        tl.store(owners + i, tl.full((PADDING,), -1, tl.int32), mask=pad)
        none = tl.zeros((PADDING,), tl.int32)
        pad = (i >= tl.load(header + 3)) & (i < num_short)
        tl.store(short_tiles + 2 * short_stride + i, none, mask=pad)
        pad = (i >= tl.load(header + 4)) & (i < num_long)
        tl.store(long_tiles + 2 * long_stride + i, none, mask=pad)
    elif row < num_rows:
        field = fields + row
        slot = tl.load(field)
        table = tl.load(field + fields_stride)
        count = tl.load(field + 2 * fields_stride)
        first = tl.load(field + 3 * fields_stride)
        token = tl.load(field + 4 * fields_stride)
        kept_at = tl.load(field + 5 * fields_stride)
        num_kept = tl.load(field + 6 * fields_stride)
        short = tl.load(field + 7 * fields_stride)
        long = tl.load(field + 8 * fields_stride)
        num_prompt = tl.load(field + 10 * fields_stride)
        first = tl.where(first < 0, tl.load(num_tokens + slot) - 1, first)
        state = tokens + slot.to(tl.int64) * state_width
        blocks = tables + table.to(tl.int64) * table_width
        i = tl.arange(0, BLOCK)
        for start in range(0, count, BLOCK):
            at = start + i
            real = at < count
            position = first + at
            tl.store(
                input_ids + token + at,
                tl.load(state + position, mask=real & (position < state_width), other=0).to(
                    tl.int64
                ),
                mask=real,
            )
            tl.store(
                positions + token + at, tl.minimum(position, max_position).to(tl.int64), mask=real
            )
            index = position // BLOCK_SIZE
            block = tl.load(blocks + index, mask=real & (index < table_width), other=-1)
            place = tl.where(block < 0, -1, block * BLOCK_SIZE + position % BLOCK_SIZE)
            tl.store(slots + token + at, place, mask=real)
        for start in range(0, num_kept, BLOCK):
            at = start + i
            wanted = at < num_kept
            last = count - num_kept + at
            tl.store(keep + kept_at + at, (token + last).to(tl.int64), mask=wanted)
            tl.store(owners + kept_at + at, tl.zeros((BLOCK,), tl.int32) + row, mask=wanted)
            tl.store(row_of + kept_at + at, tl.where(at < num_prompt, -1, row), mask=wanted)
            tl.store(choice_positions + kept_at + at, first + last + 1, mask=wanted)
            tl.store(choice_places + kept_at + at, at - num_prompt, mask=wanted)
        tl.store(bases + row, first + count - num_kept + num_prompt + 1)
        if short >= 0:
            tl.store(short_tiles + short, table)
            tl.store(short_tiles + short_stride + short, token)
            tl.store(short_tiles + 2 * short_stride + short, count)
            tl.store(short_tiles + 3 * short_stride + short, first)
        else:
            for tile in range(0, tl.cdiv(count, HEIGHT)):
                place = long_tiles + long + tile
                tl.store(place, table)
                tl.store(place + long_stride, token + tile * HEIGHT)
                tl.store(place + 2 * long_stride, tl.minimum(HEIGHT, count - tile * HEIGHT))
                tl.store(place + 3 * long_stride, first + tile * HEIGHT)


@triton.jit
def _accept(  # type: ignore[no-untyped-def]
    fields,
    header,
    ids,
    bases,
    tokens,
    num_tokens,
    marks,
    asked,
    failed,
    results,
    state_width,
    marks_width,
    fields_stride,
    WIDTH: tl.constexpr,
):
    """Keep drafts while they equal the target's samples, and one sample more (2408.07978)."""
    row = tl.program_id(0)
    if row < tl.load(header):
        field = fields + row
        slot = tl.load(field)
        kept_at = tl.load(field + 5 * fields_stride)
        num_kept = tl.load(field + 6 * fields_stride)
        forced = tl.load(field + 9 * fields_stride)
        num_prompt = tl.load(field + 10 * fields_stride)
        changes = tl.load(asked + row) != 0
        kept_at += num_prompt
        num_kept -= num_prompt
        base = tl.load(bases + row)
        state = tokens + slot.to(tl.int64) * state_width + base
        i = tl.arange(0, WIDTH)
        chosen = tl.load(ids + kept_at + i, mask=i < num_kept, other=-1)
        draft = tl.load(state + i, mask=i < num_kept - 1, other=-2)
        num_accepted = tl.min(tl.where((draft == chosen) & (i < num_kept - 1), WIDTH, i), 0)
        num_accepted = tl.where(forced >= 0, tl.minimum(forced, num_kept - 1), num_accepted)
        if num_kept > 0:
            tl.store(state + i, tl.maximum(chosen, 0), mask=i <= num_accepted)
            tl.store(num_tokens + slot, base + num_accepted + 1)
            if changes:  # its logits are processed: what it says is counted
                own = marks + slot.to(tl.int64) * marks_width
                said = i <= num_accepted
                tl.atomic_add(own + tl.maximum(chosen, 0), 1, mask=said, sem="relaxed")
            result = results + row * WIDTH
            tl.store(result + i, tl.zeros((WIDTH,), tl.int32) + num_accepted, mask=i == 0)
            tl.store(result + 1 + i, chosen, mask=i < num_kept)
            tl.store(result + WIDTH - 2, num_kept - 1)
            tl.store(result + WIDTH - 1, tl.load(failed + row))
            tl.store(failed + row, 0)


class StepKernels:
    """Launches the kernels for one set of buffers; all of it may be captured in a graph."""

    def __init__(
        self, state: RowState, tables: torch.Tensor, *, block_size: int, max_position: int
    ) -> None:
        """Take what all steps share.

        Args:
            state: The rows'.
            tables: int32 [max_rows, table_width], the batch's; -1 where a row has no block.
            block_size: Tokens of a block.
            max_position: Largest position that the model may be asked for.
        """
        self.state, self.tables = state, tables
        self.block_size, self.max_position = block_size, max_position

    def prepare(
        self, rows: StagedRows, inputs: ForwardInputs, buffers: InputBuffers, choices: Choices
    ) -> None:
        """Lay out a forward over the staged rows, padded to the inputs' sizes."""
        lists = inputs.attention.lists
        num_short = lists[0].capacity
        num_long = lists[1].capacity if len(lists) > 1 else 0
        capacity = min(inputs.num_tokens, buffers.max_rows)
        padded = max(inputs.num_tokens, inputs.num_kept, num_short, num_long)
        _prepare[(capacity + triton.cdiv(padded, _PADDING),)](
            rows.fields,
            rows.header,
            self.state.tokens,
            self.state.num_tokens,
            self.tables,
            inputs.input_ids,
            inputs.positions,
            inputs.attention.slots,
            inputs.keep,
            choices.owners,
            choices.row_of,
            choices.positions,
            choices.places,
            buffers.short_tiles,
            buffers.long_tiles,
            rows.bases,
            inputs.num_tokens,
            inputs.num_kept,
            num_short,
            num_long,
            self.tables.stride(0),
            self.state.tokens.stride(0),
            rows.fields.stride(0),
            buffers.short_tiles.stride(0),
            buffers.long_tiles.stride(0),
            self.max_position,
            capacity,
            BLOCK_SIZE=self.block_size,
            HEIGHT=LONG_HEIGHT,
            BLOCK=_BLOCK,
            PADDING=_PADDING,
            num_warps=4,
        )

    def accept(
        self, rows: StagedRows, choices: Choices, results: torch.Tensor, capacity: int
    ) -> None:
        """Move rows on by what was chosen; results int32 [max_rows, RESULT_WIDTH]."""
        _accept[(capacity,)](
            rows.fields,
            rows.header,
            choices.ids,
            rows.bases,
            self.state.tokens,
            self.state.num_tokens,
            self.state.marks,
            rows.asked,
            rows.failed,
            results,
            self.state.tokens.stride(0),
            self.state.marks.stride(0),
            rows.fields.stride(0),
            WIDTH=RESULT_WIDTH,
            num_warps=1,
        )
