"""The plan, its check and the copy, on plain bytes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memory_agent.layout import ArenaLayout
from memory_agent.remap import Aborted, MoveRefused, check_moves, copy_blocks, plan_moves

LAYOUT = ArenaLayout(block_bytes=512, draft_block_bytes=64, image_bytes=3000, num_base_blocks=12)
BASE, TOTAL = LAYOUT.num_base_blocks, LAYOUT.num_base_blocks + LAYOUT.num_extra_blocks
HEAD, TAIL = range(BASE), range(BASE, TOTAL)


def blocks_of(memory: bytes | bytearray) -> list[bytes]:
    """The arena cut into blocks."""
    size = LAYOUT.block_bytes
    return [bytes(memory[start : start + size]) for start in range(0, len(memory), size)]


def filled_arena() -> bytearray:
    """An arena of which no two blocks are equal."""
    return bytearray(b"".join(bytes([i]) * LAYOUT.block_bytes for i in range(TOTAL)))


@given(st.sets(st.integers(0, 999)), st.sets(st.integers(1000, 1999)))
def test_plan_is_one_to_one(destinations: set[int], sources: set[int]) -> None:
    """Every source gets a destination of its own; unequal numbers are refused."""
    if len(sources) != len(destinations):
        with pytest.raises(ValueError, match=r"shorter|longer"):
            plan_moves(sources, destinations)
        return
    moves = plan_moves(sources, destinations)
    assert set(moves) == sources
    assert set(moves.values()) == destinations


@given(
    st.lists(st.sampled_from(TAIL), unique=True),
    st.permutations(list(HEAD)),
)
def test_copy_touches_destinations_alone(sources: list[int], heads: list[int]) -> None:
    """After a copy each destination equals its source, and every other block what it was."""
    sources = sources[: len(heads)]
    destinations = heads[: len(sources)]
    memory = filled_arena()
    before = blocks_of(memory)
    with memoryview(memory) as arena:
        num_bytes = copy_blocks(arena, LAYOUT, sources, destinations, lambda: False)
    assert num_bytes == len(sources) * LAYOUT.block_bytes
    moved = dict(zip(destinations, sources, strict=True))
    assert blocks_of(memory) == [before[moved.get(i, i)] for i in range(TOTAL)]


@pytest.mark.parametrize(
    ("sources", "destinations", "sentence"),
    [
        ([BASE], [], "1 sources and 0 destinations"),
        ([BASE - 1], [0], "source 11 lies outside the tail"),
        ([TOTAL], [0], "outside the tail"),
        ([-1], [0], "outside the tail"),
        ([BASE], [BASE], "destination 12 lies outside the head"),
        ([BASE], [-1], "outside the head"),
        ([BASE], [2**31 - 1], "outside the head"),
        ([BASE, BASE], [0, 1], "named twice"),
        ([BASE, BASE + 1], [0, 0], "named twice"),
    ],
)
def test_moves_outside_the_grant_are_refused(
    sources: list[int], destinations: list[int], sentence: str
) -> None:
    """Bad moves are refused with a sentence before a byte is written."""
    memory = filled_arena()
    before = bytes(memory)
    with memoryview(memory) as arena, pytest.raises(MoveRefused, match=sentence):
        copy_blocks(arena, LAYOUT, sources, destinations, lambda: False)
    assert memory == before


@given(
    st.lists(st.integers(-2, TOTAL + 2), max_size=4),
    st.lists(st.integers(-2, BASE + 2), max_size=4),
)
def test_moves_that_pass_the_check_are_safe(sources: list[int], destinations: list[int]) -> None:
    """What passes lies in range, is one to one, and is disjoint."""
    try:
        check_moves(LAYOUT, sources, destinations)
    except MoveRefused:
        return
    assert set(sources) <= set(TAIL)
    assert set(destinations) <= set(HEAD)
    assert len(set(sources)) == len(sources) == len(destinations) == len(set(destinations))


def test_an_abort_stops_between_blocks() -> None:
    """A copy that is called off has written whole blocks only."""
    memory = filled_arena()
    before = blocks_of(memory)
    calls = itertools.count()
    with memoryview(memory) as arena, pytest.raises(Aborted):
        copy_blocks(arena, LAYOUT, [BASE, BASE + 1], [0, 1], lambda: next(calls) == 1)
    assert blocks_of(memory) == [before[BASE], *before[1:]]
