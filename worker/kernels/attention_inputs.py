"""What paged attention reads beside queries and KV: tiles of queries, block tables, slots."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Exact: a context is split every PART keys from position 0, and walked in tiles of TILE keys.
# Both belong to the arithmetic version.
PART = 128
TILE = 64
SHORT_HEIGHTS = (2, 4, 8, 16)  # queries of a decode or verify tile: the least that holds gamma + 1
LONG_HEIGHT = 16  # queries of a prefill tile
NUM_COUNTERS = 1 << 13  # programs of a list that is split, at most


@dataclass(frozen=True, kw_only=True)
class TileList:
    """Tiles of at most `height` consecutive queries of one row, on the device.

    Entries with num_queries 0 are no tiles. A row's keys are those at positions up to
    first_position + num_queries - 1 of its last tile; a query sees those up to its own.
    """

    height: int
    rows: torch.Tensor  # int32 [capacity], of the block tables
    first_tokens: torch.Tensor  # int32 [capacity], of the forward
    num_queries: torch.Tensor  # int32 [capacity], 0 to height
    first_positions: torch.Tensor  # int32 [capacity]

    @property
    def capacity(self) -> int:
        """Most tiles."""
        return self.rows.shape[0]


@dataclass(frozen=True, kw_only=True)
class AttentionInputs:
    """One forward's, at addresses that a captured graph keeps."""

    slots: torch.Tensor  # int32 [num_tokens], block * block_size + offset; -1 is not written
    tables: torch.Tensor  # int32 [max_rows, table_width], row-major
    lists: tuple[TileList, ...]  # each token lies in at most one tile of one list
    partials: torch.Tensor  # float32, scratch of `partial_floats` values or more
    counters: torch.Tensor  # int32 [NUM_COUNTERS], zeros before and after every layer


def num_parts(table_width: int, block_size: int) -> int:
    """Parts of the longest context that the tables can hold."""
    return -(-table_width * block_size // PART)
