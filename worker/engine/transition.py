"""The phases of a transition of elastic memory, and what one needs of scheduler and draft.

 IDLE, resident ──expand──► EXPANDING ──nothing in flight──► IDLE, offloaded
 IDLE, offloaded ──contract──► COPYING ──► FREEZING
   ▲                              │           │ │
   └────────── aborted ───────────┴───────────┘ │ rename
 IDLE, resident ◄── RESTORING ◄─── LOADING ◄────┘

COPYING: the agent copies full tail blocks while steps run. FREEZING: steps pause until nothing
is in flight; then the worker itself copies the few blocks that were being filled, which costs
less than asking: a trip to the agent and back was longer than a step (measured on an H200). Up
to the rename the sources are intact, so an abort frees the destinations and nothing else. After
it the tail is the draft's, and only a verified load leads on.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol


class Tables(Protocol):
    """What is needed of the scheduler."""

    def blocks_being_filled(self) -> set[int]:
        """Blocks that a step may still write."""
        ...

    def rename(self, moves: dict[int, int]) -> None:
        """Put destinations in the place of sources, in tables and block manager alike."""
        ...


class Draft(Protocol):
    """What is needed of the draft model."""

    def drop(self) -> None:
        """Forget everything derived from the tail's bytes."""
        ...

    def restore(self) -> None:
        """Rebuild it from the tail's bytes, which were verified; NightjarError if it cannot be."""
        ...


@dataclass(frozen=True, kw_only=True)
class ElasticCounters:
    """What the status shows."""

    num_expansions: int  # since start
    num_contractions: int  # completed since start
    num_granted_blocks: int  # that the agent may write now


class Phase(enum.Enum):
    """Where a transition stands, as in the module's diagram."""

    IDLE = enum.auto()
    EXPANDING = enum.auto()
    COPYING = enum.auto()
    FREEZING = enum.auto()
    LOADING = enum.auto()
    RESTORING = enum.auto()


# Steps would write blocks that are being copied, or keep `after_retire` from being reached.
PAUSED = {Phase.EXPANDING, Phase.FREEZING, Phase.RESTORING}
