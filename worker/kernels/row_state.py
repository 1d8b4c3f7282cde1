"""What the kernels around a forward read and write: slots' state, a batch's rows, its choices."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch

from worker.kernels.processors import marks_width

# Of a row: accepted drafts, up to 9 chosen ids; last, drafts verified, whether its draft failed.
RESULT_WIDTH = 16
MAX_CHOICES = 9
NUM_VERIFIED = 6  # of the header: where a decode row's drafts are selected from, how many


class Field(IntEnum):
    """Columns of a staged row, int32; offsets count from the forward's start."""

    SLOT = 0
    TABLE = 1  # its row of the block tables
    COUNT = 2  # input tokens
    FIRST = 3  # position of the first; -1: the last known token's, by device state
    TOKEN = 4  # index of its first token
    KEEP = 5  # index of its first kept logits
    NUM_KEPT = 6  # logits wanted, of its last tokens
    SHORT_TILE = 7  # -1: it has long tiles
    LONG_TILE = 8  # index of the first; -1: it has a short tile
    FORCED = 9  # drafts to take as accepted; -1: those that equal the target's samples
    NUM_PROMPT = 10  # of the kept logits, the first: of prompt tokens, of which nothing is chosen


NUM_FIELDS = len(Field)


@dataclass(frozen=True, kw_only=True)
class RowState:
    """What a row's slot holds between steps."""

    tokens: torch.Tensor  # int32 [num_slots, width]: prompt, output, and drafts beyond
    num_tokens: torch.Tensor  # int32 [num_slots], drafts left out
    marks: torch.Tensor  # int32 [num_slots, marks_width(vocab_size)]; of rows that are processed

    @classmethod
    def allocate(
        cls, num_slots: int, width: int, vocab_size: int, device: torch.device
    ) -> RowState:
        """Empty slots for rows of up to `width` tokens, drafts included, 4 bytes an id each."""
        return cls(
            tokens=torch.zeros(num_slots, width, dtype=torch.int32, device=device),
            num_tokens=torch.zeros(num_slots, dtype=torch.int32, device=device),
            marks=torch.zeros(num_slots, marks_width(vocab_size), dtype=torch.int32, device=device),
        )


@dataclass(frozen=True, kw_only=True)
class Choices:
    """Of every kept logit row: which row of the batch it is of, and what was chosen."""

    owners: torch.Tensor  # int32 [max_kept], that row; -1: padding
    row_of: torch.Tensor  # int32 [max_kept], the same where a token is chosen, else -1
    positions: torch.Tensor  # int32 [max_kept], of the token chosen, or of the prompt's
    places: torch.Tensor  # int32 [max_kept], drafts of its step before it
    ids: torch.Tensor  # int32 [max_kept]

    @classmethod
    def allocate(cls, max_kept: int, device: torch.device) -> Choices:
        """Room for `max_kept` choices; all are padding."""

        def filled() -> torch.Tensor:
            return torch.full((max_kept,), -1, dtype=torch.int32, device=device)

        return cls(
            owners=filled(),
            row_of=filled(),
            positions=filled(),
            places=filled(),
            ids=filled(),
        )


@dataclass(frozen=True, kw_only=True)
class StagedRows:
    """The rows of one forward as the host staged them, and scratch of their own."""

    # int32 [8]: rows, tokens, kept, short tiles, long tiles, drafting rows, drafts to be verified
    header: torch.Tensor
    fields: torch.Tensor  # int32 [NUM_FIELDS, max_rows]
    asked: torch.Tensor  # int32 [NUM_ASKED, max_rows]
    bases: torch.Tensor  # int32 [max_rows]: position of a row's first choice
    failed: torch.Tensor  # int32 [max_rows]: 1 where the draft's logits were no numbers
