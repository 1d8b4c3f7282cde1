"""Replays policies in the simulator from what was measured, and says how well it predicts.

Costs of steps, acceptance by prompt class, lengths and arrivals are the runs' own. A replayed
figure counts only where the simulator also meets the figures that were measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paper.stats import mean
from planner_service.context import MAX_GAMMA
from planner_service.simulate.acceptance import Acceptance, RequestClass
from planner_service.simulate.arrivals import Arrivals, TraceLengths
from planner_service.simulate.batch import make
from planner_service.simulate.cost import MIN_STEP_US, CostTable
from planner_service.simulate.run import Result, Scenario, simulate

TOLERANCE = 0.05  # of a measured cell
NUM_STEPS = 4000  # of a closed loop; the second half counts, as slices do after a warm-up
MAX_STEPS = 200_000  # of a trace
SEEDS = (0, 1, 2)
MIN_SLOPE_POINTS = 4
Record = Mapping[str, Any]


class NotEnough(Exception):
    """The record lacks what a replay needs; says what."""


def cost_table(record: Record, cells: Sequence[int], max_gamma: int) -> CostTable:
    """A table of step times at the measured batch sizes.

    Raises:
        NotEnough: A batch size was not measured at every gamma.
    """
    rows = [row for row in record["steps"] if row["rows"] in cells]
    pure = [row for row in rows if not row["prefill_bin"]]
    target, draft = _kv_slopes(pure)
    sums: dict[tuple[int, int], NDArray[np.float64]] = {}
    for row in pure:
        own = np.array([row["num_steps"], row["step_us"], row["kv_tokens"]], float)
        key = (row["rows"], row["gamma"])
        sums[key] = sums.get(key, np.zeros(3)) + own
    wanted = [(size, gamma) for size in cells for gamma in range(max_gamma + 1)]
    missing = [
        f"{size} rows at gamma {gamma}" for size, gamma in wanted if (size, gamma) not in sums
    ]
    if missing:
        raise NotEnough(f"no steps of {', '.join(missing)}")
    num_steps = sum(float(sums[key][0]) for key in wanted)
    context = round(sum(float(sums[key][2]) / key[0] for key in wanted) / num_steps)
    table = []
    for size in cells:
        row_us = []
        for gamma in range(max_gamma + 1):
            num, us, kv = sums[size, gamma]
            beyond = context * size - kv / num
            row_us.append(max(MIN_STEP_US, us / num + (target + gamma * draft) * beyond))
        table.append(tuple(row_us))
    per_step, per_token = _catch_up(record["steps"])
    found = CostTable(
        name="measured",
        source="benchmarks/paper.py run",
        context=context,
        batch_sizes=tuple(cells),
        step_us=tuple(table),
        # One more draft, not verified, costs at most what the cheapest further gamma does.
        draft_step_us=tuple(max(0.0, min(np.diff(row_us))) for row_us in table),
        kv_us_per_1000_tokens=target * 1000,
        draft_kv_us_per_1000_tokens=draft * 1000,
        catch_up_us=per_step,
        catch_up_us_per_token=per_token,
        catch_up_us_per_row=0.0,
        prefill_us_per_token=0.0,
    )
    return _with_prefill(found, rows)


def _kv_slopes(rows: Sequence[Record]) -> tuple[float, float]:
    """Microseconds per KV token of a step, and more for each of its drafts; 0 where unknown.

    Least squares over the KV bins of each batch size and gamma, each about its own mean.
    """
    groups: dict[tuple[int, int], list[Record]] = {}
    for row in rows:
        groups.setdefault((row["rows"], row["gamma"]), []).append(row)
    left, right, weights = [], [], []
    for (_, gamma), own in groups.items():
        num = np.array([row["num_steps"] for row in own], float)
        us = np.array([row["step_us"] for row in own]) / num
        kv = np.array([row["kv_tokens"] for row in own]) / num
        us, kv = us - np.average(us, weights=num), kv - np.average(kv, weights=num)
        left += [(one, one * gamma) for one in kv]
        right += us.tolist()
        weights += num.tolist()
    if len(right) < len(groups) + MIN_SLOPE_POINTS:
        return 0.0, 0.0
    root = np.sqrt(np.array(weights))[:, None]
    found, *_ = np.linalg.lstsq(np.array(left) * root, np.array(right) * root[:, 0], rcond=None)
    return max(0.0, float(found[0])), max(0.0, float(found[1]))


def _catch_up(rows: Sequence[Record]) -> tuple[float, float]:
    """Microseconds of catching up: of a step that does, and per token of it."""
    own = [row for row in rows if row["catch_up_steps"]]
    if not own:
        return 0.0, 0.0
    left = np.array([(row["catch_up_steps"], row["catch_up_tokens"]) for row in own], float)
    right = np.array([row["catch_up_us"] for row in own], float)
    per_step, per_token = np.linalg.lstsq(left, right, rcond=None)[0]
    if per_step < 0 or per_token < 0:
        return 0.0, float(right.sum() / left[:, 1].sum())
    return float(per_step), float(per_token)


def _with_prefill(table: CostTable, rows: Sequence[Record]) -> CostTable:
    """The table with what a prompt's token adds to a step, from the steps that had some."""
    us, tokens = 0.0, 0
    for row in rows:
        if row["prefill_bin"]:
            num = row["num_steps"]
            kv = np.array([row["kv_tokens"] // num])
            plain = table.steps_us(np.array([row["rows"]]), kv)[0, row["gamma"]]
            us += row["step_us"] - num * float(plain)
            tokens += row["prefill_tokens"]
    return replace(table, prefill_us_per_token=max(0.0, us / tokens)) if tokens else table


def acceptance(record: Record) -> Acceptance:
    """Classes with their measured acceptance, in the shares that their requests had.

    Raises:
        NotEnough: Nothing was drafted.
    """
    count = Counter(name for name, _, _ in record["lengths"])
    classes, shares = [], []
    for name, counts in sorted(record["classes"].items()):
        if count[name] and counts["reached"][0]:
            classes.append(_class(name, counts))
            shares.append(count[name])
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

    def __init__(self, record: Record, cells: Sequence[int], max_gamma: int, pool: int) -> None:
        """Fit.

        Raises:
            NotEnough: The record lacks something.
        """
        self.table = cost_table(record, cells, max_gamma)
        self._acceptance = acceptance(record)
        pairs = [(prompt, max(1, answer)) for _, prompt, answer in record["lengths"]]
        self._lengths = TraceLengths("the runs", [p for p, _ in pairs], [a for _, a in pairs])
        self._known: dict[tuple[str, object], float] = {}
        self._max_gamma, self._pool = max_gamma, max(pool, 2 * self._lengths.most)

    def closed(self, arm: str, rows: int) -> float:
        """Tokens per second of a closed loop, once it has settled."""
        if (arm, rows) not in self._known:
            arrivals = Arrivals(kind="closed", rows=rows, lengths=self._lengths)
            rates = [_settled(self._run(arm, arrivals, seed, NUM_STEPS)) for seed in SEEDS]
            self._known[arm, rows] = mean(rates)
        return self._known[arm, rows]

    def trace(self, arm: str, times: Sequence[float]) -> float:
        """Mean seconds from arrival to the last token of a trace's requests."""
        key = arm, tuple(times)
        if key not in self._known:
            arrivals = Arrivals(kind="azure", trace=tuple(times), lengths=self._lengths)
            runs = [self._run(arm, arrivals, seed, MAX_STEPS) for seed in SEEDS]
            self._known[key] = mean([float(run.latency_s.mean()) for run in runs])
        return self._known[key]

    def _run(self, arm: str, arrivals: Arrivals, seed: int, num_steps: int) -> Result:
        scenario = Scenario(
            truth=self.table,
            noise=0.0,
            acceptance=self._acceptance,
            arrivals=arrivals,
            max_rows=self.table.max_batch_size,
            kv_pool_tokens=self._pool,
            max_gamma=self._max_gamma,
        )
        return simulate(make(arm), scenario, seed, num_steps)


def _settled(run: Result) -> float:
    half = run.num_steps // 2
    seconds = float(run.seconds[-1] - run.seconds[half - 1])
    return float(run.num_emitted[half:].sum()) / seconds
