"""How far the draft's cache has filled each block, and since when that counts.

A block's fill is of an epoch. Expanding raises the epoch: that is the whole invalidation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class DraftFill:
    """The draft halves of all blocks.

    Args:
        num_base_blocks: Blocks that have a draft half; the ids after them have none.
        num_blocks: All of them.
        block_size: Tokens of a block.
    """

    def __init__(self, num_base_blocks: int, num_blocks: int, block_size: int) -> None:
        self.epoch = 0
        self.version = 0  # raised whenever fill may have shrunk
        self._num_base_blocks, self._block_size = num_base_blocks, block_size
        self._epochs = [0] * num_blocks
        self._num_filled = [0] * num_blocks  # meaningful in the current epoch alone

    def computed(self, block_table: Sequence[int], first_block: int) -> tuple[int, int]:
        """Tokens of a row that the draft's cache holds, in blocks of the current epoch alone.

        Args:
            block_table: The row's blocks.
            first_block: Blocks before it are known to be full in this epoch.

        Returns:
            Tokens, and the number of full blocks, from which the next walk may start.
        """
        index = first_block
        for block_id in block_table[first_block:]:
            if self._epochs[block_id] != self.epoch:
                break
            num_filled = self._num_filled[block_id]
            if num_filled < self._block_size:
                return index * self._block_size + num_filled, index
            index += 1
        return index * self._block_size, index

    def fill(self, block_table: Sequence[int], start: int, end: int) -> None:
        """Record that the draft's cache now holds tokens [0, end) of a row, [start, end) newly.

        Fill only grows here: a block shared between rows holds the same tokens for both.
        """
        size = self._block_size
        for index in range(start // size, -(-end // size)):
            block_id = block_table[index]
            assert block_id < self._num_base_blocks, "extra blocks have no draft half"
            if self._epochs[block_id] != self.epoch:
                self._epochs[block_id] = self.epoch
                self._num_filled[block_id] = 0
            num_filled = min(size, end - index * size)
            self._num_filled[block_id] = max(num_filled, self._num_filled[block_id])

    def forget(self, block_table: Iterable[int]) -> None:
        """Take a row's draft cache as never filled."""
        self.version += 1
        for block_id in block_table:
            self._num_filled[block_id] = 0

    def forget_all(self) -> None:
        """Begin a new epoch: nothing is filled."""
        self.epoch += 1
        self.version += 1

    def begin(self, block_id: int) -> None:
        """A block has a new owner, who has filled nothing."""
        self._num_filled[block_id] = 0

    def move(self, source: int, destination: int) -> None:
        """Let a block take over what another had."""
        self._epochs[destination] = self._epochs[source]
        self._num_filled[destination] = self._num_filled[source]

    def check_integrity(self) -> None:
        """Assert that fill is in range, and none where there is no draft half."""
        for block_id, epoch in enumerate(self._epochs):
            if epoch == self.epoch:
                num_filled = self._num_filled[block_id]
                assert 0 <= num_filled <= self._block_size
                assert num_filled == 0 or block_id < self._num_base_blocks
