"""Who may own a block, and a pool's owners as runs of neighbours."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from itertools import groupby


class Owner(enum.Enum):
    """Owner of a block."""

    FREE = "free"
    ROW = "row"
    CACHED = "cached"
    GRANTED = "granted"
    DRAFT = "draft"


def runs(owners: Iterable[Owner]) -> list[tuple[int, int, Owner]]:
    """First block and length of each run of blocks with one owner, in order."""
    found: list[tuple[int, int, Owner]] = []
    first = 0
    for owner, run in groupby(owners):
        count = sum(1 for _ in run)
        found.append((first, count, owner))
        first += count
    return found
