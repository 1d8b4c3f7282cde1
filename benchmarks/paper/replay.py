"""Replays policies in the simulator from what was measured, and says how well it predicts.

Costs of steps, acceptance by prompt class, lengths and arrivals are the runs' own. A replayed
figure counts only where the simulator also meets the figures that were measured.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paper.costs import NotEnough, Record, cost_table
from paper.record import Place, together
from paper.stats import mean
from planner_service.context import MAX_GAMMA
from planner_service.simulate.acceptance import Acceptance, RequestClass
from planner_service.simulate.arrivals import Arrivals, TraceLengths
from planner_service.simulate.batch import make
from planner_service.simulate.run import Scenario, start
from planner_service.simulate.worker import Worker

TOLERANCE = 0.05  # of a measured cell
SOME_STEPS = 500  # that a closed loop runs before its clock is looked at again
MAX_STEPS = 400_000  # of all traces of an arm
APART_S = 600.0  # between two traces: drained by then
SEEDS = (0, 1)
NUM_LENGTHS = 2000


def whole_lengths(place: Place) -> list[tuple[str, int, int]]:
    """Class, prompt and answer tokens as they would be had no request been cut.

    Short answers end within a slice more often than long ones. So one that was cut stands for
    those that are longer (Efron's redistribution to the right, of Kaplan and Meier's estimate);
    drawn evenly by weight.
    """
    ordered = sorted(place["lengths"], key=lambda found: (found[2], not found[3]))
    found, weights, weight = [], [], 1.0
    for at, (category, prompt, answer, ended) in enumerate(ordered):
        left = len(ordered) - at - 1
        if ended or not left:
            found.append((category, prompt, max(1, answer)))
            weights.append(weight)
        else:
            weight *= 1 + 1 / left
    if not found:
        return []
    ends = np.cumsum(weights)
    at = np.searchsorted(ends, (np.arange(NUM_LENGTHS) + 0.5) / NUM_LENGTHS * ends[-1])
    drawn = [found[i] for i in at]
    random.Random(0).shuffle(drawn)
    return drawn


def acceptance(place: Place, lengths: Sequence[tuple[str, int, int]]) -> Acceptance:
    """Classes with their measured acceptance, in the shares that their tokens had.

    Of tokens, not requests: the simulator draws lengths whatever the class.

    Raises:
        NotEnough: Nothing was drafted.
    """
    tokens: Counter[str] = Counter()
    for name, _, answer in lengths:
        tokens[name] += answer
    classes, shares = [], []
    for name, counts in sorted(place["classes"].items()):
        if tokens[name] and counts["reached"][0]:
            classes.append(_class(name, counts))
            shares.append(tokens[name])
    if not classes:
        raise NotEnough("no drafts of any class")
    total = sum(shares)
    whole = tuple(share / total for share in shares)
    return Acceptance(name="measured", classes=tuple(classes), phases=((0, whole),))


def _class(name: str, counts: Mapping[str, Sequence[int]]) -> RequestClass:
    """Chance of the first draft, and the factor from each to the next that fits all best."""
    reached = np.array(counts["reached"][:MAX_GAMMA], float)
    known = reached > 0
    chances = np.array(counts["accepted"][:MAX_GAMMA], float)[known] / reached[known]
    alpha = float(chances[0])
    if alpha == 0 or len(chances) < 2:
        return RequestClass(name=name, alpha=alpha)
    factors = np.linspace(0.5, 1.5, 1001)
    fits = np.minimum(1.0, alpha * factors[:, None] ** np.arange(len(chances)))
    errors = ((fits - chances) ** 2 * reached[known]).sum(axis=1)
    factor = float(factors[int(np.argmin(errors))])
    # `RequestClass` lets the chance grow without end: it must stay one.
    return RequestClass(name=name, alpha=alpha, falloff=min(factor, alpha ** (-1 / MAX_GAMMA)))


class Replay:
    """The simulator with the runs' own costs, acceptance, lengths and arrivals."""

    def __init__(
        self,
        record: Record,
        cells: Sequence[int],
        max_gamma: int,
        pool: int,
        *,
        slice_s: float,
        warm_passes: int,
        passes: int,
    ) -> None:
        """Fit.

        Args:
            record: Of all runs.
            cells: Rows of closed loops.
            max_gamma: The engine's.
            pool: Its KV tokens.
            slice_s: Seconds of a pass of a closed loop.
            warm_passes: Passes that do not count.
            passes: Those of a closed loop that do.

        Raises:
            NotEnough: The record lacks something.
        """
        self.table = cost_table(record, cells, max_gamma)
        self._places: dict[str, Place] = record["places"]
        self._all = together(self._places.values())
        self._texts: dict[str, tuple[Acceptance, TraceLengths]] = {}
        self._text("")  # raises where there is nothing
        self._known: dict[tuple[str, object], float] = {}
        self._max_gamma, self._pool = max_gamma, pool
        self._warm_passes = warm_passes
        self._warm_s, self._end_s = warm_passes * slice_s, (warm_passes + passes) * slice_s

    def closed(self, arm: str, rows: int) -> float:
        """Tokens per second of decode rows in a closed loop, as long as the measured ones ran."""
        if (arm, rows) not in self._known:
            rates = []
            for seed in SEEDS:
                worker = self._start(arm, f"closed {rows}", seed, kind="closed", rows=rows)
                while worker.now < self._end_s:
                    worker.run(len(worker.steps) + SOME_STEPS)
                ends = np.array([step.seconds for step in worker.steps])
                emitted = np.array([step.num_emitted for step in worker.steps])
                counts = (ends > self._warm_s) & (ends <= self._end_s)
                rates.append(float(emitted[counts].sum()) / (self._end_s - self._warm_s))
            self._known[arm, rows] = mean(rates)
        return self._known[arm, rows]

    def trace(self, arm: str, name: str, passes: Sequence[Sequence[float]]) -> float:
        """Mean seconds from arrival to the last token over a trace's passes.

        A third of the first comes before, as often as passes warm up, and does not count.
        """
        if (arm, name) not in self._known:
            warm = passes[0][: max(1, len(passes[0]) // 3)]
            every = [*[warm] * self._warm_passes, *passes]
            begin = self._warm_passes * APART_S
            times = [at + n * APART_S for n, own in enumerate(every) for at in own]
            waits = []
            arrivals = {"kind": "azure", "rate": 1.0, "trace": tuple(times)}
            for seed in SEEDS:
                worker = self._start(arm, f"open {name}", seed, **arrivals)
                worker.run(MAX_STEPS)
                ended = worker.intake.finished
                waits += [end - r.arrived_at for r, end in ended if r.arrived_at >= begin]
            self._known[arm, name] = mean(waits)
        return self._known[arm, name]

    def _start(self, arm: str, name: str, seed: int, **arrivals: Any) -> Worker:
        accepted, lengths = self._text(name)
        scenario = Scenario(
            truth=self.table,
            noise=0.0,
            acceptance=accepted,
            arrivals=Arrivals(lengths=lengths, **arrivals),
            max_rows=self.table.max_batch_size,
            kv_pool_tokens=max(self._pool, 2 * lengths.most),
            max_gamma=self._max_gamma,
        )
        return start(make(arm), scenario, seed)

    def _text(self, name: str) -> tuple[Acceptance, TraceLengths]:
        """Acceptance and lengths of a cell; of all together where it drafted nothing."""
        if name not in self._texts:
            place = self._places.get(name, self._all)
            if not place["classes"]:
                place = self._all
            pairs = whole_lengths(place)
            if not pairs:
                raise NotEnough("no answer that ended")
            lengths = TraceLengths("the runs", [p for _, p, _ in pairs], [a for _, _, a in pairs])
            self._texts[name] = acceptance(place, pairs), lengths
        return self._texts[name]
