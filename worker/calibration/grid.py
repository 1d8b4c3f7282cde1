"""What a calibration measures, and what it finds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from worker.messages import StepSums


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What is measured: the shortest context with everything, the others without catch-up."""

    context_lengths: tuple[int, ...]  # tokens of a row when measuring begins
    batch_sizes: tuple[int, ...]  # in the order in which they are measured
    stale_tokens: tuple[int, ...]  # of a row, that its draft then catches up
    repeats: int  # steps of each batch size and gamma
    temperature: float


@dataclass(slots=True)
class Cell:
    """Timed steps of one context length, batch size and gamma."""

    context_length: int
    batch_size: int
    gamma: int
    num_steps: int = 0
    step_us: int = 0
    num_rows: int = 0  # summed over steps
    num_emitted: int = 0

    def add(self, num_steps: int, step_us: int, num_rows: int, num_emitted: int) -> None:
        """Add steps up."""
        self.num_steps += num_steps
        self.step_us += step_us
        self.num_rows += num_rows
        self.num_emitted += num_emitted

    def figures(self) -> dict[str, float]:
        """What it shows; per token of a row is what policies minimise."""
        steps, tokens = max(1, self.num_steps), max(1, self.num_emitted)
        return {
            "context_length": self.context_length,
            "batch_size": self.batch_size,
            "gamma": self.gamma,
            "num_steps": self.num_steps,
            "ms_per_step": self.step_us / steps / 1e3,
            "tokens_per_step": self.num_emitted / max(1, self.num_rows),
            "ms_per_token": self.step_us * self.batch_size / tokens / 1e3,
        }


class CatchUp(NamedTuple):
    """What it took a batch to speculate again: of all its steps, the draft's catching up."""

    batch_size: int
    stale_tokens: int  # of a row
    num_steps: int
    ms: float


@dataclass(slots=True)
class Measured:
    """What was found, and the reports that teach it."""

    cells: dict[tuple[int, int, int], Cell] = field(default_factory=dict)
    catch_ups: list[CatchUp] = field(default_factory=list)
    reports: list[StepSums] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def cell(self, context_length: int, batch_size: int, gamma: int) -> Cell:
        """The cell of these, made if it is new."""
        key = (context_length, batch_size, gamma)
        return self.cells.setdefault(key, Cell(*key))


def default_batch_sizes(most: int) -> tuple[int, ...]:
    """Powers of two below `most`, and `most`: the ends first, then from the middle outwards."""
    sizes = [1 << n for n in range(most.bit_length()) if 1 << n < most] + [most]
    inner = sorted(sizes[1:-1], key=lambda size: abs(sizes.index(size) - len(sizes) // 2))
    return tuple(dict.fromkeys([sizes[0], sizes[-1], *inner]))
