"""Moving KV blocks out of the tail: the plan, its check, and the copy.

The worker plans from its own tables; the agent checks what it was granted against the
layout and copies. Neither reads what the blocks hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from memory_agent import failpoint
from memory_agent.layout import ArenaLayout


class MoveRefused(ValueError):
    """The moves of a grant would touch bytes outside it; the sentence says which."""


class Aborted(Exception):
    """The work was called off between two pieces."""


def plan_moves(sources: Iterable[int], destinations: Iterable[int]) -> dict[int, int]:
    """Map each source to its own destination, both in ascending order.

    Raises:
        ValueError: Their numbers differ.
    """
    return dict(zip(sorted(sources), sorted(destinations), strict=True))


def check_moves(layout: ArenaLayout, sources: Sequence[int], destinations: Sequence[int]) -> None:
    """Check that the moves lead one to one from the tail into the head.

    Raises:
        MoveRefused: They do not.
    """
    if len(sources) != len(destinations):
        raise MoveRefused(f"{len(sources)} sources and {len(destinations)} destinations")
    base, total = layout.num_base_blocks, layout.num_base_blocks + layout.num_extra_blocks
    for source in sources:
        if not base <= source < total:
            raise MoveRefused(f"source {source} lies outside the tail [{base}, {total})")
    for destination in destinations:
        if not 0 <= destination < base:
            raise MoveRefused(f"destination {destination} lies outside the head [0, {base})")
    if len(set(sources)) != len(sources) or len(set(destinations)) != len(destinations):
        raise MoveRefused("a block is named twice")


def copy_blocks(
    arena: memoryview,
    layout: ArenaLayout,
    sources: Sequence[int],
    destinations: Sequence[int],
    aborted: Callable[[], bool],
) -> int:
    """Copy checked moves, block by block; returns the bytes written.

    Raises:
        MoveRefused: The moves fail `check_moves`; nothing was written.
        Aborted: `aborted()` became true; some destinations may be written.
    """
    check_moves(layout, sources, destinations)
    size = layout.block_bytes
    for done, (source, destination) in enumerate(zip(sources, destinations, strict=True)):
        if aborted():
            raise Aborted
        start, end = layout.block_offset(destination), layout.block_offset(source)
        arena[start : start + size] = arena[end : end + size]
        if done == 0:
            failpoint.reached("agent.mid_copy")
    return size * len(sources)
