"""Who owns which KV block, and which blocks without an owner are kept for their prefixes.

Owners: FREE, ROW (counted), CACHED (no reference, found again by its hash), GRANTED (the memory
agent may write it), DRAFT (a tail block that holds the draft, or is on its way back to it).
Blocks [0, num_base_blocks) are the head. The tail follows; it is the draft's at first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

from worker.engine.draft_fill import DraftFill
from worker.engine.owners import Owner, runs
from worker.engine.prefix_index import PrefixIndex


class BlockManager:
    """All blocks of the pool. Every change of owner goes through here.

    `draft` tells how far the draft's cache has filled the blocks.
    """

    def __init__(
        self,
        num_base_blocks: int,
        num_extra_blocks: int,
        block_size: int,
        prefix_cache: bool = True,
        salt: bytes = b"",
    ) -> None:
        num_blocks = num_base_blocks + num_extra_blocks
        self.num_base_blocks = num_base_blocks
        self.num_extra_blocks = num_extra_blocks
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.salt = salt
        self.draft = DraftFill(num_base_blocks, num_blocks, block_size)
        self._prefixes = PrefixIndex(num_blocks)
        self._refs = [0] * num_blocks
        self._free_head = list(range(num_base_blocks - 1, -1, -1))
        self._free_tail: list[int] = []
        self._cached: dict[int, None] = {}  # in the order in which they may be evicted
        self._granted: set[int] = set()
        self._tail: Literal["draft", "open", "closed"] = "draft"

    # ---- counts ----

    @property
    def num_free(self) -> int:
        """Blocks that a row could get: never used, or cached without a reference."""
        return len(self._free_head) + len(self._free_tail) + len(self._cached)

    @property
    def num_total(self) -> int:
        """Blocks that can hold KV now."""
        return self.num_base_blocks + (self.num_extra_blocks if self._tail == "open" else 0)

    @property
    def num_granted(self) -> int:
        """Head blocks reserved for, or written by, the memory agent."""
        return len(self._granted)

    @property
    def expanded(self) -> bool:
        """Whether the tail is, or may still be, KV: the draft is not in it."""
        return self._tail != "draft"

    def owner(self, block_id: int) -> Owner:
        """The one owner of a block."""
        if self._refs[block_id]:
            return Owner.ROW
        if block_id in self._granted:
            return Owner.GRANTED
        if block_id in self._cached:
            return Owner.CACHED
        return Owner.DRAFT if self._is_shut(block_id) else Owner.FREE

    def ranges(self) -> list[tuple[int, int, Owner]]:
        """First block and length of each run of blocks with one owner, in order.

        Some milliseconds for a hundred thousand blocks, in which no step is launched.
        """
        owners = [Owner.ROW if count else Owner.FREE for count in self._refs]
        for block_id in range(self.num_base_blocks, len(owners)) if self._tail != "open" else ():
            if not self._refs[block_id]:
                owners[block_id] = Owner.DRAFT
        for block_id in self._granted:
            owners[block_id] = Owner.GRANTED
        for block_id in self._cached:
            owners[block_id] = Owner.CACHED
        return runs(owners)

    def _is_shut(self, block_id: int) -> bool:
        return block_id >= self.num_base_blocks and self._tail != "open"

    # ---- rows ----

    def grow(self, block_table: list[int], num_tokens: int) -> bool:
        """Append blocks until the table covers `num_tokens`; False, and no change, if too few."""
        missing = -(-num_tokens // self.block_size) - len(block_table)
        if missing <= 0:
            return True
        if missing > self.num_free:
            return False
        block_table.extend([self._take() for _ in range(missing)])
        return True

    def _take(self) -> int:
        if self._free_head:
            block_id = self._free_head.pop()
        elif self._free_tail:
            block_id = self._free_tail.pop()
        else:
            block_id = next(iter(self._cached))
            self._drop_cached(block_id)
        self._refs[block_id] = 1
        self.draft.begin(block_id)
        return block_id

    def _drop_cached(self, block_id: int) -> None:
        del self._cached[block_id]
        self._prefixes.forget(block_id)

    def release(self, block_table: Sequence[int]) -> None:
        """Give up one reference on each block; a prefix outlives what follows it."""
        for block_id in reversed(block_table):
            self._refs[block_id] -= 1
            if self._refs[block_id] == 0:
                self._settle(block_id)

    def _settle(self, block_id: int) -> None:
        """Put a block that lost its last reference where it belongs."""
        if self._is_shut(block_id):
            self._prefixes.forget(block_id)
        elif self._prefixes.hash_of(block_id) is not None:
            self._cached[block_id] = None
        elif block_id < self.num_base_blocks:
            self._free_head.append(block_id)
        else:
            self._free_tail.append(block_id)

    def num_returning(self, block_tables: Iterable[Sequence[int]]) -> int:
        """How many blocks a row could get more of, once all these tables are released."""
        counts = Counter(block_id for table in block_tables for block_id in table)
        return sum(n == self._refs[b] and not self._is_shut(b) for b, n in counts.items())

    # ---- prefix cache ----

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """Blocks that hold the longest cached prefix of a hash chain; no references are taken."""
        found: list[int] = []
        for block_hash in hashes if self.prefix_cache else ():
            block_id = self._prefixes.find(block_hash)
            if block_id is None or self._is_shut(block_id):
                break
            found.append(block_id)
        return found

    def num_unreferenced(self, block_ids: Iterable[int]) -> int:
        """How many of these cached blocks count as free."""
        return sum(block_id in self._cached for block_id in block_ids)

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Take a reference on blocks that `match` found."""
        for block_id in block_ids:
            self._cached.pop(block_id, None)
            self._refs[block_id] += 1

    def insert(self, block_id: int, block_hash: bytes) -> None:
        """Let a row's full block be found by its hash; the first block of a hash stays."""
        assert self._refs[block_id] > 0
        if self.prefix_cache:
            self._prefixes.insert(block_id, block_hash)

    def forget(self, block_table: Sequence[int]) -> None:
        """Take referenced blocks out of the prefix cache: their content is not to be trusted."""
        for block_id in block_table:
            assert self._refs[block_id] > 0
            self._prefixes.forget(block_id)
        self.draft.forget(block_table)

    # ---- elastic memory ----

    def expand(self) -> None:
        """Make the tail KV: all the draft's cache is invalid from here on."""
        assert self._tail == "draft"
        self.draft.forget_all()
        self._open_tail()

    def _open_tail(self) -> None:
        self._tail = "open"
        end = self.num_base_blocks + self.num_extra_blocks
        tail = range(end - 1, self.num_base_blocks - 1, -1)
        self._free_tail = [block_id for block_id in tail if self._refs[block_id] == 0]

    def close_tail(self) -> None:
        """Hand out no tail block any more, and drop the cached ones there."""
        assert self._tail == "open"
        self._tail = "closed"
        self._free_tail = []
        for block_id in [b for b in self._cached if b >= self.num_base_blocks]:
            self._drop_cached(block_id)

    def reopen_tail(self) -> None:
        """Take `close_tail` back."""
        assert self._tail == "closed"
        self._open_tail()

    def live_tail_blocks(self) -> list[int]:
        """Tail blocks that rows refer to, ascending."""
        end = self.num_base_blocks + self.num_extra_blocks
        return [b for b in range(self.num_base_blocks, end) if self._refs[b] > 0]

    def reserve(self, num_blocks: int) -> list[int] | None:
        """Set head blocks aside as GRANTED; None, and no change, if there are too few."""
        cached = [b for b in self._cached if b < self.num_base_blocks]
        if num_blocks > len(self._free_head) + len(cached):
            return None
        reserved = [self._free_head.pop() for _ in range(min(num_blocks, len(self._free_head)))]
        for block_id in cached[: num_blocks - len(reserved)]:
            self._drop_cached(block_id)
            reserved.append(block_id)
        self._granted.update(reserved)
        return reserved

    def release_reserved(self, block_ids: Iterable[int]) -> None:
        """Return blocks of `reserve`, whose content means nothing."""
        for block_id in block_ids:
            self._granted.remove(block_id)
            self._free_head.append(block_id)

    def rename(self, moves: dict[int, int]) -> None:
        """Let each destination take the place of its source, whose bytes it holds.

        Counts, hashes and fill move. A source that nobody refers to any more gives its
        destination back to the free blocks. Sources stay behind as closed tail.
        """
        for source, destination in moves.items():
            assert self._is_shut(source)
            self._granted.remove(destination)
            self._refs[destination], self._refs[source] = self._refs[source], 0
            self.draft.move(source, destination)
            self._prefixes.move(source, destination)
            if self._refs[destination] == 0:
                self._settle(destination)

    def give_tail_to_draft(self) -> None:
        """End a contraction: the tail is the draft's."""
        assert self._tail == "closed"
        assert not self.live_tail_blocks(), "rows refer to tail blocks"
        self._tail = "draft"

    # ---- invariants ----

    def check_integrity(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Assert that owners, counts, hashes and fill agree with the rows' tables.

        Args:
            block_tables: Tables of all rows, and blocks whose release waits for a step.
        """
        num_blocks = len(self._refs)
        counts = [0] * num_blocks
        for table in block_tables:
            assert len(set(table)) == len(table), f"a table holds a block twice: {table}"
            for block_id in table:
                counts[block_id] += 1
        assert counts == self._refs, "reference counts differ from the tables"
        referenced = {b for b in range(num_blocks) if counts[b]}
        free = self._free_head + self._free_tail
        shut = {b for b in range(num_blocks) if self._is_shut(b)} - referenced
        groups = [referenced, set(free), set(self._cached), self._granted, shut]
        assert len(set(free)) == len(free), "a block is free twice"
        assert sum(map(len, groups)) == num_blocks, "a block has no owner, or two"
        assert set().union(*groups) == set(range(num_blocks)), "a block has no owner"
        assert all(b < self.num_base_blocks for b in [*self._free_head, *self._granted])
        assert all(b >= self.num_base_blocks for b in self._free_tail)
        hashed = self._prefixes.check_integrity()
        assert set(self._cached) <= hashed <= referenced | set(self._cached)
        self.draft.check_integrity()
        if self._tail == "draft":
            assert not any(counts[self.num_base_blocks :]), "a row refers to the draft's memory"

    def check_row(
        self, block_table: Sequence[int], hashes: Sequence[bytes], num_draft: int
    ) -> None:
        """Assert that a row's cached blocks hold its tokens, and that its draft fill is right.

        Args:
            block_table: The row's blocks.
            hashes: Hash chain of its computed tokens: no other block may be cached.
            num_draft: Tokens that the row takes the draft's cache to hold.
        """
        for index, block_id in enumerate(block_table):
            block_hash = self._prefixes.hash_of(block_id)
            known = hashes[index] if index < len(hashes) else None
            assert block_hash in (None, known), "a block is cached under another row's tokens"
        assert self.draft.computed(block_table, 0)[0] == num_draft, "draft fill differs"
