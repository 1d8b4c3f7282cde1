"""What is around elastic memory: a pool with bytes, rows, a draft, an agent, a clock."""

from __future__ import annotations

import hashlib

from nightjar.errors import ModelRefused
from worker.engine.block_manager import BlockManager
from worker.engine.elastic import ElasticMemory
from worker.engine.owners import Owner
from worker.messages import (
    AgentLink,
    Grant,
    GrantAnswer,
    ToFront,
    TransitionRequest,
)

BLOCK, BASE, EXTRA = 4, 12, 8
IMAGE = "image"  # what a tail block holds once it was reloaded


class Row:
    """A row whose token at a position is a function of its seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.table: list[int] = []
        self.num_tokens = 0

    def token(self, position: int) -> tuple[int, int]:
        """The content of one slot."""
        return (self.seed, position)

    def block_hash(self, index: int) -> bytes:
        """The prefix cache's key of a full block."""
        return hashlib.sha256(f"{self.seed}/{index}".encode()).digest()


class World:
    """A pool with bytes, rows that write it, a draft, an agent, a clock; the engine's loop."""

    def __init__(self) -> None:
        self.now = 100.0
        self.gone = True
        self.blocks = BlockManager(BASE, EXTRA, BLOCK)
        self.rows: list[Row] = []
        self.memory: list[list[object]] = [[None] * BLOCK for _ in range(BASE + EXTRA)]
        for block in self.tail:
            self.memory[block] = [IMAGE] * BLOCK
        self.draft_calls: list[str] = []
        self.restore_error = ""
        self.sent: list[ToFront] = []
        self.num_renames = 0
        self.num_moved = 0  # live blocks
        self.num_copied = 0  # blocks, by the worker itself
        self.elastic = ElasticMemory(
            self,
            self.blocks,
            self,
            copy=self.copy,
            clock=lambda: self.now,
            agent_gone=lambda: self.gone,
        )

    @property
    def tail(self) -> range:
        """Ids of the tail's blocks."""
        return range(BASE, BASE + EXTRA)

    # ---- what elastic memory needs of scheduler and draft ----

    def blocks_being_filled(self) -> set[int]:
        """Blocks that the next step may write."""
        return {b for row in self.rows for b in row.table[row.num_tokens // BLOCK :]}

    def rename(self, moves: dict[int, int]) -> None:
        """Tables and block manager in one call."""
        self.num_renames += 1
        self.num_moved += sum(block in moves for row in self.rows for block in row.table)
        self.blocks.rename(moves)
        for row in self.rows:
            row.table[:] = [moves.get(block, block) for block in row.table]

    def copy(self, moves: dict[int, int]) -> None:
        """Blocks go to their destinations while steps pause."""
        assert not self.elastic.launch_allowed
        self.num_copied += len(moves)
        for source, destination in moves.items():
            self.memory[destination] = list(self.memory[source])

    def drop(self) -> None:
        """The draft forgets the tail."""
        self.draft_calls.append("drop")

    def restore(self) -> None:
        """The draft comes back; the tail must hold the image."""
        assert all(self.memory[block] == [IMAGE] * BLOCK for block in self.tail)
        if self.restore_error:
            raise ModelRefused(self.restore_error)
        self.draft_calls.append("restore")

    # ---- rows ----

    def start(self, seed: int, num_tokens: int) -> Row | None:
        """Admit a row, with what the prefix cache has of it, and prefill it."""
        row = Row(seed)
        hits = self.blocks.match(row.block_hash(i) for i in range((num_tokens - 1) // BLOCK))
        self.blocks.acquire(hits)
        row.table.extend(hits)
        row.num_tokens = len(hits) * BLOCK
        self.rows.append(row)
        if not self.write(row, num_tokens - row.num_tokens):
            self.finish(row)
            return None
        return row

    def write(self, row: Row, num_tokens: int) -> bool:
        """A step writes the row's next tokens; False if there is no room."""
        assert self.elastic.launch_allowed
        if not self.blocks.grow(row.table, row.num_tokens + num_tokens):
            return False
        for position in range(row.num_tokens, row.num_tokens + num_tokens):
            self.memory[row.table[position // BLOCK]][position % BLOCK] = row.token(position)
        first, row.num_tokens = row.num_tokens, row.num_tokens + num_tokens
        for index in range(first // BLOCK, row.num_tokens // BLOCK):
            self.blocks.insert(row.table[index], row.block_hash(index))
        return True

    def finish(self, row: Row) -> None:
        """A row ends."""
        self.rows.remove(row)
        self.blocks.release(row.table)

    # ---- the loop ----

    def tell(self, message: TransitionRequest | GrantAnswer | AgentLink) -> list[ToFront]:
        """The front passes a message on."""
        return self._checked(self.elastic.on_message(message))

    def turn(self) -> list[ToFront]:
        """The loop comes round with nothing in flight."""
        return self._checked(self.elastic.after_retire())

    def _checked(self, messages: list[ToFront]) -> list[ToFront]:
        self.sent += messages
        self.check()
        return messages

    def check(self) -> None:
        """What must hold after every event."""
        self.blocks.check_integrity([row.table for row in self.rows])
        for row in self.rows:
            for position in range(row.num_tokens):
                held = self.memory[row.table[position // BLOCK]][position % BLOCK]
                assert held == row.token(position), f"{row.seed}/{position} holds {held}"
        if self.elastic.draft_usable:
            assert all(self.blocks.owner(block) is Owner.DRAFT for block in self.tail)
            assert all(self.memory[block] == [IMAGE] * BLOCK for block in self.tail)
            assert self.draft_calls[-1:] != ["drop"]

    def perform(self, grant: Grant, start: int = 0, num_blocks: int | None = None) -> None:
        """The agent does what a grant allows, or some blocks of it."""
        end = None if num_blocks is None else start + num_blocks
        if grant.kind == "load":
            for block in self.tail[start:end]:
                self.memory[block] = [IMAGE] * BLOCK
            return
        pairs = list(zip(grant.source_ids, grant.destination_ids, strict=True))
        for source, destination in pairs[start:end]:
            self.memory[destination] = list(self.memory[source])

    def answer(self, grant: Grant, ok: bool = True, start: int = 0) -> list[ToFront]:
        """Perform a grant from its block `start` on, and answer it."""
        self.perform(grant, start)
        return self.tell(GrantAnswer(grant_id=grant.grant_id, ok=ok, error="" if ok else "broken"))
