"""The kernels around a forward in plain Python and torch: what `step.py` must compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from worker.kernels.attention_inputs import LONG_HEIGHT
from worker.kernels.row_state import RowState


@dataclass(frozen=True, kw_only=True)
class Row:
    """A staged row; fields as in `row_state.Field`."""

    slot: int
    count: int
    first: int
    num_kept: int
    is_short: bool
    table: Sequence[int]  # block ids
    num_prompt: int = 0


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One forward's inputs, without padding; tiles as (row, token, queries, position)."""

    input_ids: list[int]
    positions: list[int]
    slots: list[int]
    keep: list[int]
    owners: list[int]
    row_of: list[int]
    choice_positions: list[int]
    choice_places: list[int]
    short_tiles: list[tuple[int, int, int, int]]
    long_tiles: list[tuple[int, int, int, int]]
    bases: list[int]


def reference_prepare(rows: Sequence[Row], state: RowState, block_size: int) -> Layout:
    """Lay out a forward over `rows`, in order."""
    out = Layout(
        input_ids=[],
        positions=[],
        slots=[],
        keep=[],
        owners=[],
        row_of=[],
        choice_positions=[],
        choice_places=[],
        short_tiles=[],
        long_tiles=[],
        bases=[],
    )
    for index, row in enumerate(rows):
        first = int(state.num_tokens[row.slot]) - 1 if row.first < 0 else row.first
        token, span = len(out.input_ids), range(first, first + row.count)
        out.input_ids.extend(state.tokens[row.slot, first : span.stop].tolist())
        out.positions.extend(span)
        out.slots.extend(row.table[p // block_size] * block_size + p % block_size for p in span)
        kept = range(row.count - row.num_kept, row.count)
        out.keep.extend(token + at for at in kept)
        out.owners.extend(index for _ in kept)
        out.row_of.extend([-1] * row.num_prompt + [index] * (row.num_kept - row.num_prompt))
        out.choice_positions.extend(first + at + 1 for at in kept)
        out.choice_places.extend(place - row.num_prompt for place in range(row.num_kept))
        out.bases.append(first + row.count - row.num_kept + row.num_prompt + 1)
        if row.is_short:
            out.short_tiles.append((index, token, row.count, first))
            continue
        for at in range(0, row.count, LONG_HEIGHT):
            height = min(LONG_HEIGHT, row.count - at)
            out.long_tiles.append((index, token + at, height, first + at))
    return out


def reference_accept(
    state: RowState, slot: int, base: int, chosen: Sequence[int]
) -> tuple[int, list[int]]:
    """Move one row on: drafts stand in its tokens from `base`; returns accepted, new tokens."""
    drafts = state.tokens[slot, base : base + len(chosen) - 1].tolist()
    num_accepted = 0
    while num_accepted < len(drafts) and drafts[num_accepted] == chosen[num_accepted]:
        num_accepted += 1
    kept = list(chosen[: num_accepted + 1])
    state.tokens[slot, base : base + len(kept)] = torch.tensor(kept, dtype=torch.int32).clamp(min=0)
    state.num_tokens[slot] = base + len(kept)
    return num_accepted, kept
