"""The buffers that every forward on the device reads: allocated once, viewed per bucket."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from worker.kernels.attention_inputs import (
    LONG_HEIGHT,
    NUM_COUNTERS,
    AttentionInputs,
    TileList,
)


@dataclass(frozen=True, kw_only=True)
class ForwardInputs:
    """What one forward of `num_tokens` tokens reads; a captured graph keeps the addresses."""

    input_ids: torch.Tensor  # int64 [num_tokens]
    positions: torch.Tensor  # int64 [num_tokens]
    keep: torch.Tensor  # int64 [num_kept], tokens whose logits are wanted
    attention: AttentionInputs

    @property
    def num_tokens(self) -> int:
        """Tokens, padding included."""
        return self.input_ids.shape[0]

    @property
    def num_kept(self) -> int:
        """Tokens whose logits are wanted, padding included."""
        return self.keep.shape[0]


class InputBuffers:
    """Largest-size tensors; buckets are views of their beginnings, so all share addresses.

    Padding tokens have id 0, position 0 and slot -1, and lie in no tile; a padding entry of
    `keep` is 0.
    """

    def __init__(
        self,
        *,
        max_tokens: int,
        max_rows: int,
        table_width: int,
        num_partial_floats: int,
        device: torch.device,
    ) -> None:
        """Allocate; nothing is filled in but padding."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.max_tokens, self.max_rows = max_tokens, max_rows
        self.device = device
        self.input_ids = zeros(max_tokens, dtype=torch.int64)
        self.positions = zeros(max_tokens, dtype=torch.int64)
        self.keep = zeros(max_tokens, dtype=torch.int64)
        self.slots = zeros(max_tokens).fill_(-1)
        self.tables = zeros(max_rows, table_width)
        # rows, first_tokens, num_queries, first_positions; a draft's forward has two at least
        self.short_tiles = zeros(4, max(2, max_rows))
        self.long_tiles = zeros(4, max_tokens // LONG_HEIGHT + max_rows)
        self.partials = zeros(num_partial_floats, dtype=torch.float32)
        self.counters = zeros(NUM_COUNTERS)

    def view(
        self,
        num_tokens: int,
        num_kept: int,
        *,
        short_height: int,
        has_long: bool,
        num_short: int | None = None,
    ) -> ForwardInputs:
        """A bucket's inputs.

        Args:
            num_tokens: Of the bucket; each row has at most one short tile.
            num_kept: Logits of the bucket.
            short_height: Queries of a short tile.
            has_long: Whether prefill tiles may be there; without them nothing is launched.
            num_short: Most short tiles; None takes one for each token.
        """
        most = min(num_tokens, self.max_rows) if num_short is None else num_short
        lists = [_tiles(self.short_tiles, short_height, most)]
        if has_long:
            capacity = num_tokens // LONG_HEIGHT + min(num_tokens, self.max_rows)
            lists.append(_tiles(self.long_tiles, LONG_HEIGHT, capacity))
        return ForwardInputs(
            input_ids=self.input_ids[:num_tokens],
            positions=self.positions[:num_tokens],
            keep=self.keep[:num_kept],
            attention=AttentionInputs(
                slots=self.slots[:num_tokens],
                tables=self.tables,
                lists=tuple(lists),
                partials=self.partials,
                counters=self.counters,
            ),
        )


def _tiles(buffer: torch.Tensor, height: int, capacity: int) -> TileList:
    rows, first_tokens, num_queries, first_positions = buffer[:, :capacity]
    return TileList(
        height=height,
        rows=rows,
        first_tokens=first_tokens,
        num_queries=num_queries,
        first_positions=first_positions,
    )
