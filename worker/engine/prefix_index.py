"""Which block holds which prefix: a hash of a chain of tokens to a block, and back."""

from __future__ import annotations


class PrefixIndex:
    """One block a hash, one hash a block, whoever owns the block."""

    def __init__(self, num_blocks: int) -> None:
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._blocks: dict[bytes, int] = {}

    def hash_of(self, block_id: int) -> bytes | None:
        """The hash by which a block is found; None if by none."""
        return self._hashes[block_id]

    def find(self, block_hash: bytes) -> int | None:
        """The block of a hash."""
        return self._blocks.get(block_hash)

    def insert(self, block_id: int, block_hash: bytes) -> None:
        """Let a block be found, unless it is or another one has that hash: the first stays."""
        if self._hashes[block_id] is None and block_hash not in self._blocks:
            self._hashes[block_id] = block_hash
            self._blocks[block_hash] = block_id

    def forget(self, block_id: int) -> None:
        """Find the block no more."""
        block_hash = self._hashes[block_id]
        if block_hash is not None:
            del self._blocks[block_hash]
            self._hashes[block_id] = None

    def move(self, source: int, destination: int) -> None:
        """Find `destination`, which has no hash, where `source` was found."""
        block_hash = self._hashes[destination] = self._hashes[source]
        self._hashes[source] = None
        if block_hash is not None:
            self._blocks[block_hash] = destination

    def check_integrity(self) -> set[int]:
        """Assert that both directions agree; returns the blocks that are found."""
        hashed = {b for b, block_hash in enumerate(self._hashes) if block_hash is not None}
        assert {self._blocks.get(self._hashes[b] or b"") for b in hashed} <= hashed
        assert sorted(self._blocks.values()) == sorted(hashed), "hashes and their map differ"
        return hashed
