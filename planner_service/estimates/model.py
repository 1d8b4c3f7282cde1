"""Acceptance and step time of one profile together: what each gamma is expected to yield."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from nightjar.buckets import BucketGrid
from planner_service.context import Context, Outcome
from planner_service.estimates import acceptance, step_cost, workload
from planner_service.estimates.acceptance import Acceptance
from planner_service.estimates.step_cost import (
    BATCH_EDGES,
    Cell,
    Floats,
    Spread,
    StepCost,
)
from planner_service.estimates.workload import Workload
from planner_service.own_sums import OwnSums
from planner_service.sums import Stats

KV_EDGES = tuple(16_384 * 4**i for i in range(5))
GRID = BucketGrid(BATCH_EDGES, KV_EDGES)
_KV_CENTRES = np.array([KV_EDGES[0] / 2, *(2.0 * edge for edge in KV_EDGES)])
_KV_PER_ROW = (16, 16_384)  # that a table covers
_NO_OWN: dict[str, OwnSums] = {}


def sums(
    policy: str, stats: Stats, context: Context, gamma: int, outcome: Outcome
) -> dict[str, OwnSums]:
    """What steps add to a policy's own sums, for `Model` to read."""
    num_rows = stats.reached[0] if stats.reached else 0.0
    found = acceptance.sums(policy, num_rows, outcome)
    clock = stats.totals.steps + outcome.num_steps
    found.update(step_cost.sums(policy, clock, context, gamma, outcome))
    found.update(workload.sums(policy, clock, context, gamma, outcome))
    return found


class Beyond(NamedTuple):
    """What speculation costs beyond its own steps, and how many rows draft."""

    drafting_share: float = 1.0
    prompts_us: float = 0.0  # of the draft, for a step with prompts
    prompt_steps: float = 0.0  # such steps for each emitted token
    prefill_us: float = 0.0  # for each row and token that it emits
    switching_us: float = 0.0  # for each row, a step

    def coarse(self) -> Beyond:
        """To about a tenth: what is built for it need not be built at every step."""
        return Beyond(*(float(f"{value:.1g}") if i else value for i, value in enumerate(self)))


NOTHING_BEYOND = Beyond()


class _Times(NamedTuple):
    """What a fit says at some batch sizes, the nodes; between them it goes in a straight line."""

    log_us: Floats  # [nodes, gammas], without KV reads
    by_node: list[list[float]]  # the same
    factors: list[list[list[float]]]  # [node][best gamma][gamma], see `Model.time_factors`


class Model:
    """Reads a policy's sums; fits anew only where the rounded values of a cell have changed.

    All it keeps follows from the sums last read: a memo, no state.
    """

    def __init__(self, policy: str, largest: int, *, optimism_sds: float) -> None:
        """Start from the prior.

        Args:
            policy: Whose sums are read.
            largest: Largest gamma.
            optimism_sds: Standard deviations between what is expected and what may well be.
        """
        self._policy = policy
        self._largest = largest
        self._gammas = _gammas(policy, largest)
        self.optimism_sds = optimism_sds
        self._own: Mapping[str, OwnSums] = _NO_OWN
        self._sums: dict[str, OwnSums] = {}
        self._num_own = 0
        self._last_table: dict[int, tuple[int, int]] = {}
        self._cells: dict[str, tuple[Cell, Cell, Spread]] = {}
        self._counts: tuple[Sequence[OwnSums | None], Sequence[float], Sequence[float]] = (
            (),
            (),
            (),
        )
        self.acceptance = self._estimate((), (), ())
        self.workload = Workload()
        self._fit()

    def read(self, stats: Stats) -> None:
        """Take over what is known now."""
        if stats.own is self._own and stats.own:
            return
        self._own = stats.own
        found = acceptance.counts(self._policy, stats.own)
        counts = (found, stats.prior_reached, stats.prior_accepted)
        if counts != self._counts:
            self._counts = counts
            self.acceptance = self._estimate(*counts)
        self.workload = workload.read(self._policy, stats.own)
        if self._read_cells(stats.own):
            self._fit()

    def _estimate(
        self,
        counts: Sequence[OwnSums | None],
        prior_reached: Sequence[float],
        prior_accepted: Sequence[float],
    ) -> Acceptance:
        return acceptance.estimate(
            counts,
            prior_reached,
            prior_accepted,
            largest=self._largest,
            optimism_sds=self.optimism_sds,
        )

    def tokens_lately(self, num_rows: int) -> tuple[float, ...]:
        """Mean tokens by gamma, going by about as many of the last rows alone."""
        usual = self.acceptance.tokens[1] - 1
        return acceptance.lately(self._counts[0], usual, self._largest, num_rows)

    def step_us(self, context: Context) -> list[float]:
        """Expected microseconds of a step, by gamma."""
        kv_us = self.cost.us_per_kv_token * step_cost.kv_of_cell(context)
        node, share = _place(context.batch_size, context.max_batch_size)
        by_node = self._times(context.max_batch_size).by_node
        if not share:
            return [math.exp(log_us) + kv_us for log_us in by_node[node]]
        return [
            math.exp(low + share * (high - low)) + kv_us
            for low, high in zip(by_node[node], by_node[node + 1], strict=True)
        ]

    def time_factors(self, context: Context, best: int) -> list[float]:
        """By gamma, the factor by which its time may well be less, measured against `best`'s."""
        node, share = _place(context.batch_size, context.max_batch_size)
        return self._times(context.max_batch_size).factors[node + round(share)][best]

    def table(
        self, max_batch_size: int, largest: int, beyond: Beyond = NOTHING_BEYOND
    ) -> dict[int, tuple[int, int]]:
        """Best gamma of each bucket of `GRID` up to a batch size, as pairs for a decision."""
        # Rounded: a table holds for buckets that nobody asks about now, and takes time to build.
        coarse = tuple([round(32 * value) for value in self.acceptance.tokens[: largest + 1]])
        key = (max_batch_size, coarse, beyond)
        table = self._tables.get(key)
        if table is None:
            if len(self._tables) > 8:
                self._tables.clear()
            table = self._build_table(max_batch_size, np.array(coarse) / 32, beyond)
            # An equal table stays the same object: it is checked and encoded once.
            table = self._last_table if table == self._last_table else table
            self._last_table = self._tables[key] = table
        return table

    def _times(self, max_batch_size: int) -> _Times:
        known = self._by_max_batch.get(max_batch_size)
        if known is None:
            sizes = np.array(_nodes(max_batch_size))
            log_us = self.cost.log_us(sizes, self._largest)
            variance = self.cost.covariance(sizes, self._largest)
            own = np.einsum("bgg->bg", variance)
            apart = own[:, :, None] + own[:, None, :] - 2 * variance
            factors = np.exp(-self.optimism_sds * np.sqrt(np.maximum(apart, 0.0)))
            known = _Times(log_us, log_us.tolist(), factors.tolist())
            self._by_max_batch[max_batch_size] = known
        return known

    def _read_cells(self, own: Mapping[str, OwnSums]) -> bool:
        """Whether a cell's rounded values have changed."""
        known, names = self._sums, self._gammas
        news = [name for name, found in known.items() if own.get(name) is not found]
        # Of another profile there may be as many, under other names.
        if len(own) != self._num_own or any(name not in own for name in news):
            self._num_own = len(own)
            news += [name for name in own if name in names and name not in known]
        changed = False
        for name in news:
            before, found, cell = self._cells.pop(name, None), own.get(name), None
            if found is None:
                del known[name]
            else:
                known[name] = found
                cell = step_cost.read_cell(names[name], found)
            if cell is not None:
                self._cells[name] = cell
            changed = changed or (cell and cell[1]) != (before and before[1])
        return changed

    def _fit(self) -> None:
        cells = list(self._cells.values())
        spread = Spread()
        for _, _, part in cells:
            spread = spread.plus(part)
        self.cost = StepCost([cell for cell, _, _ in cells], spread)
        self._by_max_batch: dict[int, _Times] = {}
        self._tables: dict[tuple[int, tuple[int, ...], Beyond], dict[int, tuple[int, int]]] = {}

    def _build_table(
        self, max_batch_size: int, tokens: Floats, beyond: Beyond
    ) -> dict[int, tuple[int, int]]:
        starts = np.array([edge for edge in BATCH_EDGES if edge <= max_batch_size], dtype=float)
        ends = np.minimum([*(starts[1:] - 1), max_batch_size], max_batch_size)
        rows = np.sqrt(starts * ends)[:, None]  # in the middle of each bucket
        by_node = self._times(max_batch_size).log_us[:, : len(tokens)]
        at = np.log(_nodes(max_batch_size))
        log_us = [np.interp(np.log(rows[:, 0]), at, column) for column in by_node.T]
        emitted = 1 + beyond.drafting_share * (tokens - 1)
        more = -beyond.prompts_us * np.expm1(-beyond.prompt_steps * rows * emitted)
        more += rows * (beyond.prefill_us * emitted + beyond.switching_us)
        us = np.exp(np.array(log_us).T) + more * (np.arange(len(tokens)) > 0)
        kv_us = self.cost.us_per_kv_token * _KV_CENTRES
        best = (emitted / (us[:, None, :] + kv_us[None, :, None])).argmax(axis=2)
        least, most = (starts[:, None] * n for n in _KV_PER_ROW)
        lows, highs = np.array([0, *KV_EDGES]), np.array([*KV_EDGES, np.inf])
        covered = (highs[None, :] > least) & (lows[None, :] < most)
        width = len(KV_EDGES) + 1
        buckets = (np.arange(1, len(starts) + 1)[:, None] * width + np.arange(width))[covered]
        gammas = best[covered].tolist()
        return {
            bucket: (gamma, gamma) for bucket, gamma in zip(buckets.tolist(), gammas, strict=True)
        }


@lru_cache(maxsize=16)
def _nodes(max_batch_size: int) -> tuple[float, ...]:
    """Where each bucket of batch sizes begins, and the largest batch size."""
    starts = [float(edge) for edge in BATCH_EDGES if edge < max_batch_size]
    return (*starts, float(max_batch_size))


@lru_cache(maxsize=8192)
def _place(batch_size: int, max_batch_size: int) -> tuple[int, float]:
    """Node at or below a batch size, and how far it is to the next one, [0, 1)."""
    nodes = _nodes(max_batch_size)
    batch_size = min(max(1, batch_size), max_batch_size)
    node = bisect_right(nodes, batch_size) - 1
    if nodes[node] == batch_size:
        return node, 0.0
    span = math.log(nodes[node + 1] / nodes[node])
    return node, math.log(batch_size / nodes[node]) / span


@lru_cache(maxsize=16)
def _gammas(policy: str, largest: int) -> Mapping[str, int]:
    """Gamma of each cell, by the cell's name."""
    return {
        f"{policy}/{row[gamma]}": gamma for row in step_cost.NAMES for gamma in range(largest + 1)
    }
