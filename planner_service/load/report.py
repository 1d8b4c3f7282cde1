"""Figures of a run: rates, latencies, goodput, acceptance, and how they went over time."""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TextIO

import numpy as np

from planner_service.load.run import Record, Run

Figures = dict[str, Any]
COLUMNS = (
    "index",
    "category",
    "due_s",
    "sent_s",
    "ttft_s",
    "tpot_s",
    "latency_s",
    "num_prompt_tokens",
    "num_cached_tokens",
    "num_tokens",
    "num_drafts",
    "num_accepted",
    "mean_gamma",
    "meets_slo",
    "policy_version",
    "error",
)


@dataclass(frozen=True, kw_only=True)
class Slo:
    """What a request must meet to count as good, in seconds; 0 leaves that limit out."""

    ttft_s: float = 0.0
    tpot_s: float = 0.0
    latency_s: float = 0.0

    @property
    def is_set(self) -> bool:
        """Whether there is any limit."""
        return any(asdict(self).values())

    def met(self, record: Record) -> bool:
        """Whether a finished request kept every limit; one of a single token has no TPOT."""
        pairs = (
            (self.ttft_s, ttft_s(record)),
            (self.tpot_s, tpot_s(record)),
            (self.latency_s, latency_s(record)),
        )
        return not any(limit and value > limit for limit, value in pairs)


def _arrived_s(record: Record) -> float:
    """A request that was sent late has waited since it was due."""
    return record.ask.due_s or record.sent_s


def ttft_s(record: Record) -> float:
    """Seconds from arrival to the first token; NaN without one."""
    pieces = record.answer.piece_times
    return pieces[0] - _arrived_s(record) if pieces else math.nan


def tpot_s(record: Record) -> float:
    """Seconds per token after the first, by the endpoint's own count of tokens; NaN of one."""
    pieces, num_tokens = record.answer.piece_times, record.answer.num_tokens
    return (pieces[-1] - pieces[0]) / (num_tokens - 1) if num_tokens > 1 and pieces else math.nan


def latency_s(record: Record) -> float:
    """Seconds from arrival to the end of the answer."""
    return record.ended_s - _arrived_s(record)


def finished(run: Run) -> list[Record]:
    """Requests that were answered to the end."""
    return [r for r in run.records if not math.isnan(r.ended_s) and not r.error]


def summarize(run: Run, slo: Slo, *, warm_up_s: float, bin_s: float) -> Figures:
    """Figures of a run.

    Rates are over the time from `warm_up_s` to the run's `steady_end_s`, by the times at which
    pieces came; a piece counts as its answer's tokens over its pieces. Latencies are of requests
    that were sent in that time.
    """
    done, end_s = finished(run), run.steady_end_s
    if end_s <= warm_up_s:  # shorter than its warm-up: measured as a whole
        warm_up_s = 0.0
    window_s = end_s - warm_up_s
    counted = [r for r in done if warm_up_s <= r.sent_s]
    num_tokens = _tokens_between(done, warm_up_s, end_s)
    good = [r for r in done if warm_up_s <= r.ended_s <= end_s and slo.met(r)]
    ended = [r for r in done if warm_up_s <= r.ended_s <= end_s]
    failed = [r for r in run.records if r.error]
    return {
        "num_sent": len(run.records),
        "num_finished": len(done),
        "num_failed": len(failed),
        "num_cut": run.num_cut,
        "interrupted": run.interrupted,
        "errors": dict(Counter(r.error for r in failed).most_common(5)),
        "window_s": round(window_s, 3),
        "total_s": round(run.total_s, 3),
        "tokens_per_s": _rate(num_tokens, window_s),
        "requests_per_s": _rate(len(ended), window_s),
        "prompt_tokens_per_s": _rate(sum(r.answer.num_prompt_tokens for r in ended), window_s),
        "goodput": {
            "slo": {**asdict(slo)} if slo.is_set else None,
            "requests_per_s": _rate(len(good), window_s),
            "tokens_per_s": _rate(sum(r.answer.num_tokens for r in good), window_s),
            "share_of_requests": len(good) / len(ended) if ended else None,
        },
        "ttft_s": _spread(map(ttft_s, counted)),
        "tpot_s": _spread(map(tpot_s, counted)),
        "latency_s": _spread(map(latency_s, counted)),
        "tokens_per_answer": _mean(r.answer.num_tokens for r in counted),
        **speculation(counted),
        "by_category": {
            name: {"num_requests": len(own), **speculation(own)}
            for name, own in sorted(_by_category(counted).items())
        },
        "over_time": over_time(done, end_s, bin_s),
        "client": {
            "loop_lag_p99_s": _percentile(run.lags_s, 99),
            "sent_late_p99_s": _percentile(
                [r.sent_s - r.ask.due_s for r in run.records if r.ask.due_s], 99
            ),
        },
    }


def speculation(records: Sequence[Record]) -> Figures:
    """Acceptance and gamma, None where the endpoint does not tell."""
    told = [r for r in records if r.answer.num_drafts is not None]
    drafts = sum(r.answer.num_drafts or 0 for r in told)
    accepted = sum(r.answer.num_accepted or 0 for r in told)
    steps = _steps(records)
    drafting = sum(steps[1:])
    return {
        "acceptance": accepted / drafts if drafts else None,
        "mean_accepted_length": 1 + accepted / drafting if drafting else None,
        "gamma_histogram": steps,
        "mean_gamma": _mean_gamma(steps),
    }


def over_time(done: Sequence[Record], end_s: float, bin_s: float) -> Figures:
    """Columns by time: a request's mean gamma and acceptance count where its pieces came."""
    num_bins = int(end_s / bin_s)
    # Whole bins; a run shorter than one is one.
    edges = np.arange(num_bins + 1) * bin_s if num_bins else np.array([0.0, max(end_s, 1e-9)])
    num_bins = len(edges) - 1
    tokens, gamma, steps, accepted, drafts = (np.zeros(num_bins) for _ in range(5))
    for record in done:
        answer = record.answer
        pieces = answer.piece_times
        if not pieces:
            continue
        share = np.histogram(pieces, edges)[0] / len(pieces)
        tokens += share * answer.num_tokens
        num_steps = sum(answer.gamma_histogram)
        steps += share * num_steps
        gamma += share * sum(g * n for g, n in enumerate(answer.gamma_histogram))
        drafts += share * (answer.num_drafts or 0)
        accepted += share * (answer.num_accepted or 0)
    widths = np.diff(edges)
    sent = [r.sent_s for r in done]
    return {
        "at_s": [round(float(at), 3) for at in edges[:-1]],
        "tokens_per_s": [round(float(x), 2) for x in tokens / widths],
        "arrivals_per_s": [round(float(x), 3) for x in np.histogram(sent, edges)[0] / widths],
        "gamma": [round(g / n, 3) if n else None for g, n in zip(gamma, steps, strict=True)],
        "acceptance": [
            round(a / n, 4) if n else None for a, n in zip(accepted, drafts, strict=True)
        ],
    }


def write_csv(file: TextIO, run: Run, slo: Slo) -> None:
    """A row for each request that was sent."""
    out = csv.writer(file)
    out.writerow(COLUMNS)
    for record in run.records:
        ask, answer = record.ask, record.answer
        ended = not math.isnan(record.ended_s)
        whole = ended and not record.error
        values = [ttft_s(record), tpot_s(record), latency_s(record)] if whole else [math.nan] * 3
        error = record.error if ended else "cut: the run was stopped"
        out.writerow(
            [
                ask.index,
                ask.category,
                round(ask.due_s, 6),
                round(record.sent_s, 6),
                *("" if math.isnan(value) else round(value, 6) for value in values),
                answer.num_prompt_tokens,
                answer.num_cached_tokens,
                answer.num_tokens,
                "" if answer.num_drafts is None else answer.num_drafts,
                "" if answer.num_accepted is None else answer.num_accepted,
                _or_empty(_mean_gamma(answer.gamma_histogram)),
                int(whole and slo.met(record)),
                answer.policy_version,
                error,
            ]
        )


def table(figures: Figures) -> str:
    """For people."""
    lines = [
        f"{figures['num_finished']} of {figures['num_sent']} requests finished, "
        f"{figures['num_failed']} failed, {figures['num_cut']} cut; "
        f"measured over {figures['window_s']:.1f} s",
        f"  tokens/s          {figures['tokens_per_s']:.1f}",
        f"  requests/s        {figures['requests_per_s']:.3f}",
    ]
    good = figures["goodput"]
    if good["slo"] is not None:
        share = good["share_of_requests"]
        lines.append(
            f"  goodput           {good['requests_per_s']:.3f} requests/s, "
            f"{good['tokens_per_s']:.1f} tokens/s"
            + ("" if share is None else f" ({share:.1%} of requests)")
        )
    for key, name in (("ttft_s", "TTFT"), ("tpot_s", "TPOT"), ("latency_s", "latency")):
        spread = figures[key]
        if spread is not None:
            words = ", ".join(f"{k} {v * 1000:.1f}" for k, v in spread.items())
            lines.append(f"  {name + ', ms':<17} {words}")
    if figures["acceptance"] is not None:
        lines.append(f"  acceptance        {figures['acceptance']:.3f}")
    if figures["mean_gamma"] is not None:
        counts = " ".join(f"{g}:{n}" for g, n in enumerate(figures["gamma_histogram"]) if n)
        lines.append(f"  gamma             mean {figures['mean_gamma']:.2f}; steps {counts}")
    for name, own in figures["by_category"].items():
        if len(figures["by_category"]) > 1 and own["acceptance"] is not None:
            lines.append(f"    {name:<16}acceptance {own['acceptance']:.3f}")
    lines += [f"  {count} x {error}" for error, count in figures["errors"].items()]
    lag = figures["client"]["loop_lag_p99_s"]
    if lag is not None and lag > 0.02:
        lines.append(
            f"  this client woke up to {lag * 1000:.0f} ms late (p99): it is too busy, and its "
            "latencies are too high"
        )
    return "\n".join(lines)


def _tokens_between(done: Iterable[Record], begin_s: float, end_s: float) -> float:
    total = 0.0
    for record in done:
        pieces = record.answer.piece_times
        inside = sum(begin_s <= at <= end_s for at in pieces)
        total += record.answer.num_tokens * inside / len(pieces) if pieces else 0.0
    return total


def _by_category(records: Iterable[Record]) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(record.ask.category, []).append(record)
    return found


def _steps(records: Iterable[Record]) -> list[int]:
    total: Counter[int] = Counter()
    for record in records:
        total.update(dict(enumerate(record.answer.gamma_histogram)))
    return [total[gamma] for gamma in range(max(total, default=-1) + 1)]


def _mean_gamma(steps: Sequence[int]) -> float | None:
    return sum(g * n for g, n in enumerate(steps)) / sum(steps) if sum(steps) else None


def _spread(values: Iterable[float]) -> dict[str, float] | None:
    known = np.array([value for value in values if not math.isnan(value)])
    if not known.size:
        return None
    shares = {f"p{q}": float(np.percentile(known, q)) for q in (50, 90, 99)}
    return {"mean": float(known.mean()), **shares}


def _mean(values: Iterable[float]) -> float | None:
    known = list(values)
    return sum(known) / len(known) if known else None


def _percentile(values: Sequence[float], share: float) -> float | None:
    return float(np.percentile(values, share)) if values else None


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


def _or_empty(value: float | None) -> float | str:
    return "" if value is None else round(value, 4)
