"""A model without weights: logits are a hash of the exact prefix, read back through its KV slots.

A wrong slot, a stale or foreign block, a position written late: each gives other logits, or
NaN where a slot was never written, so nothing wrong with the tables can go unseen.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Literal

import numpy as np
import torch

from worker.model.batch import Batch

POISON = (-1, -1)
Kind = Literal["target", "noisy", "random"]


class FakeForward:
    """A `Forward` over a dictionary of slots.

    Args:
        kind: "target", a "noisy" copy that often agrees with it, or a "random" one.
        num_slots: Slots that exist; others raise.
        vocab_size: Ids in the logits; those from `real_vocab_size` on are always the largest.
        window: How many of the last tokens decide the logits; 0 takes all.
    """

    def __init__(
        self,
        kind: Kind,
        num_slots: int,
        block_size: int,
        *,
        vocab_size: int = 40,
        real_vocab_size: int = 40,
        max_model_len: int = 512,
        window: int = 0,
    ) -> None:
        self.kind, self.block_size, self.window = kind, block_size, window
        self.vocab_size, self.real_vocab_size = vocab_size, real_vocab_size
        self.max_model_len = max_model_len
        self.slots: list[tuple[int, int]] = [POISON] * num_slots  # (token, position)
        self.poisoned_prefixes: set[tuple[int, ...]] = set()  # whose logits are NaN
        self.num_runs = 0
        self.num_tokens = 0
        self.raises: Exception | None = None

    def run(self, batch: Batch) -> torch.Tensor:
        """See `Forward`."""
        self.num_runs += 1
        self.num_tokens += len(batch.input_ids)
        if self.raises is not None:
            raise self.raises
        assert len(batch.input_ids) == len(batch.positions) == len(batch.slots)
        assert batch.query_starts[-1] == len(batch.input_ids)
        assert batch.logit_tokens == sorted(set(batch.logit_tokens))
        assert max(batch.positions) < self.max_model_len
        for token, position, slot in zip(
            batch.input_ids, batch.positions, batch.slots, strict=True
        ):
            self.slots[slot] = (token, position)
        wanted, logits = set(batch.logit_tokens), []
        for row, table in enumerate(batch.block_tables):
            start, end = batch.query_starts[row], batch.query_starts[row + 1]
            positions = batch.positions[start:end]
            assert positions == list(range(positions[0], positions[0] + end - start))
            for index in range(start, end):
                position = batch.positions[index]
                slot = table[position // self.block_size] * self.block_size
                assert batch.slots[index] == slot + position % self.block_size
                if index in wanted:
                    logits.append(self._logits_at(table, position))
        shape = (len(logits), self.vocab_size)
        return torch.from_numpy(np.array(logits, np.float32).reshape(shape))

    def _logits_at(self, table: list[int], position: int) -> np.ndarray:
        size, prefix = self.block_size, list[int]()
        for block, start in zip(table, range(0, position + 1, size), strict=False):
            end = min(start + size, position + 1)
            held = self.slots[block * size : block * size + end - start]
            tokens, stored = zip(*held, strict=True)
            if stored != tuple(range(start, end)):
                return np.full(self.vocab_size, np.nan, np.float32)
            prefix += tokens
        return self.logits(prefix)

    def logits(self, prefix: list[int]) -> np.ndarray:
        """Logits after exactly these tokens."""
        if tuple(prefix) in self.poisoned_prefixes:
            return np.full(self.vocab_size, np.nan, np.float32)
        seen = prefix[-self.window :] if self.window else prefix
        values = self._hashed("random" if self.kind == "random" else "target", seen)
        if self.kind == "noisy":
            values = values + 0.35 * self._hashed("noise", seen)
        values[self.real_vocab_size :] = 100.0
        return values

    def _hashed(self, salt: str, tokens: list[int]) -> np.ndarray:
        data = salt.encode() + struct.pack(f"<{len(tokens)}i", *tokens)
        digest = hashlib.shake_128(data).digest(4 * self.vocab_size)
        return (np.frombuffer(digest, "<u4") / 2**32 * 8.0).astype(np.float32)

    def poison(self, slots: range) -> None:
        """Forget what these slots hold."""
        for slot in slots:
            self.slots[slot] = POISON

    def copy_blocks(self, moves: dict[int, int]) -> None:
        """Copy blocks as the memory agent does."""
        size = self.block_size
        for source, destination in moves.items():
            block = self.slots[source * size : (source + 1) * size]
            self.slots[destination * size : (destination + 1) * size] = block
