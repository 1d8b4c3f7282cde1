"""Sums that a policy keeps for itself: vectors that add up in any order, forgetting if wished.

Forgetting is forward decay (Cormode et al., ICDE 2009): a sum is kept with the clock that it
counts at, so that two of them are brought to the later clock and added, in whatever order they
come. The clock is the profile's count of steps, `Stats.totals.steps`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

MAX_VALUES = 256  # in one vector
MAX_NAME_CHARACTERS = 96
_MOST = 1e300


class OwnSums(NamedTuple):
    """A vector of sums in which a step counts half as much `half_life` steps later."""

    values: tuple[float, ...]
    half_life: float = math.inf
    at: float = 0.0  # clock that the values count at

    def plus(self, other: OwnSums) -> OwnSums:
        """The sum of both, at the later of their clocks; a shorter vector ends in zeros."""
        newer, older = (self, other) if self.at >= other.at else (other, self)
        kept, mine, theirs = newer.weight_of(older.at), newer.values, older.values
        if len(mine) == len(theirs):
            values = [a + kept * b for a, b in zip(mine, theirs, strict=True)]
        else:
            values = [a + kept * b for a, b in zip_longest(mine, theirs, fillvalue=0.0)]
        return OwnSums(tuple(values), newer.half_life, newer.at)

    def weight_of(self, then: float) -> float:
        """What is left at this clock of a step that ran at an earlier one, [0, 1]."""
        return 1.0 if self.half_life == math.inf else 0.5 ** ((self.at - then) / self.half_life)

    def less(self, other: OwnSums) -> OwnSums:
        """What is here beyond `other`, at the later clock."""
        return self.plus(other._replace(values=tuple(-value for value in other.values)))

    def field(self, name: str) -> str:
        """Name of the sums in a store; the half-life is part of it, since it cannot change."""
        return f"own:{self.half_life!r}:{name}"

    def text(self) -> str:
        """The clock and the values, as a store's script reads them."""
        return " ".join([repr(float(value)) for value in (self.at, *self.values)])


def from_text(half_life: str, text: str) -> OwnSums | None:
    """Read sums back; None if they are not ours."""
    numbers = numbers_of(text)
    try:
        half = float(half_life)
    except ValueError:
        return None
    if not half > 0 or len(numbers) < 2 or numbers[0] < 0:
        return None
    return OwnSums(tuple(numbers[1:]), half, numbers[0])


def numbers_of(text: str) -> Sequence[float]:
    """Numbers of a text with spaces between them; none at all if one of them is no number."""
    parts = text.split(" ")
    if len(parts) > MAX_VALUES + 1:
        return ()
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        return ()
    return numbers if all(-_MOST < number < _MOST for number in numbers) else ()
