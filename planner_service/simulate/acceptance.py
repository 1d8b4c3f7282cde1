"""How drafts are accepted: each request has a class, and the mixture of classes may move."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from planner_service.context import MAX_GAMMA

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class RequestClass:
    """Requests whose next draft is accepted with the same chance."""

    name: str
    alpha: float  # chance that the first draft is accepted
    falloff: float = 1.0  # the chance of each further one, given those before, is times this

    @property
    def prefixes(self) -> list[float]:
        """[MAX_GAMMA]: chance that the first i + 1 drafts are all accepted."""
        chances = [self.alpha * self.falloff**i for i in range(MAX_GAMMA)]
        return list(accumulate(chances, lambda a, b: a * b))


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """Classes and their shares among the requests, by step.

    Shares hold from the step that they stand at; with `drifts` they move in a straight line to
    the next, and begin again after the last.
    """

    name: str
    classes: tuple[RequestClass, ...]
    phases: tuple[tuple[int, tuple[float, ...]], ...]  # (first step, shares), from step 0
    drifts: bool = False

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """First step of each phase."""
        return tuple(step for step, _ in self.phases)

    @cached_property
    def changes(self) -> tuple[int, ...]:
        """Steps at which the text of every running request changes, too."""
        return () if self.drifts else self.starts[1:]

    @cached_property
    def prefixes(self) -> Floats:
        """[classes, MAX_GAMMA]: chance that the first i + 1 drafts are all accepted."""
        return np.array([each.prefixes for each in self.classes])

    def shares(self, step: int) -> tuple[float, ...]:
        """Share of each class among the requests that come at a step."""
        if self.drifts:
            step %= self.starts[-1]
        at = bisect_right(self.starts, step) - 1
        now = self.phases[at][1]
        if not self.drifts:
            return now
        then = self.phases[at + 1][1]
        part = (step - self.starts[at]) / (self.starts[at + 1] - self.starts[at])
        return tuple(a + part * (b - a) for a, b in zip(now, then, strict=True))

    def draw(self, step: int, uniform: float) -> int:
        """Class of a request that comes at a step, from a uniform number in [0, 1)."""
        for index, total in enumerate(accumulate(self.shares(step))):
            if uniform < total:
                return index
        return len(self.classes) - 1


def stationary(alpha: float = 0.7, falloff: float = 1.0) -> Acceptance:
    """One class for ever."""
    only = RequestClass(name="all", alpha=alpha, falloff=falloff)
    return Acceptance(name="stationary", classes=(only,), phases=((0, (1.0,)),))


_EASY = RequestClass(name="easy", alpha=0.85)
_MIDDLE = RequestClass(name="middle", alpha=0.65, falloff=0.97)
_HARD = RequestClass(name="hard", alpha=0.4, falloff=0.95)


def by_class() -> Acceptance:
    """Three classes in a mixture that stays: drafts fit some texts far better than others."""
    shares = (0.3, 0.4, 0.3)
    return Acceptance(name="classes", classes=(_EASY, _MIDDLE, _HARD), phases=((0, shares),))


def drifting(half_period: int = 6_000) -> Acceptance:
    """The mixture moves from mostly easy to mostly hard and back, over and over."""
    easy, hard = (0.9, 0.1), (0.1, 0.9)
    return Acceptance(
        name="drifting",
        classes=(_EASY, _HARD),
        phases=((0, easy), (half_period, hard), (2 * half_period, easy)),
        drifts=True,
    )


def abrupt(down: int = 5_000, up: int = 10_000) -> Acceptance:
    """The mixture falls at one step and rises at another, for running requests too."""
    easy, hard = (0.9, 0.1), (0.1, 0.9)
    return Acceptance(
        name="abrupt",
        classes=(_EASY, _HARD),
        phases=((0, easy), (down, hard), (up, easy)),
    )
