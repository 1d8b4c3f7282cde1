"""Owners, prefix cache, draft fill, and the tail's moves; random operations against the checks."""

from __future__ import annotations

import itertools
import random

import pytest

from worker.engine.block_manager import BlockManager
from worker.engine.owners import Owner
from worker.engine.sequence import chain_hash


def manager(num_base: int = 4, num_extra: int = 2, *, prefix_cache: bool = True) -> BlockManager:
    """Blocks of 16 tokens."""
    return BlockManager(num_base, num_extra, 16, prefix_cache, b"salt")


def test_growing_is_all_or_nothing() -> None:
    """A table that cannot grow in full does not grow at all."""
    blocks, table = manager(), []
    assert blocks.grow(table, 33)
    assert (table, blocks.num_free) == ([0, 1, 2], 1)
    assert not blocks.grow(table, 100)
    assert (len(table), blocks.num_free) == (3, 1)
    blocks.release(table)
    assert blocks.num_free == 4
    blocks.check_integrity([])


def test_cached_blocks_are_free_and_found_until_they_are_reused() -> None:
    """A released prefix is found again; what follows a prefix is reused before it."""
    blocks, table = manager(), []
    hashes = [chain_hash(b"salt", [1] * 16), chain_hash(b"x", [2] * 16)]
    blocks.grow(table, 32)
    for block_id, block_hash in zip(table, hashes, strict=True):
        blocks.insert(block_id, block_hash)
    blocks.release(table)
    assert blocks.match(hashes) == table
    assert blocks.num_free == 4
    assert {blocks.owner(b) for b in table} == {Owner.CACHED}
    taken: list[int] = []
    blocks.grow(taken, 48)
    assert blocks.match(hashes) == table[:1]
    blocks.acquire(table[:1])
    assert blocks.owner(table[0]) is Owner.ROW
    blocks.check_integrity([taken, table[:1]])


def test_ranges_name_every_blocks_owner() -> None:
    """They follow each other without gaps, and agree with the owner of each block, at any time."""
    blocks, rng = manager(12, 6), random.Random(3)
    tables: list[list[int]] = []
    for step in range(200):
        if step in (40, 120):
            blocks.expand()
        elif step in (80, 160):
            blocks.close_tail()
            for table in [t for t in tables if max(t) >= 12]:
                tables.remove(table)
                blocks.release(table)
            blocks.give_tail_to_draft()
        table: list[int] = []
        if rng.random() < 0.6 and blocks.grow(table, rng.randint(1, 60)):
            tables.append(table)
            blocks.insert(table[0], str(step).encode())
        elif tables:
            blocks.release(tables.pop(rng.randrange(len(tables))))
        reserved = blocks.reserve(1) or []
        owners = [o for first, n, o in blocks.ranges() for _ in range(first, first + n)]
        assert owners == [blocks.owner(b) for b in range(18)]
        starts = [first for first, _, _ in blocks.ranges()]
        assert starts[0] == 0
        neighbours = [owner for _, _, owner in blocks.ranges()]
        assert all(a is not b for a, b in itertools.pairwise(neighbours))
        blocks.release_reserved(reserved)


def test_without_prefix_cache_nothing_is_found() -> None:
    """Switched off, insertion and look-up do nothing."""
    blocks, table = manager(prefix_cache=False), []
    blocks.grow(table, 16)
    blocks.insert(table[0], b"h")
    blocks.release(table)
    assert blocks.match([b"h"]) == []
    assert blocks.owner(table[0]) is Owner.FREE


def test_expansion_makes_every_draft_block_stale() -> None:
    """Raising the epoch is the whole invalidation; the tail joins the free blocks."""
    blocks, table = manager(), []
    blocks.grow(table, 40)
    blocks.draft.fill(table, 0, 20)
    assert blocks.draft.computed(table, 0) == (20, 1)
    assert blocks.owner(4) is Owner.DRAFT
    blocks.expand()
    assert blocks.draft.computed(table, 0) == (0, 0)
    assert (blocks.num_free, blocks.num_total, blocks.owner(4)) == (3, 6, Owner.FREE)
    blocks.check_integrity([table])


def test_a_reused_block_holds_no_draft_tokens() -> None:
    """The next owner of a block starts with an empty draft half."""
    blocks, table = manager(), []
    blocks.grow(table, 16)
    blocks.draft.fill(table, 0, 16)
    blocks.release(table)
    other: list[int] = []
    blocks.grow(other, 64)
    assert blocks.draft.computed(other, 0) == (0, 0)


def test_renamed_blocks_keep_counts_hashes_and_rows() -> None:
    """After a move rows, cache and free blocks are as if the block had always been there."""
    blocks = manager(num_base=4, num_extra=2)
    blocks.expand()
    held: list[int] = []
    blocks.grow(held, 6 * 16)
    tail = [b for b in held if b >= 4]
    blocks.insert(tail[0], b"h")
    blocks.acquire([tail[0]])  # a second row shares it
    head = [b for b in held if b < 4]
    blocks.release(head)
    blocks.close_tail()
    assert blocks.match([b"h"]) == []  # a closed tail block is not handed out, shared or not
    assert blocks.live_tail_blocks() == sorted(tail)
    destinations = blocks.reserve(2)
    assert destinations is not None
    assert blocks.num_granted == 2
    assert blocks.reserve(3) is None
    moves = dict(zip(tail, destinations, strict=True))
    blocks.release([tail[1]])  # its row ends while the copy runs
    assert blocks.owner(tail[1]) is Owner.DRAFT
    blocks.rename(moves)
    assert blocks.match([b"h"]) == [moves[tail[0]]]
    assert blocks.owner(moves[tail[1]]) is Owner.FREE
    blocks.give_tail_to_draft()
    shared = [moves[tail[0]]]
    blocks.check_integrity([shared, shared])
    assert (blocks.num_free, blocks.num_total, blocks.expanded) == (3, 4, False)


def test_an_abandoned_contraction_frees_the_destinations_alone() -> None:
    """Reopened, the tail is as before, and reserved blocks are free again."""
    blocks = manager()
    blocks.expand()
    table: list[int] = []
    blocks.grow(table, 5 * 16)
    blocks.release(table[:2])
    blocks.close_tail()
    assert blocks.num_total == 4
    reserved = blocks.reserve(1)
    assert reserved is not None
    blocks.reopen_tail()
    blocks.release_reserved(reserved)
    blocks.check_integrity([table[2:]])
    assert (blocks.num_free, blocks.num_total) == (3, 6)


def test_the_check_sees_what_is_wrong() -> None:
    """A lost reference, a block with two owners and a foreign hash all raise."""
    blocks, table = manager(), []
    blocks.grow(table, 32)
    blocks.check_integrity([table])
    with pytest.raises(AssertionError, match="differ from the tables"):
        blocks.check_integrity([table[:1]])
    with pytest.raises(AssertionError, match="holds a block twice"):
        blocks.check_integrity([[table[0], table[0]]])
    blocks.insert(table[0], b"h")
    with pytest.raises(AssertionError, match="another row's tokens"):
        blocks.check_row(table, [b"other"], 0)
    blocks._free_head.append(table[1])
    with pytest.raises(AssertionError, match="owner"):
        blocks.check_integrity([table])


@pytest.mark.parametrize("seed", range(20))
def test_random_operations(seed: int) -> None:
    """Any order of growing, sharing, releasing, reserving and moving keeps every invariant."""
    rng = random.Random(seed)
    blocks = manager(num_base=rng.randint(4, 12), num_extra=rng.randint(0, 6))
    tables: list[list[int]] = []
    reserved: list[list[int]] = []
    names = [bytes([i]) for i in range(8)]
    for _ in range(300):
        match rng.randrange(8):
            case 0:
                table: list[int] = blocks.match(names[: rng.randint(0, 3)])
                blocks.acquire(table)
                tables.append(table)
            case 1 if tables:
                blocks.grow(rng.choice(tables), rng.randint(1, 80))
            case 2 if tables:
                blocks.release(tables.pop(rng.randrange(len(tables))))
            case 3 if tables:
                for block_id, name in zip(rng.choice(tables), names, strict=False):
                    blocks.insert(block_id, name)
            case 4 if len(reserved) < 2:
                taken = blocks.reserve(rng.randint(0, 3))
                reserved += [taken] if taken is not None else []
            case 5 if reserved:
                blocks.release_reserved(reserved.pop())
            case 6 if not blocks.expanded:
                blocks.expand()
            case 7 if blocks.expanded:
                contract(blocks, tables, rng)
        blocks.check_integrity(tables)
        free = blocks.num_free + blocks.num_granted + len({b for t in tables for b in t})
        assert free == blocks.num_total


def contract(blocks: BlockManager, tables: list[list[int]], rng: random.Random) -> None:
    """Close the tail and move what lives there, or give up."""
    blocks.close_tail()
    live = blocks.live_tail_blocks()
    destinations = blocks.reserve(len(live))
    if destinations is None or rng.random() < 0.3:
        blocks.reopen_tail()
        blocks.release_reserved(destinations or [])
        return
    moves = dict(zip(live, destinations, strict=True))
    blocks.rename(moves)
    for table in tables:
        table[:] = [moves.get(b, b) for b in table]
    blocks.give_tail_to_draft()
