"""The pool's counts, each taken where it is kept: blocks' lists, rows' tables, the agent's map."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable

from gpu.memory_link import Bench, clients_loop
from nightjar.rpc import dial
from nightjar.v1 import memory_pb2, memory_pb2_grpc

MAP_S = 10.0
Counts = dict[str, int]


def counts(bench: Bench) -> Counts:
    """Blocks by owner: free ones by their lists, rows' by their tables, granted ones by their set.

    What is left of the tail while it is not open is the draft's.
    """
    scheduler, blocks = bench.scheduler, bench.blocks
    tables = [row.block_table for row in scheduler.running]
    tables += [held.block_table for held in scheduler._limbo]
    held = {block for table in tables for block in table}
    in_tail = sum(block >= blocks.num_base_blocks for block in held)
    shut = blocks._tail != "open"
    return {
        "free": blocks.num_free,
        "row": len(held),
        "granted": blocks.num_granted,
        "draft": blocks.num_extra_blocks - in_tail if shut else 0,
    }


def whole(bench: Bench) -> None:
    """Assert that free, used and granted blocks are all that can hold KV, none missing or twice."""
    found = counts(bench)
    blocks = bench.blocks
    in_use = found["free"] + found["row"] + found["granted"]
    num_total = blocks.num_base_blocks
    if blocks._tail != "draft":  # open, or closed while rows are still in it
        num_total += blocks.num_extra_blocks - found["draft"]
    assert in_use == num_total, f"{found} are {in_use} blocks of {num_total}"
    if blocks._tail == "open":
        assert num_total == blocks.num_total
    if blocks._tail == "draft":
        assert found["draft"] == blocks.num_extra_blocks, "a row is in the draft's memory"


def agents_map(bench: Bench, address: str, turn: Callable[[], None]) -> None:
    """Assert that the map which the agent shows has the engine's counts of when it was sent.

    Args:
        bench: With the agent attached.
        address: Of the agent.
        turn: Turns the engine, which answers in between.

    Raises:
        AssertionError: They differ, or the agent showed none.
    """
    sent: list[Counts] = []
    bench.feed.on_map = lambda: sent.append(counts(bench))
    shown = asyncio.run_coroutine_threadsafe(_shown(address), clients_loop())
    deadline = time.monotonic() + MAP_S
    while not shown.done():
        assert time.monotonic() < deadline, "the agent does not answer"
        turn()
    bench.feed.on_map = lambda: None
    found, total = shown.result()
    assert len(sent) == 1, f"{len(sent)} maps were sent"
    expected = Counter(sent[0])
    assert +found == +expected, f"the agent shows {found}, the engine has {expected}"
    blocks = bench.blocks
    assert total == blocks.num_base_blocks + blocks.num_extra_blocks


async def _shown(address: str) -> tuple[Counter[str], int]:
    """Blocks by owner as the agent shows them, cached ones as free, and their number."""
    found: Counter[str] = Counter()
    async with dial(address) as channel:
        stub = memory_pb2_grpc.MemoryServiceStub(channel)
        request = memory_pb2.GetMemoryStatusRequest(include_pool_map=True)
        status = await stub.GetMemoryStatus(request, timeout=MAP_S)
    for part in status.pool_map.ranges:
        owner = memory_pb2.BlockOwner.Name(part.owner).removeprefix("BLOCK_OWNER_").lower()
        found["free" if owner == "cached" else owner] += part.num_blocks
    return found, sum(found.values())
