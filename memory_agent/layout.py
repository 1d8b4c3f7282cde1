"""The arena's layout: pure arithmetic that worker and agent share.

Bytes [0, num_base_blocks * block_bytes) are the head: blocks that are always KV.
The tail follows and is a whole number of blocks. Resident, it holds the draft halves of the
head's blocks, then the image of the draft's weights; expanded, it is num_extra_blocks more
KV blocks, which have no draft half.
"""

from __future__ import annotations

from dataclasses import dataclass

ALIGNMENT = 4096  # the image starts on a page, so that it can be mapped and copied by pages


def size_in_words(num_bytes: int) -> str:
    """A size for a person: in MB, below one in KB."""
    return f"{num_bytes >> 20} MB" if num_bytes >= 1 << 20 else f"{num_bytes / 1024:.0f} KB"


@dataclass(frozen=True, kw_only=True)
class ArenaLayout:
    """Sizes in bytes; offsets count from the arena's start."""

    block_bytes: int
    draft_block_bytes: int  # 0 without a draft model
    image_bytes: int  # 0 without a draft model
    num_base_blocks: int

    @classmethod
    def of_pool(
        cls,
        *,
        arena_bytes: int,
        block_bytes: int,
        num_base_blocks: int,
        num_extra_blocks: int,
        image_offset: int,
        image_bytes: int,
    ) -> ArenaLayout:
        """Rebuild a layout from the sizes that a pool with a draft announces.

        Raises:
            ValueError: No layout has these sizes; the sentence names the first that differs.
        """
        if min(block_bytes, num_base_blocks, num_extra_blocks, image_bytes) < 1:
            raise ValueError("block_bytes, block counts and image_bytes must be positive")
        room = image_offset - num_base_blocks * block_bytes
        layout = cls(
            block_bytes=block_bytes,
            draft_block_bytes=max(room, 0) // num_base_blocks,
            image_bytes=image_bytes,
            num_base_blocks=num_base_blocks,
        )
        announced = {
            "image_offset": (image_offset, layout.image_offset),
            "num_extra_blocks": (num_extra_blocks, layout.num_extra_blocks),
            "arena_bytes": (arena_bytes, layout.num_bytes),
        }
        for name, (given, right) in announced.items():
            if given != right:
                raise ValueError(f"{name} is {given}, but the other sizes make it {right}")
        return layout

    @property
    def tail_offset(self) -> int:
        """Where the tail, and with it the first draft half, begins."""
        return self.num_base_blocks * self.block_bytes

    @property
    def image_offset(self) -> int:
        """Where the draft's weights begin."""
        end = self.tail_offset + self.num_base_blocks * self.draft_block_bytes
        return -(-end // ALIGNMENT) * ALIGNMENT

    @property
    def num_extra_blocks(self) -> int:
        """Blocks that the tail is worth, rounded up: the tail is padded to whole blocks."""
        if self.draft_block_bytes == 0 and self.image_bytes == 0:
            return 0
        return -(-(self.image_offset + self.image_bytes - self.tail_offset) // self.block_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole arena."""
        return (self.num_base_blocks + self.num_extra_blocks) * self.block_bytes

    def block_offset(self, block_id: int) -> int:
        """Where a KV block begins, head and tail alike."""
        return block_id * self.block_bytes

    def draft_block_offset(self, block_id: int) -> int:
        """Where the draft half of a head block begins."""
        return self.tail_offset + block_id * self.draft_block_bytes
