"""Slices of all runs, paired by run, cell and pass, and what they say of one arm over another."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from paper.design import OFF
from paper.stats import Estimate, difference, mean, mean_of, of

Key = tuple[str, int]  # run and pass


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """How many times as good an arm is as another: a geometric mean over pairs of slices."""

    logs: Estimate
    paired: bool  # False: pooled over runs that have only `off` in common

    @property
    def mean(self) -> float:
        """Best guess."""
        return math.exp(self.logs.mean)

    @property
    def low(self) -> float:
        """Lower end of the 95 % interval."""
        return math.exp(self.logs.low)

    @property
    def high(self) -> float:
        """Upper end."""
        return math.exp(min(700.0, self.logs.high))


class Slices:
    """Figures of one section by cell, arm, run and pass; higher is better."""

    def __init__(
        self, runs: Iterable[Mapping[str, Any]], section: str, figure: str, *, inverse: bool = False
    ) -> None:
        """Take the slices that count.

        Args:
            runs: Results of `paper.py run`.
            section: Of them.
            figure: A field of a slice.
            inverse: Whether less of it is better.
        """
        self._values: dict[str, dict[str, dict[Key, float]]] = {}
        for run in runs:
            for found in run["slices"]:
                if found["section"] == section and found["counts"] and found.get(figure):
                    own = self._values.setdefault(found["cell"], {}).setdefault(found["arm"], {})
                    value = float(found[figure])
                    own[run["run"], found["pass"]] = 1 / value if inverse else value

    @property
    def cells(self) -> list[str]:
        """Cells that were measured, by number where they are numbers."""
        return sorted(self._values, key=lambda cell: (not cell.isdigit(), cell.zfill(9)))

    def arms(self, cell: str) -> list[str]:
        """Arms of a cell."""
        return list(self._values.get(cell, {}))

    def all_arms(self) -> list[str]:
        """Arms of any cell, in the order in which they were measured."""
        return list(dict.fromkeys(arm for cell in self.cells for arm in self._values[cell]))

    def level(self, cell: str, arm: str) -> float | None:
        """Mean figure."""
        own = self._values.get(cell, {}).get(arm)
        return mean(list(own.values())) if own else None

    def gains(self, cell: str, arm: str, base: str = OFF) -> dict[Key, float]:
        """Arm over base, by run and pass."""
        own, other = (self._values.get(cell, {}).get(name, {}) for name in (arm, base))
        return {key: own[key] / other[key] for key in own if key in other}

    def ratio(self, cell: str, arm: str, base: str = OFF) -> Ratio | None:
        """Arm over base; over `off` where they were never in one run. None: not to be compared."""
        paired = self.gains(cell, arm, base)
        if paired:
            return Ratio(logs=_logs(paired.values()), paired=True)
        first, second = self.gains(cell, arm), self.gains(cell, base)
        if not first or not second:
            return None
        logs = difference(_logs(first.values()), _logs(second.values()))
        return Ratio(logs=logs, paired=False)

    def mean_ratio(self, cells: Iterable[str], arm: str, base: str = OFF) -> Ratio | None:
        """Geometric mean over cells; None unless it is known in each."""
        found = [self.ratio(cell, arm, base) for cell in cells]
        known = [ratio for ratio in found if ratio is not None]
        if not known or len(known) < len(found):
            return None
        logs = mean_of([ratio.logs for ratio in known])
        return Ratio(logs=logs, paired=all(ratio.paired for ratio in known))

    def best(self, cell: str, arms: Iterable[str]) -> str | None:
        """The arm that is best over `off` in a cell."""
        found = {arm: ratio.mean for arm in arms if (ratio := self.ratio(cell, arm)) is not None}
        return max(found, key=found.__getitem__) if found else None

    def excess(self, cell: str, arm: str, best: str, share: float) -> Estimate | None:
        """Gain of an arm less a share of the gain of `best`, both over `off`."""
        own, other = self.gains(cell, arm), self.gains(cell, best)
        common = [(own[key] - 1) - share * (other[key] - 1) for key in own if key in other]
        if common:
            return of(common)
        if not own or not other:
            return None
        first, second = (of([g - 1 for g in found.values()]) for found in (own, other))
        scaled = replace(second, mean=share * second.mean, variance=share**2 * second.variance)
        return difference(first, scaled)


def _logs(values: Iterable[float]) -> Estimate:
    return of([math.log(value) for value in values])
