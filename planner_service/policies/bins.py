"""Blocks and bins of policy `nightjar`: where a stream stands at each batch size."""

from __future__ import annotations

import math
import random
from typing import NamedTuple, cast

from planner_service.policies.held import epsilon_draw
from planner_service.session import Numbers, Session

MAX_BLOCK = 40


class Bin(NamedTuple):
    """Where a stream stands at one batch size; an arm of -1 is yet to be drawn."""

    block: int = 1  # j, from 1
    number: int = 1  # b, from 1 in each block
    position: int = 0  # steps of the bin that ran
    arm: int = -1
    explored: int = 0
    propensity: float = 1.0
    since: float = 0.0  # clock of the restart that the blocks are counted from

    @property
    def length(self) -> int:
        """Steps of the bin, at least 1."""
        steps = _steps(self.block)
        size = math.isqrt(steps)
        return min(size, steps - (self.number - 1) * size)

    @classmethod
    def at(cls, num_steps: int, since: float = 0.0) -> Bin:
        """The bin that the next step belongs to after `num_steps` at this batch size."""
        block = min((num_steps + 1).bit_length(), MAX_BLOCK)
        start = _steps(block)
        number = (num_steps + 1 - start) // math.isqrt(start) + 1
        return cls(block, number, since=since)

    @classmethod
    def read(cls, numbers: Numbers, largest: int) -> Bin | None:
        """A bin from foreign numbers; None unless it is one that we could have written."""
        if len(numbers) != len(cls._fields) or any(type(n) is not int for n in numbers[:5]):
            return None
        found = cls(*cast(tuple[int, int, int, int, int, float, float], numbers))
        if not (1 <= found.block <= MAX_BLOCK and -1 <= found.arm <= largest):
            return None
        fits = 1 <= found.number <= 2**found.block and 0 < found.propensity <= 1
        return found if fits and 0 <= found.position < found.length else None

    def after(self, num_steps: int) -> Bin:
        """The bin once steps ran; those past its end ran while the next answer was on its way."""
        position = self.position + num_steps
        if position < self.length:
            return self._replace(position=position)
        steps = _steps(self.block)
        if self.number * math.isqrt(steps) >= steps:
            return Bin(min(self.block + 1, MAX_BLOCK), 1, since=self.since)
        return Bin(self.block, self.number + 1, since=self.since)

    def draw(self, exploit: int, feasible: int, rng: random.Random) -> Bin:
        """Draw the arm: uniform over [0, feasible] with probability 1/b, else `exploit`."""
        arm, explored, propensity = epsilon_draw(exploit, feasible, 1 / self.number, rng)
        return self._replace(arm=arm, explored=int(explored), propensity=propensity)


def bins_of(session: Session, largest: int) -> dict[int, Bin]:
    """The bins of a session by batch size, moved on by the steps that ran since."""
    bins = cast(dict[int, Bin], dict(session.numbers))  # our own, unless foreign
    if session.foreign:
        read = {bucket: Bin.read(numbers, largest) for bucket, numbers in bins.items()}
        bins = {bucket: found for bucket, found in read.items() if found is not None}
    for bucket, num_steps in session.ran.items():
        if bucket in bins:
            bins[bucket] = bins[bucket].after(num_steps)
    return bins


def _steps(block: int) -> int:
    """Steps of a block, H_j; also the number of the block's first step, counted from 1."""
    return 1 << (block - 1)
