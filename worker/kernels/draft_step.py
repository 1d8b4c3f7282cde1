"""The draft's loop on the device: two tokens of each row first, then the draft just chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from worker.kernels.inputs import ForwardInputs, InputBuffers
from worker.kernels.row_state import Choices, StagedRows
from worker.kernels.step import StepKernels


@dataclass(frozen=True, kw_only=True)
class DraftRows:
    """The rows of a step that draft."""

    rows: torch.Tensor  # int32 [max_rows], index of the batch's row
    gammas: torch.Tensor  # int32 [max_rows], drafts of each


@triton.jit
def _draft_inputs(  # type: ignore[no-untyped-def]
    draft,
    table,
    token,
    ids,
    position,
    num_new,
    blocks,
    input_ids,
    positions,
    slots,
    keep,
    row_of,
    choice_positions,
    choice_places,
    short_tiles,
    table_width,
    short_stride,
    max_position,
    row,
    num_known,
    BLOCK_SIZE: tl.constexpr,
    COUNT: tl.constexpr,
):
    """Lay out COUNT tokens from `position` on; num_new is COUNT, or 0 where they are padding.

    The row has num_known tokens and, behind them, drafts.
    """
    i = tl.arange(0, 2)
    mine = i < COUNT
    real = i < num_new
    at = position + i
    index = at // BLOCK_SIZE
    block = tl.load(blocks + index, mask=real & (index < table_width), other=-1)
    place = tl.where(block < 0, -1, block * BLOCK_SIZE + at % BLOCK_SIZE)
    tl.store(input_ids + token + i, ids.to(tl.int64), mask=mine)
    seen = tl.where(real, tl.minimum(at, max_position), 0)
    tl.store(positions + token + i, seen.to(tl.int64), mask=mine)
    tl.store(slots + token + i, place, mask=mine)
    tl.store(keep + draft, (token + COUNT - 1).to(tl.int64))
    tl.store(row_of + draft, tl.where(num_new > 0, row, -1))
    tl.store(choice_positions + draft, position + COUNT)
    tl.store(choice_places + draft, position + COUNT - num_known)
    tl.store(short_tiles + draft, table)
    tl.store(short_tiles + short_stride + draft, token)
    tl.store(short_tiles + 2 * short_stride + draft, num_new)
    tl.store(short_tiles + 3 * short_stride + draft, position)


@triton.jit
def _draft_first(  # type: ignore[no-untyped-def]
    draft_rows,
    draft_gammas,
    header,
    fields,
    ids,
    tokens,
    num_tokens,
    tables,
    input_ids,
    positions,
    slots,
    keep,
    row_of,
    choice_positions,
    choice_places,
    short_tiles,
    failed,
    table_width,
    state_width,
    fields_stride,
    short_stride,
    max_position,
    BLOCK_SIZE: tl.constexpr,
):
    """A drafting row's last two tokens: the draft may lack both, and refeeding one changes none."""
    draft = tl.program_id(0)
    real = draft < tl.load(header + 5)
    row = tl.load(draft_rows + draft, mask=real, other=0)
    slot = tl.load(fields + row)
    table = tl.load(fields + fields_stride + row)
    num_known = tl.load(num_tokens + slot)
    position = num_known - 2
    num_new = tl.where(real & (position >= 0), 2, 0)
    tl.store(failed + row, 0, mask=real)  # a step that broke off may have left a word of it
    i = tl.arange(0, 2)
    state = tokens + slot.to(tl.int64) * state_width + position
    _draft_inputs(
        draft,
        table,
        draft * 2,
        tl.load(state + i, mask=(i < num_new), other=0),
        position,
        num_new,
        tables + table.to(tl.int64) * table_width,
        input_ids,
        positions,
        slots,
        keep,
        row_of,
        choice_positions,
        choice_places,
        short_tiles,
        table_width,
        short_stride,
        max_position,
        row,
        num_known,
        BLOCK_SIZE,
        2,
    )


@triton.jit
def _draft_next(  # type: ignore[no-untyped-def]
    draft_rows,
    draft_gammas,
    header,
    fields,
    ids,
    tokens,
    num_tokens,
    tables,
    input_ids,
    positions,
    slots,
    keep,
    row_of,
    choice_positions,
    choice_places,
    short_tiles,
    failed,
    table_width,
    state_width,
    fields_stride,
    short_stride,
    max_position,
    BLOCK_SIZE: tl.constexpr,
):
    """Append a draft where its row still drafts, and lay out the next forward's one token."""
    draft = tl.program_id(0)
    real = draft < tl.load(header + 5)
    row = tl.load(draft_rows + draft, mask=real, other=0)
    slot = tl.load(fields + row)
    table = tl.load(fields + fields_stride + row)
    position = tl.load(choice_positions + draft)
    gamma = tl.load(draft_gammas + draft, mask=real, other=0)
    num_known = tl.load(num_tokens + slot)
    num_drafted = position - num_known
    drafts = real & (num_drafted < gamma) & (tl.load(row_of + draft) >= 0)
    chosen = tl.load(ids + draft, mask=drafts, other=0)
    token = tl.maximum(chosen, 0)
    tl.store(tokens + slot.to(tl.int64) * state_width + position, token, mask=drafts)
    tl.store(failed + row, 1, mask=drafts & (chosen < 0))
    goes_on = drafts & (num_drafted + 1 < gamma)
    _draft_inputs(
        draft,
        table,
        draft,
        tl.zeros((2,), tl.int32) + token,
        position,
        tl.where(goes_on, 1, 0),
        tables + table.to(tl.int64) * table_width,
        input_ids,
        positions,
        slots,
        keep,
        row_of,
        choice_positions,
        choice_places,
        short_tiles,
        table_width,
        short_stride,
        max_position,
        row,
        num_known,
        BLOCK_SIZE,
        1,
    )


class DraftKernels:
    """Launches the kernels for one set of buffers, those of the draft's forwards."""

    def __init__(self, step: StepKernels, buffers: InputBuffers, choices: Choices) -> None:
        """Share state and tables with the target's kernels."""
        self._step, self._buffers, self._choices = step, buffers, choices

    def first(
        self,
        rows: StagedRows,
        draft: DraftRows,
        inputs: ForwardInputs,
    ) -> None:
        """Lay out the draft's first forward: two tokens for each of inputs.num_kept rows."""
        self._launch(_draft_first, rows, draft, inputs)

    def next(
        self,
        rows: StagedRows,
        draft: DraftRows,
        inputs: ForwardInputs,
    ) -> None:
        """Append what the draft chose, and lay out its next forward of one token a row."""
        self._launch(_draft_next, rows, draft, inputs)

    def _launch(
        self, kernel: Any, rows: StagedRows, draft: DraftRows, inputs: ForwardInputs
    ) -> None:
        step, buffers, choices = self._step, self._buffers, self._choices
        kernel[(inputs.num_kept,)](
            draft.rows,
            draft.gammas,
            rows.header,
            rows.fields,
            choices.ids,
            step.state.tokens,
            step.state.num_tokens,
            step.tables,
            inputs.input_ids,
            inputs.positions,
            inputs.attention.slots,
            inputs.keep,
            choices.row_of,
            choices.positions,
            choices.places,
            buffers.short_tiles,
            rows.failed,
            step.tables.stride(0),
            step.state.tokens.stride(0),
            rows.fields.stride(0),
            buffers.short_tiles.stride(0),
            step.max_position,
            BLOCK_SIZE=step.block_size,
            num_warps=1,
        )
