"""Builds a forward's inputs row by row."""

from __future__ import annotations

from worker.model.batch import Batch


class BatchBuilder:
    """Collects ragged rows into one `Batch`."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._input_ids: list[int] = []
        self._positions: list[int] = []
        self._slots: list[int] = []
        self._query_starts = [0]
        self._block_tables: list[list[int]] = []
        self._logit_tokens: list[int] = []

    def add(
        self, token_ids: list[int], first: int, block_table: list[int], num_logits: int
    ) -> None:
        """Add a row whose tokens stand at positions from `first`; its last `num_logits` count."""
        size = self._block_size
        positions = range(first, first + len(token_ids))
        self._input_ids += token_ids
        self._positions += positions
        self._slots += [block_table[p // size] * size + p % size for p in positions]
        # A copy: the scheduler may change the row's own table while the step is in flight.
        self._block_tables.append(block_table[: -(-positions.stop // size)])
        end = len(self._input_ids)
        self._query_starts.append(end)
        self._logit_tokens += range(end - num_logits, end)

    def build(self) -> Batch:
        """The batch of all rows added."""
        return Batch(
            input_ids=self._input_ids,
            positions=self._positions,
            slots=self._slots,
            query_starts=self._query_starts,
            block_tables=self._block_tables,
            logit_tokens=self._logit_tokens,
        )
