"""A worker without models, as a process: real blocks, real elastic memory, real bytes, real agent.

    python elastic_process.py FOLDER AGENT

Rows write a token a turn into a shared arena. Demand rises until the draft has left and rows live
in the tail, then falls until it is back; so it goes on. Every byte of every row is checked where
blocks move, and now and then. Says "cycle N" after each round, "turn N" in between.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections import deque
from pathlib import Path

from memory_worker import PoolStub

from memory_agent.arena import is_written_elsewhere
from worker.engine.block_manager import BlockManager
from worker.engine.elastic import ElasticMemory
from worker.memory_client import MemoryClient, ToEngine
from worker.messages import PoolInfo, Pressure, ToFront

BLOCK = 4  # tokens of a block
TURN_S = 0.002


class Row:
    """A row whose bytes are a function of its seed."""

    def __init__(self, seed: int) -> None:
        self.seed, self.table, self.num_tokens = seed, list[int](), 0

    def token(self, position: int, size: int) -> bytes:
        """Bytes of one slot."""
        return f"{self.seed:08d}/{position:06d};".encode() * (size // 16)


class Worker:
    """The loop, and what elastic memory needs of scheduler and draft."""

    def __init__(self, folder: Path, address: str) -> None:
        self.pool = PoolStub(folder, num_base_blocks=160)
        layout = self.pool.layout
        self.size = layout.block_bytes // BLOCK
        self.blocks = BlockManager(layout.num_base_blocks, layout.num_extra_blocks, BLOCK)
        path = self.pool.arena.path
        self.elastic = ElasticMemory(
            self,
            self.blocks,
            self,
            copy=self.copy,
            agent_gone=lambda: not is_written_elsewhere(path),
        )
        start, image = layout.image_offset, self.pool.image.memory
        self.pool.arena.memory[start : start + layout.image_bytes] = image[:]
        info = PoolInfo(
            arena_path=path,
            arena_bytes=layout.num_bytes,
            block_bytes=layout.block_bytes,
            num_base_blocks=layout.num_base_blocks,
            num_extra_blocks=layout.num_extra_blocks,
            image_path=self.pool.image.path,
            image_offset=layout.image_offset,
            image_bytes=layout.image_bytes,
            image_sha256=self.pool.sha256,
        )
        self.arrived: deque[ToEngine] = deque()
        self.client = MemoryClient(address, "worker-1", info, self.arrived.append)
        self.rows: list[Row] = []
        self.rng = random.Random(1)
        self.num_rows = self.num_turns = self.num_cycles = 0
        self.pressing = True

    # ---- what elastic memory needs ----

    def blocks_being_filled(self) -> set[int]:
        """Blocks that the next turn may write."""
        return {b for row in self.rows for b in row.table[row.num_tokens // BLOCK :]}

    def rename(self, moves: dict[int, int]) -> None:
        """Tables and block manager in one call; afterwards every byte must be there."""
        self.blocks.rename(moves)
        for row in self.rows:
            row.table[:] = [moves.get(block, block) for block in row.table]
            self.check(row)

    def copy(self, moves: dict[int, int]) -> None:
        """Blocks go to their destinations while steps pause."""
        memory, layout = self.pool.arena.memory, self.pool.layout
        for source, destination in moves.items():
            at, to = layout.block_offset(source), layout.block_offset(destination)
            memory[to : to + layout.block_bytes] = memory[at : at + layout.block_bytes]

    def drop(self) -> None:
        """The draft leaves."""

    def restore(self) -> None:
        """The draft is back: the tail holds its image."""
        assert self.pool.loaded(), "the draft was restored from other bytes"

    # ---- rows ----

    def check(self, row: Row) -> None:
        """Every byte of a row."""
        memory, size = self.pool.arena.memory, self.size
        for position in range(row.num_tokens):
            at = self.pool.layout.block_offset(row.table[position // BLOCK])
            at += position % BLOCK * size
            assert memory[at : at + size] == row.token(position, size), f"{row.seed}/{position}"

    def write(self, row: Row) -> bool:
        """One token more; False if there is no block for it."""
        if not self.blocks.grow(row.table, row.num_tokens + 1):
            return False
        at = self.pool.layout.block_offset(row.table[row.num_tokens // BLOCK])
        at += row.num_tokens % BLOCK * self.size
        self.pool.arena.memory[at : at + self.size] = row.token(row.num_tokens, self.size)
        row.num_tokens += 1
        return True

    def end(self, row: Row) -> None:
        """A row ends, all of it as it was written."""
        self.check(row)
        self.rows.remove(row)
        self.blocks.release(row.table)

    # ---- the loop ----

    def turn(self) -> None:
        """Messages, elastic memory, a step, a report."""
        self.num_turns += 1
        messages: list[ToFront] = []
        while self.arrived:
            messages += self.elastic.on_message(self.arrived.popleft())  # type: ignore[arg-type]
        messages += self.elastic.after_retire()
        if self.elastic.launch_allowed:
            self.step()
        self.blocks.check_integrity([row.table for row in self.rows])
        for message in messages:
            self.client.forward(message)  # type: ignore[arg-type]
        if self.num_turns % 4 == 0:
            self.client.forward(self.pressure())
        if self.num_turns % 50 == 0:
            print(f"turn {self.num_turns}", flush=True)

    def pressure(self) -> Pressure:
        """How full the pool is, at gamma 0."""
        return Pressure(
            sequence=self.num_turns,
            num_free_blocks=self.blocks.num_free,
            num_total_blocks=self.blocks.num_total,
            num_waiting=0,
            num_running=len(self.rows),
            exploit_gamma=0,
            residency=self.elastic.residency,
        )

    def step(self) -> None:
        """Rows advance; demand goes up or down."""
        base = self.blocks.num_base_blocks
        in_tail = len(self.blocks.live_tail_blocks())
        if self.pressing and self.elastic.residency == "offloaded" and in_tail >= 4:
            self.pressing = False
        elif not self.pressing and self.elastic.draft_usable:
            self.pressing = True
            self.num_cycles += 1
            print(f"cycle {self.num_cycles}", flush=True)
        while self.pressing and self.blocks.num_free > 4 and in_tail < 4:
            self.num_rows += 1
            row = Row(self.num_rows)
            self.rows.append(row)
            for _ in range(self.rng.randint(5, 40)):
                if not self.write(row):
                    break
        if not self.pressing and len(self.rows) > 4:  # rows of the tail stay
            for row in [r for r in self.rows if max(r.table) < base][:4]:
                self.end(row)
        for row in self.rows[-4:]:
            if not self.write(row) or row.num_tokens > 60:
                self.end(row)


async def main() -> None:
    """Turn until killed."""
    worker = Worker(Path(sys.argv[1]), sys.argv[2])
    client = asyncio.create_task(worker.client.run())
    print("ready", flush=True)
    while not client.done():
        worker.turn()
        await asyncio.sleep(TURN_S)
    client.result()


if __name__ == "__main__":
    asyncio.run(main())
