"""A private cache with fixed random sequences in it, for the proof and the fingerprint."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from worker.model.batch import Batch
from worker.model.forward import ModelForward
from worker.model.pool import KVCache


@dataclass(kw_only=True)
class Row:
    """A sequence; tokens [0, start) lie in shared blocks, the checked ones in its own."""

    tokens: list[int]  # the checked ones, at positions start, start + 1, ...
    start: int
    table: list[int]


class ProbeRows:
    """Rows over a scratch cache that stands in for the pool while the object is in use.

    A prefix of real KV is prefilled once; longer contexts repeat its blocks, since what is
    proved is the order of additions, not a meaning.
    """

    def __init__(self, forward: ModelForward, *, starts: list[int], num_checked: int) -> None:
        """Prefill; `starts` are the lengths of the rows before their checked tokens."""
        cache = forward.runtime.cache
        assert cache is not None
        self._forward, self._pool = forward, cache
        geometry = cache.geometry
        self.block_size = size = geometry.block_size
        rng = random.Random(0)
        self.prompt = [
            rng.randrange(forward.vocab_size)
            for _ in range(min(forward.max_batch_tokens, forward.max_model_len))
        ]
        shared = len(self.prompt) // size + 1
        own = num_checked // size + 2
        total = shared + len(starts) * own
        device = cache.strips[0].device
        memory = torch.zeros(total * geometry.block_bytes, dtype=torch.uint8, device=device)
        forward.runtime.cache = KVCache(memory, geometry, total)
        self.prompt_row = Row(tokens=self.prompt, start=0, table=list(range(shared)))
        forward.compute(self.batch([(self.prompt_row, 0, len(self.prompt))], keep=[]))
        full = max(1, len(self.prompt) // size)
        blocks = memory.view(total, -1)
        self.rows = []
        for i, start in enumerate(starts):
            mine = range(shared + i * own, shared + (i + 1) * own)
            for block in mine:
                blocks[block] = blocks[block % full]
            table = [block % full for block in range(start // size)] + list(mine)
            tokens = [rng.randrange(forward.vocab_size) for _ in range(num_checked)]
            self.rows.append(Row(tokens=tokens, start=start, table=table))

    def close(self) -> None:
        """Put the real pool back."""
        self._forward.runtime.cache = self._pool

    def batch(self, parts: list[tuple[Row, int, int]], *, keep: list[int] | None = None) -> Batch:
        """A batch of (row, first checked token, number of tokens); None keeps all logits."""
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        for row, first, count in parts:
            ids += row.tokens[first : first + count]
            at = range(row.start + first, row.start + first + count)
            positions += at
            slots += [
                row.table[p // self.block_size] * self.block_size + p % self.block_size for p in at
            ]
            starts.append(len(ids))
        return Batch(
            input_ids=ids,
            positions=positions,
            slots=slots,
            query_starts=starts,
            block_tables=[row.table for row, _, _ in parts],
            logit_tokens=list(range(len(ids))) if keep is None else keep,
        )

    def run(
        self, parts: list[tuple[Row, int, int]], *, keep: list[int] | None = None
    ) -> torch.Tensor:
        """Logits of every token of the parts, or of those at `keep`, in order."""
        return self._forward.compute(self.batch(parts, keep=keep))
