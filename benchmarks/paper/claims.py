"""The claims, with their floors as set before any run, and whether the slices meet them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paper.arms import is_gamma
from paper.design import BEST_FIXED, ELASTIC, ELASTIC_TRACE, OFF, OURS, PUBLISHED
from paper.pairs import Ratio, Slices
from paper.stats import mean_of

FIXED_3 = "fixed:gamma=3"
SHARE_OF_BEST = 0.95
PAPER_MEAN_OVER_OFF, MEAN_OVER_FIXED_3, BEST_OVER_FIXED_3 = 0.273, 0.083, 0.148
LATENCY_LESS = 0.202


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A row of the table."""

    text: str
    floor: str
    found: str
    verdict: str  # met, missed, not separated, or not measured


def claims(
    closed: Slices, traces: Slices, elastic: Slices, cells: Sequence[int] = ()
) -> list[Claim]:
    """All rows.

    Args:
        closed: Tokens per second of closed loops.
        traces: Inverse mean latency under traces.
        elastic: Tokens per second of the elastic section.
        cells: Rows of the closed loops that a mean is over; until all are measured it says so.
    """
    means, num = [_of_best(closed), _mean_over_3(closed)], len(set(map(str, cells)))
    if len(closed.cells) < num:
        words = f"{len(closed.cells)} of {num} cells"
        means = [replace(claim, verdict=words) for claim in means]
    found = [*means, _best_over_3(closed), _latency(closed)]
    for name in traces.cells:
        fixed = [arm for arm in traces.arms(name) if is_gamma(arm)]
        best = traces.best(name, fixed)
        words = gamma_or_off(best) if best else "not measured"
        found.append(_above(traces, name, best or BEST_FIXED, f"best fixed gamma ({words})"))
        others = (PUBLISHED, *_others(traces.arms(name)))
        found += [_above(traces, name, other, gamma_or_off(other)) for other in others]
    if len(traces.cells) > 1:
        found.append(_over_all(traces))
    found.append(_elastic(elastic))
    return found


def _others(arms: Sequence[str]) -> list[str]:
    return [arm for arm in arms if not is_gamma(arm) and arm not in (OURS, PUBLISHED)]


def _of_best(closed: Slices) -> Claim:
    text = f"{OURS} over off, mean of {len(closed.cells)} closed loops, less {SHARE_OF_BEST} x "
    text += f"the best gamma's gain in each (the paper's gain: {PAPER_MEAN_OVER_OFF:+.1%})"
    parts, gains, bests = [], [], []
    for cell in closed.cells:
        best = closed.best(cell, [arm for arm in closed.arms(cell) if is_gamma(arm)])
        excess = closed.excess(cell, OURS, best, SHARE_OF_BEST) if best else None
        ratio = closed.ratio(cell, OURS)
        if excess is None or ratio is None or best is None:
            return _unmeasured(text, ">= 0")
        parts.append(excess)
        gains.append(ratio.mean - 1)
        bests.append((closed.ratio(cell, best) or ratio).mean - 1)
    if not parts:
        return _unmeasured(text, ">= 0")
    whole = mean_of(parts)
    gain, best_gain = sum(gains) / len(gains), sum(bests) / len(bests)
    words = f"{whole.mean:+.2%} [{whole.low:+.2%}, {whole.high:+.2%}]; gains {gain:+.1%}"
    words += f" and {best_gain:+.1%}"
    return Claim(text=text, floor=">= 0", found=words, verdict=_verdict(whole.low, 0.0))


def _mean_over_3(closed: Slices) -> Claim:
    ratio = closed.mean_ratio(closed.cells, OURS, FIXED_3)
    return _gain(f"{OURS} over {FIXED_3}, mean", ratio, MEAN_OVER_FIXED_3)


def _best_over_3(closed: Slices) -> Claim:
    cell, ratio = _best_cell(closed)
    return _gain(f"{OURS} over {FIXED_3}, best cell ({cell} rows)", ratio, BEST_OVER_FIXED_3)


def _latency(closed: Slices) -> Claim:
    """Latencies of a closed loop are its tokens per second, inverted.

    A request of n clients takes n / (requests per second), and answers do not depend on the arm.
    """
    cell, ratio = _best_cell(closed)
    text = f"mean latency, {OURS} under {FIXED_3}, best cell ({cell} rows)"
    floor = f">= {LATENCY_LESS:.1%} lower"
    if ratio is None:
        return _unmeasured(text, floor)
    less = [
        1 - math.exp(-log) for log in (ratio.logs.mean, max(ratio.logs.low, -9.0), ratio.logs.high)
    ]
    words = f"{less[0]:.1%} lower [{less[1]:.1%}, {less[2]:.1%}]"
    return Claim(text=text, floor=floor, found=words, verdict=_verdict(less[1], LATENCY_LESS))


def _best_cell(closed: Slices) -> tuple[str, Ratio | None]:
    ratios = {cell: closed.ratio(cell, OURS, FIXED_3) for cell in closed.cells}
    known = {cell: ratio for cell, ratio in ratios.items() if ratio is not None}
    if not known:
        return "-", None
    cell = max(known, key=lambda cell: known[cell].mean)
    return cell, known[cell]


def _above(traces: Slices, name: str, base: str, words: str) -> Claim:
    text = f"{OURS} over {words}, mean latency, {name}"
    return _separated(text, traces.ratio(name, OURS, base))


def _over_all(traces: Slices) -> Claim:
    """One configuration for all loads against the one gamma that is best for all of them."""
    ratios = {arm: traces.mean_ratio(traces.cells, arm) for arm in traces.all_arms()}
    means = {arm: r.mean for arm, r in ratios.items() if is_gamma(arm) and r is not None}
    best = max(means, key=means.__getitem__, default=OFF)
    text = f"{OURS} over the gamma best for all traces ({gamma_or_off(best)}), mean latency, mean "
    text += f"of {len(traces.cells)} traces"
    return _separated(text, traces.mean_ratio(traces.cells, OURS, best))


def _separated(text: str, ratio: Ratio | None) -> Claim:
    if ratio is None:
        return _unmeasured(text, "> 1.0")
    verdict = "met" if ratio.low > 1 else "missed" if ratio.high < 1 else "not separated"
    return Claim(text=text, floor="> 1.0", found=shown(ratio), verdict=verdict)


def _elastic(elastic: Slices) -> Claim:
    text = f"elastic memory on over off, tokens/s, {ELASTIC_TRACE}, capped pool"
    return _separated(text, elastic.ratio(ELASTIC_TRACE, f"{OURS}{ELASTIC}", OURS))


def _gain(text: str, ratio: Ratio | None, floor: float) -> Claim:
    words = f">= {floor:+.1%}"
    if ratio is None:
        return _unmeasured(text, words)
    ends = f"{ratio.low - 1:+.1%}, {ratio.high - 1:+.1%}"
    found = f"{ratio.mean - 1:+.1%} [{ends if ratio.logs.df > 0 else 'one pair of slices'}]"
    return Claim(text=text, floor=words, found=found, verdict=_verdict(ratio.low - 1, floor))


def _verdict(low: float, floor: float) -> str:
    return "met" if low >= floor else "missed"


def _unmeasured(text: str, floor: str) -> Claim:
    return Claim(text=text, floor=floor, found="-", verdict="not measured")


def shown(ratio: Ratio | None) -> str:
    """A ratio with its interval; a tilde where the pair was never in one run."""
    if ratio is None:
        return "-"
    ends = f"{ratio.low:.3f}, {ratio.high:.3f}" if ratio.logs.df > 0 else "one pair of slices"
    return f"{'' if ratio.paired else '~'}{ratio.mean:.3f} [{ends}]"


def gamma_or_off(arm: str) -> str:
    """An arm's short name for tables."""
    if arm == OFF:
        return OFF
    return "nightjar, as published" if arm == PUBLISHED else arm.replace(":gamma=", " ")
