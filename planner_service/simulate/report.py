"""What a run comes down to: figures, curves to plot, a table and JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner_service.simulate.run import Result

MAX_POINTS = 400  # of a curve
SETTLED = 2_000  # steps that a policy may take to learn before its share lost is counted anew
Figures = Mapping[str, float | None]  # None: nothing to take it from

# Figure, heading, format: the table's columns.
COLUMNS = (
    ("tokens_per_second", "tok/s", ",.0f"),
    ("regret_tokens", "regret", ",.0f"),
    ("lost_share", "lost", ".1%"),
    ("lost_share_settled", "lost>2k", ".1%"),
    ("latency_p50_s", "p50 s", ".2f"),
    ("latency_p95_s", "p95 s", ".2f"),
    ("ttft_p95_s", "TTFT95 s", ".2f"),
    ("mean_gamma", "gamma", ".2f"),
    ("explored_share", "expl", ".1%"),
    ("num_switches", "switches", ",.0f"),
    ("num_catch_up_tokens", "caught up", ",.0f"),
    ("mean_batch_size", "batch", ".0f"),
)


@dataclass(frozen=True, kw_only=True)
class Curves:
    """Averages over equal pieces of a run, at most `MAX_POINTS`."""

    step: list[int]  # last of the piece
    regret_tokens: list[float]  # summed up to there
    lost_share: list[float]
    gamma: list[float]
    optimal_gamma: list[float]
    batch_size: list[float]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One run of one policy."""

    policy: str
    seed: int
    figures: Figures
    curves: Curves


def summarize(policy: str, result: Result) -> Summary:
    """Reduce a run to what is shown."""
    return Summary(
        policy=policy, seed=result.seed, figures=_figures(result), curves=_curves(result)
    )


def _figures(result: Result) -> dict[str, float | None]:
    ran = result.num_steps > 0
    settled = result.num_steps > SETTLED
    return {
        "num_steps": result.num_steps,
        "seconds": float(result.seconds[-1]) if ran else 0.0,
        "tokens_per_second": result.tokens_per_second,
        "regret_tokens": result.regret(),
        "lost_share": result.lost_share(),
        "lost_share_settled": result.lost_share(SETTLED) if settled else None,
        "ttft_p50_s": _percentile(result.ttft_s, 50),
        "ttft_p95_s": _percentile(result.ttft_s, 95),
        "latency_p50_s": _percentile(result.latency_s, 50),
        "latency_p95_s": _percentile(result.latency_s, 95),
        "mean_batch_size": float(result.batch_size.mean()) if ran else None,
        "mean_gamma": float(result.gamma.mean()) if ran else None,
        "explored_share": float(result.explored.mean()) if ran else None,
        "num_switches": result.num_switches,
        "num_restarts": result.num_restarts,
        "num_catch_up_tokens": int(result.num_catch_up_tokens.sum()),
        "catch_up_s": float(result.catch_up_us.sum()) / 1e6,
        "draft_prefill_s": float(result.draft_prefill_us.sum()) / 1e6,
        "num_finished": result.num_finished,
        "num_waiting": result.num_waiting,
        "num_refused": result.num_refused,
        "num_preempted": result.num_preempted,
    }


def _percentile(values: NDArray[np.float64], percent: float) -> float | None:
    return float(np.percentile(values, percent)) if len(values) else None


def _curves(result: Result) -> Curves:
    pieces = min(MAX_POINTS, result.num_steps)
    starts = np.linspace(0, result.num_steps, pieces, endpoint=False).astype(int)
    ends = np.append(starts[1:], result.num_steps)[:pieces]

    def means(column: NDArray[Any]) -> list[float]:
        if not pieces:
            return []
        sums = np.add.reduceat(column.astype(float), starts)
        return [float(value) for value in sums / (ends - starts)]

    lost, potential = np.array(means(result.lost_tokens)), np.array(means(result.potential_tokens))
    regret = np.cumsum(result.lost_tokens)
    return Curves(
        step=[int(end) for end in ends],
        regret_tokens=[float(regret[end - 1]) for end in ends],
        lost_share=[float(value) for value in lost / potential],
        gamma=means(result.gamma),
        optimal_gamma=means(result.optimal_gamma),
        batch_size=means(result.batch_size),
    )


def by_policy(summaries: Sequence[Summary]) -> dict[str, list[Summary]]:
    """Runs of each policy, in the order in which the policies were named."""
    grouped: dict[str, list[Summary]] = {}
    for summary in summaries:
        grouped.setdefault(summary.policy, []).append(summary)
    return grouped


def mean_of(runs: Sequence[Summary], figure: str) -> float | None:
    """Mean of a figure over the runs that have it."""
    values = [value for run in runs if (value := run.figures[figure]) is not None]
    return sum(values) / len(values) if values else None


def spread_of(runs: Sequence[Summary], figure: str) -> float | None:
    """Standard deviation of a figure over the runs that have it; 0 of one run."""
    values = [value for run in runs if (value := run.figures[figure]) is not None]
    return float(np.std(values)) if values else None


def table(summaries: Sequence[Summary]) -> str:
    """Means over the seeds, a row for each policy, least regret first."""
    grouped = by_policy(summaries)
    order = sorted(grouped, key=lambda name: mean_of(grouped[name], "regret_tokens") or 0.0)
    rows = [["policy", *(heading for _, heading, _ in COLUMNS)]]
    for name in order:
        cells = [name]
        for figure, _, form in COLUMNS:
            value = mean_of(grouped[name], figure)
            cells.append("-" if value is None else _format(value, form))
        rows.append(cells)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def _format(value: float, form: str) -> str:
    text = format(value, form)
    return text.removeprefix("-") if not text.strip("-0.%") else text  # no "-0"


def as_json(summaries: Sequence[Summary]) -> list[dict[str, Any]]:
    """For `--json`: means and spreads over the seeds, and each run's figures."""
    answer = []
    for name, runs in by_policy(summaries).items():
        figures = runs[0].figures
        answer.append(
            {
                "policy": name,
                "mean": {figure: mean_of(runs, figure) for figure in figures},
                "spread": {figure: spread_of(runs, figure) for figure in figures},
                "runs": [{"seed": run.seed, **run.figures} for run in runs],
            }
        )
    return answer
