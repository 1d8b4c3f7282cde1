"""Kernels around a forward against their references, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import random

import pytest
import torch

from worker.gpu.device_rows import Shape
from worker.gpu.staging import Stage
from worker.kernels.draft_step import DraftKernels
from worker.kernels.inputs import InputBuffers
from worker.kernels.processors import Asked
from worker.kernels.row_state import RESULT_WIDTH, Choices, RowState
from worker.kernels.step import StepKernels
from worker.kernels.step_reference import Row, reference_accept, reference_prepare

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZE, WIDTH, SLOTS = 16, 6, 7


class Rig:
    """Buffers of a small worker, full of random state."""

    def __init__(self, seed: int, num_slots: int = SLOTS) -> None:
        self.rng = random.Random(seed)
        self.stage = Stage(max_rows=num_slots, table_width=WIDTH, device=DEVICE)
        self.state = RowState.allocate(num_slots, WIDTH * SIZE + RESULT_WIDTH, 4000, DEVICE)
        generator = torch.Generator().manual_seed(seed)
        shape = self.state.tokens.shape
        self.state.tokens.copy_(torch.randint(1000, shape, generator=generator))
        self.buffers = InputBuffers(
            max_tokens=96,
            max_rows=num_slots,
            table_width=WIDTH,
            num_partial_floats=1,
            device=DEVICE,
        )
        for tensor in (self.buffers.input_ids, self.buffers.slots, self.buffers.short_tiles):
            tensor.fill_(-77)
        self.buffers.long_tiles.fill_(77)
        self.choices = Choices.allocate(96, DEVICE)
        self.kernels = StepKernels(
            self.state, self.stage.tables, block_size=SIZE, max_position=WIDTH * SIZE - 1
        )
        blocks = list(range(100))
        self.rng.shuffle(blocks)
        self.tables = [[blocks.pop() for _ in range(WIDTH)] for _ in range(num_slots)]

    def stage_rows(self, rows: list[Row]) -> Shape:
        """Send rows, whose tables are the rig's, in order."""
        host, shape = self.stage.next_host(), Shape()
        for index, row in enumerate(rows):
            shape.add(
                row.slot,
                index,
                row.count,
                row.first,
                num_kept=row.num_kept,
                is_short=row.is_short,
                num_prompt=row.num_prompt,
            )
            host.tables[index] = row.table
        shape.write(host.header, host.fields)
        self.stage.send(host, len(rows))
        return shape


def _rows(rig: Rig) -> list[Row]:
    """Decode rows of 1 to 9 tokens, then prompt chunks, some of which sample."""
    slots = rig.rng.sample(range(SLOTS), 5)
    rows = []
    for index, slot in enumerate(slots):
        table = rig.tables[slot]
        if index < 3:
            rig.state.num_tokens[slot] = rig.rng.randint(2, 60)
            count = rig.rng.randint(1, 9)
            row = Row(slot=slot, count=count, first=-1, num_kept=count, is_short=True, table=table)
        else:
            count = rig.rng.choice([1, 15, 16, 17, 31])
            first = rig.rng.choice([0, 3, 16, 40])
            samples = rig.rng.randint(0, 1)
            prompts = rig.rng.choice([0, rig.rng.randint(0, count - samples)])
            row = Row(
                slot=slot,
                count=count,
                first=first,
                num_kept=prompts + samples,
                is_short=False,
                table=table,
                num_prompt=prompts,
            )
        rows.append(row)
    return rows


@pytest.mark.parametrize("seed", range(4))
def test_prepare_lays_out_what_the_reference_does_and_pads_the_rest(seed: int) -> None:
    """Ids, positions, slots, kept tokens and tiles are the reference's; the rest is padding."""
    rig = Rig(seed)
    rows = _rows(rig)
    shape = rig.stage_rows(rows)
    inputs = rig.buffers.view(96, 96, short_height=16, has_long=True)
    rig.kernels.prepare(rig.stage.rows, inputs, rig.buffers, rig.choices)
    expected = reference_prepare(rows, rig.state, SIZE)
    count, kept = shape.num_tokens, shape.num_kept
    assert inputs.input_ids[:count].tolist() == expected.input_ids
    assert inputs.positions[:count].tolist() == expected.positions
    assert inputs.attention.slots[:count].tolist() == expected.slots
    assert inputs.keep[:kept].tolist() == expected.keep
    assert rig.choices.owners[:kept].tolist() == expected.owners
    assert rig.choices.row_of[:kept].tolist() == expected.row_of
    assert rig.choices.positions[:kept].tolist() == expected.choice_positions
    assert rig.choices.places[:kept].tolist() == expected.choice_places
    assert rig.stage.rows.bases[: len(rows)].tolist() == expected.bases
    assert (inputs.input_ids[count:] == 0).all()
    assert (inputs.attention.slots[count:] == -1).all()
    assert (inputs.keep[kept:] == 0).all()
    assert (rig.choices.row_of[kept:] == -1).all()
    assert (rig.choices.owners[kept:] == -1).all()
    short, long = inputs.attention.lists
    for tiles, wanted in ((short, expected.short_tiles), (long, expected.long_tiles)):
        columns = (tiles.rows, tiles.first_tokens, tiles.num_queries, tiles.first_positions)
        found = list(zip(*(column[: len(wanted)].tolist() for column in columns), strict=True))
        assert found == wanted
        assert (tiles.num_queries[len(wanted) :] == 0).all()


@pytest.mark.parametrize("seed", range(4))
def test_accept_keeps_drafts_while_they_equal_the_samples(seed: int) -> None:
    """State, counts and results move on as the reference says, for rows that sample alone."""
    rig = Rig(seed)
    rows = _rows(rig)
    shape = rig.stage_rows(rows)
    inputs = rig.buffers.view(96, 96, short_height=16, has_long=True)
    rig.kernels.prepare(rig.stage.rows, inputs, rig.buffers, rig.choices)
    expected = reference_prepare(rows, rig.state, SIZE)
    chosen: list[list[int]] = []
    for row, base in zip(rows, expected.bases, strict=True):
        drafts = rig.state.tokens[row.slot, base : base + max(0, row.num_kept - row.num_prompt - 1)]
        drafts = drafts.tolist()
        same = rig.rng.randint(0, len(drafts))
        ids = drafts[:same] + [rig.rng.randrange(2000, 3000) for _ in range(len(drafts) - same + 1)]
        if rig.rng.random() < 0.2:
            ids[-1] = -1
        chosen.append(ids[: row.num_kept - row.num_prompt])
    flat = [
        token
        for row, ids in zip(rows, chosen, strict=True)
        for token in [77] * row.num_prompt + ids
    ]
    rig.choices.ids[: len(flat)] = torch.tensor(flat, dtype=torch.int32, device=DEVICE)
    shape_of_marks = rig.state.marks.shape
    copy = RowState(
        tokens=rig.state.tokens.clone(),
        num_tokens=rig.state.num_tokens.clone(),
        marks=torch.randint(2**30, shape_of_marks, generator=torch.Generator().manual_seed(1))
        .int()
        .to(DEVICE),
    )
    results = torch.full((SLOTS, RESULT_WIDTH), -9, dtype=torch.int32, device=DEVICE)
    rig.stage.rows.failed[0] = 1
    rig.stage.rows.asked[Asked.CHANGES, ::2] = 1  # these rows' tokens are counted
    rig.state.marks.copy_(copy.marks)
    rig.kernels.accept(rig.stage.rows, rig.choices, results, capacity=SLOTS)
    for index, (row, base, ids) in enumerate(zip(rows, expected.bases, chosen, strict=True)):
        if not ids:
            assert (results[index] == -9).all()
            continue
        num_accepted, kept = reference_accept(copy, row.slot, base, ids)
        assert results[index, 0] == num_accepted
        assert results[index, 1 : 2 + num_accepted].tolist() == kept
        assert results[index, RESULT_WIDTH - 1] == (index == 0)
        for token in kept if index % 2 == 0 else []:
            copy.marks[row.slot, max(token, 0)] += 1
    assert torch.equal(rig.state.tokens, copy.tokens)
    assert torch.equal(rig.state.num_tokens, copy.num_tokens)
    assert torch.equal(rig.state.marks, copy.marks)
    assert shape.num_kept == len(flat)
    assert not rig.stage.rows.failed.any()


def test_a_long_chunk_of_a_prompt_keeps_all_of_its_logits() -> None:
    """More logits than a row's programs lay out at once."""
    rig = Rig(7, num_slots=1)
    rig.buffers = InputBuffers(
        max_tokens=320, max_rows=1, table_width=WIDTH, num_partial_floats=1, device=DEVICE
    )
    rig.choices = Choices.allocate(320, DEVICE)
    row = Row(
        slot=0,
        count=300,
        first=0,
        num_kept=299,
        is_short=False,
        table=rig.tables[0],
        num_prompt=298,
    )
    rig.stage_rows([row])
    inputs = rig.buffers.view(304, 304, short_height=2, has_long=True)
    rig.kernels.prepare(rig.stage.rows, inputs, rig.buffers, rig.choices)
    assert inputs.keep[:299].tolist() == list(range(1, 300))
    assert rig.choices.row_of[:304].tolist() == [-1] * 298 + [0] + [-1] * 5
    assert rig.choices.owners[:304].tolist() == [0] * 299 + [-1] * 5
    assert rig.choices.positions[:299].tolist() == list(range(2, 301))
    assert rig.choices.places[298] == 0


def test_the_drafts_loop_feeds_two_tokens_then_each_draft_until_a_row_has_its_own() -> None:
    """Rows of gamma 1, 3 and 2 get that many drafts, and no token after them is laid out."""
    rig = Rig(5)
    slots, gammas = [4, 1, 6], [1, 3, 2]
    for slot in slots:
        rig.state.num_tokens[slot] = rig.rng.randint(2, 60)
    lengths = [int(rig.state.num_tokens[slot]) for slot in slots]
    # Row 0 of the batch does not draft.
    batch = [2, *slots]
    rows = [
        Row(slot=slot, count=1, first=-1, num_kept=1, is_short=True, table=rig.tables[slot])
        for slot in batch
    ]
    host, shape = rig.stage.next_host(), Shape()
    for index, row in enumerate(rows):
        shape.add(row.slot, index, 1, -1, num_kept=1, is_short=True)
        host.tables[index] = row.table
    shape.write(host.header, host.fields, num_drafting=3)
    host.draft_rows[:3], host.draft_gammas[:3] = [1, 2, 3], gammas
    rig.stage.send(host, 4)
    rig.stage.rows.failed[1:3] = 1  # left by a step that broke off
    draft = DraftKernels(rig.kernels, rig.buffers, rig.choices)
    two = rig.buffers.view(8, 4, short_height=2, has_long=False, num_short=4)
    one = rig.buffers.view(4, 4, short_height=2, has_long=False, num_short=4)
    draft.first(rig.stage.rows, rig.stage.draft, two)
    for at, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
        assert two.input_ids[2 * at : 2 * at + 2].tolist() == (
            rig.state.tokens[slot, length - 2 : length].tolist()
        )
        assert two.positions[2 * at : 2 * at + 2].tolist() == [length - 2, length - 1]
        assert rig.choices.positions[at] == length
    assert two.keep.tolist() == [1, 3, 5, 7]
    assert rig.choices.row_of[:4].tolist() == [1, 2, 3, -1]
    assert rig.choices.places[:3].tolist() == [0, 0, 0]
    assert two.attention.lists[0].num_queries.tolist() == [2, 2, 2, 0]
    assert (two.attention.slots[6:] == -1).all()
    for step in range(3):
        ids = [100 * (step + 1) + at for at in range(4)]
        ids[2] = -1 if step == 1 else ids[2]  # of the row with gamma 2, its second: no number
        rig.choices.ids[:4] = torch.tensor(ids, dtype=torch.int32, device=DEVICE)
        draft.next(rig.stage.rows, rig.stage.draft, one)
        goes_on = [step + 1 < gamma for gamma in gammas]
        assert one.attention.lists[0].num_queries.tolist() == [*map(int, goes_on), 0]
        for at, on in enumerate(goes_on):
            slot, length = slots[at], lengths[at]
            block = rig.tables[slot][(length + step) // SIZE]
            place = block * SIZE + (length + step) % SIZE
            assert one.attention.slots[at] == (place if on else -1)
            if on:
                assert one.input_ids[at] == max(ids[at], 0)
                assert one.positions[at] == length + step
                assert rig.choices.places[at] == step + 1
    drafts = [
        rig.state.tokens[slot, length : length + gamma].tolist()
        for slot, length, gamma in zip(slots, lengths, gammas, strict=True)
    ]
    assert drafts == [[100], [101, 201, 301], [102, 0]]
    assert rig.stage.rows.failed.tolist()[:4] == [0, 0, 0, 1]


def test_a_worker_of_one_row_drafts_where_its_row_stands() -> None:
    """Forwards have two rows at least: the one that is nobody's leaves the other's tile alone."""
    rig = Rig(6, num_slots=1)
    rig.state.num_tokens[0] = 40
    host, shape = rig.stage.next_host(), Shape()
    shape.add(0, 0, 1, -1, num_kept=1, is_short=True)
    host.tables[0] = rig.tables[0]
    shape.write(host.header, host.fields, num_drafting=1)
    host.draft_rows[0], host.draft_gammas[0] = 0, 2
    rig.stage.send(host, 1)
    draft = DraftKernels(rig.kernels, rig.buffers, rig.choices)
    two = rig.buffers.view(4, 2, short_height=2, has_long=False, num_short=2)
    one = rig.buffers.view(2, 2, short_height=2, has_long=False, num_short=2)
    draft.first(rig.stage.rows, rig.stage.draft, two)
    tiles = two.attention.lists[0]
    assert tiles.num_queries.tolist() == [2, 0]
    assert (tiles.first_tokens[0], tiles.first_positions[0]) == (0, 38)
    rig.choices.ids[:2] = torch.tensor([7, 9], dtype=torch.int32, device=DEVICE)
    draft.next(rig.stage.rows, rig.stage.draft, one)
    tiles = one.attention.lists[0]
    assert tiles.num_queries.tolist() == [1, 0]
    assert (tiles.first_tokens[0], tiles.first_positions[0]) == (0, 40)
