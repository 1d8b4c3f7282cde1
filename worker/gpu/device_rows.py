"""The host's mirror of the rows: what each slot was told, and how a plan becomes staged numbers."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import torch

from worker.engine.plan import Plan
from worker.engine.sequence import PlannedRow, Sequence
from worker.gpu.staging import (
    INVERSE_TEMPERATURE,
    MIN_P,
    NUM_SAMPLING,
    SEED_HIGH,
    SEED_LOW,
    TOP_K,
    TOP_P,
    HostStage,
)
from worker.kernels.attention_inputs import LONG_HEIGHT, SHORT_HEIGHTS
from worker.kernels.logprobs import MAX_TOP
from worker.kernels.processors import NUM_ASKED, Asked, marks_width, write_marks
from worker.kernels.row_state import Field, RowState
from worker.messages import SamplingParams
from worker.sampling.processors import inverse, is_asked, is_penalized
from worker.sampling.sampler import is_greedy


@dataclass(slots=True)
class Shape:
    """Sizes of a staged forward, without padding."""

    num_tokens: int = 0
    num_kept: int = 0
    num_short: int = 0
    num_long: int = 0
    short_height: int = SHORT_HEIGHTS[0]
    columns: list[list[int]] = field(default_factory=list)

    def add(
        self,
        slot: int,
        table: int,
        count: int,
        first: int,
        *,
        num_kept: int,
        is_short: bool,
        num_prompt: int = 0,
    ) -> None:
        """Add a row behind the others."""
        short = self.num_short if is_short else -1
        long = -1 if is_short else self.num_long
        place = (self.num_tokens, self.num_kept, num_kept, short, long)
        self.columns.append([slot, table, count, first, *place, -1, num_prompt])
        self.num_tokens += count
        self.num_kept += num_kept
        if is_short:
            self.num_short += 1
            while count > self.short_height:
                self.short_height *= 2
        else:
            self.num_long += -(-count // LONG_HEIGHT)

    def write(self, header: np.ndarray, fields: np.ndarray, num_drafting: int = 0) -> None:
        """Fill in a staged forward's header and fields."""
        rows = len(self.columns)
        header[:6] = (
            rows,
            self.num_tokens,
            self.num_kept,
            self.num_short,
            self.num_long,
            num_drafting,
        )
        if rows:
            fields[:, :rows] = np.array(self.columns, dtype=np.int32).T


class DeviceRows:
    """Knows which row each slot holds, and sends what the device lacks of it."""

    def __init__(self, state: RowState, *, table_width: int, vocab_size: int) -> None:
        """Start with slots that hold nothing; `vocab_size` is that of the state's marks."""
        num_slots = len(state.num_tokens)
        self._state = state
        self._loaded: list[tuple[Sequence, int] | None] = [None] * num_slots
        # By list, not by content: whoever changes more than a table's end makes a new list.
        self._sources: list[list[int] | None] = [None] * num_slots
        self._num_blocks = [0] * num_slots
        self._tables = np.full((num_slots, table_width), -1, dtype=np.int32)
        self._sampling = np.zeros((num_slots, NUM_SAMPLING), dtype=np.int32)
        self._asked = np.zeros((num_slots, NUM_ASKED), dtype=np.int32)
        self._changes_until = [0] * num_slots  # tokens; from then on logits stay as they are
        self._vocab_size = vocab_size

    def load(self, row: PlannedRow) -> None:
        """Send a row's tokens where its slot holds another's; keep its table up to date."""
        slot, sequence = row.slot, row.sequence
        held = self._loaded[slot]
        if held is None or held[0] is not sequence or held[1] != row.epoch:
            self._loaded[slot] = (sequence, row.epoch)
            self._upload(slot, 0, sequence.token_ids)
            self._sampling[slot] = _sampling(sequence.params)
            self._asked[slot] = asked_of(sequence)
            self._changes_until[slot] = _changes_until(sequence)
            if self._asked[slot, Asked.CHANGES]:
                self._upload_marks(slot, sequence)
        elif len(sequence.token_ids) >= self._changes_until[slot]:
            self._asked[slot, Asked.CHANGES] = 0
        table = sequence.block_table
        if self._sources[slot] is not table or self._num_blocks[slot] > len(table):
            self._sources[slot], self._num_blocks[slot] = table, 0
            self._tables[slot] = -1
        known = self._num_blocks[slot]
        if known < len(table):
            self._tables[slot, known : len(table)] = table[known:]
            self._num_blocks[slot] = len(table)

    def write(self, host: HostStage, slots: Seq[int]) -> int:
        """Stage tables and parameters of a batch's rows, in order; their fields are written.

        Returns:
            Reports that the step may write; `Asked.REPORT` says where each row's begin.
        """
        index, n = np.array(slots), len(slots)
        np.take(self._tables, index, axis=0, out=host.tables[:n])
        host.sampling[:, :n] = self._sampling[index].T
        asked = host.asked[:, :n]
        asked[:] = self._asked[index].T
        reports = (asked[Asked.NUM_TOP] >= 0) | (host.fields[Field.NUM_PROMPT, :n] > 0)
        if not reports.any():
            return 0
        counts = np.where(reports, host.fields[Field.NUM_KEPT, :n], 0)
        ends = np.cumsum(counts)
        asked[Asked.REPORT] = ends - counts
        return int(ends[-1])

    def write_drafts(self, slot: int, position: int, drafts: Seq[int]) -> None:
        """Send drafts that the host made; the row's length must be known to it."""
        self._upload(slot, position, drafts)

    def _upload_marks(self, slot: int, sequence: Sequence) -> None:
        """Send what a row that is processed knows of each token; the device counts on."""
        marks = self._state.marks
        pinned = marks.device.type == "cuda"
        source = torch.zeros(marks_width(self._vocab_size), dtype=torch.int32, pin_memory=pinned)
        token_ids = np.array(sequence.token_ids, np.int64)
        write_marks(
            source.numpy(),
            self._vocab_size,
            token_ids[: sequence.num_prompt_tokens],
            token_ids[sequence.num_prompt_tokens :],
            sequence.params.logit_bias,
            np.array(sorted(sequence.stop_ids), np.int64),
        )
        marks[slot].copy_(source, non_blocking=True)

    def _upload(self, slot: int, position: int, token_ids: Seq[int]) -> None:
        tokens = self._state.tokens
        pinned = tokens.device.type == "cuda"
        source = torch.tensor(token_ids, dtype=torch.int32, pin_memory=pinned)
        tokens[slot, position : position + len(token_ids)].copy_(source, non_blocking=True)


def shape_of(plan: Plan, num_drafts: Seq[int]) -> Shape:
    """The target's forward of a plan whose decode rows verify so many drafts each."""
    shape = Shape()
    for index, row in enumerate(plan.rows):
        if row.is_decode:
            count = 1 + num_drafts[index]
            shape.add(row.slot, index, count, row.first, num_kept=count, is_short=True)
        else:
            scored = len(row.scored)
            shape.add(
                row.slot,
                index,
                row.num_tokens,
                row.first,
                num_kept=scored + row.samples,
                is_short=False,
                num_prompt=scored,
            )
    return shape


def catch_up_of(plan: Plan) -> Shape:
    """The draft's forward over tokens that its cache lacks."""
    shape = Shape()
    for index, row in enumerate(plan.rows[: plan.num_decode_rows]):
        if row.num_catch_up:
            count, first = row.num_catch_up, row.draft_start
            shape.add(row.slot, index, count, first, num_kept=0, is_short=False)
    return shape


def force(shape: Shape, num_accepted: Seq[int]) -> None:
    """Take so many drafts of each row as accepted, whatever the target samples."""
    for row, count in zip(shape.columns, num_accepted, strict=False):
        row[Field.FORCED] = count


def asked_of(sequence: Sequence) -> np.ndarray:
    """Columns of `Asked` of a sequence's request; where its reports begin is each step's."""
    params = sequence.params
    assert max(params.num_logprobs, params.num_prompt_logprobs) <= MAX_TOP
    values = np.zeros(NUM_ASKED, dtype=np.int32)
    floats = values.view(np.float32)
    values[Asked.CHANGES] = is_asked(params)
    floats[Asked.INVERSE] = inverse(params.repetition_penalty)
    floats[Asked.REPETITION] = params.repetition_penalty
    floats[Asked.FREQUENCY] = params.frequency_penalty
    floats[Asked.PRESENCE] = params.presence_penalty
    values[Asked.MIN_LENGTH] = sequence.num_prompt_tokens + params.min_tokens
    values[Asked.NUM_TOP] = params.num_logprobs
    values[Asked.NUM_PROMPT_TOP] = params.num_prompt_logprobs
    return values


def _changes_until(sequence: Sequence) -> int:
    """Tokens from which on a request changes no logits any more."""
    params = sequence.params
    if params.logit_bias or is_penalized(params):
        return sequence.max_num_tokens
    return sequence.min_num_tokens


def _sampling(params: SamplingParams) -> np.ndarray:
    values = np.zeros(NUM_SAMPLING, dtype=np.int32)
    floats = values.view(np.float32)
    floats[INVERSE_TEMPERATURE] = 0.0 if is_greedy(params) else 1 / params.temperature
    floats[TOP_P], floats[MIN_P] = params.top_p, params.min_p
    values[TOP_K] = min(max(params.top_k, 0), 2**31 - 1)
    seed = params.seed & (2**64 - 1)
    values[[SEED_LOW, SEED_HIGH]] = np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32).view(
        np.int32
    )
    return values
