"""One forward's inputs, and what runs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Ragged rows laid end to end; row r holds tokens [query_starts[r], query_starts[r + 1]).

    A row's positions are contiguous, and its last position + 1 is its KV length after this
    forward. Block tables cover that length.
    """

    input_ids: list[int]  # [num_tokens]
    positions: list[int]  # [num_tokens]
    slots: list[int]  # [num_tokens], block * block_size + offset
    query_starts: list[int]  # [num_rows + 1]
    block_tables: list[list[int]]  # [num_rows][at least ceil(kv_len / block_size)]
    logit_tokens: list[int]  # indexes into tokens whose logits are wanted, ascending


class Forward(Protocol):
    """A model over its KV cache. Target and draft are two of these."""

    vocab_size: int
    max_model_len: int

    def run(self, batch: Batch) -> torch.Tensor:
        """Write the tokens' KV at their slots; logits float32 [len(logit_tokens), vocab_size]."""
        ...
