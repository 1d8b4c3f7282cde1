"""Tables of one or more runs, in Markdown: what was measured, the claims, and what is replayed."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nightjar.errors import ConfigError
from paper.asks import times_of
from paper.claims import claims, gamma_or_off, shown
from paper.costs import NotEnough
from paper.design import MAX_GAMMA, OFF, REPLAYED, TRACES
from paper.pairs import Slices
from paper.record import pooled, together
from paper.replay import TOLERANCE, Replay
from paper.stats import mean

Run = Mapping[str, Any]


def load(paths: Sequence[str]) -> list[dict[str, Any]]:
    """Runs that may be pooled: the same design, models, flags and prompts.

    Raises:
        ConfigError: A file cannot be read, or runs differ.
    """
    runs: list[dict[str, Any]] = []
    for path in paths:
        try:
            run = json.loads(Path(path).read_text())
            runs.append({**run, "run": f"{Path(path).stem} {run['begun']}"})
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"{path}: no result of `paper.py run`: {error}") from None
        for name in ("design", "models", "num_prompts", "engine_key"):
            if run.get(name) != runs[0].get(name):
                raise ConfigError(f"{path}: its {name} differs from that of {paths[0]}")
    return runs


def report(runs: Sequence[Run], *, replay: bool) -> str:
    """All tables."""
    closed = Slices(runs, "closed", "tok_s")
    latency = Slices(runs, "open", "latency_s", inverse=True)
    elastic = Slices(runs, "elastic", "tok_s")
    parts = [
        _setting(runs),
        "### Closed loops: tokens/s over off's, by rows\n\n" + _table(closed, "tokens/s"),
    ]
    if latency.cells:
        rate = Slices(runs, "open", "tok_s")
        parts.append("### Traces: off's mean latency over the arm's\n\n" + _table(latency, ""))
        parts.append("### Traces: tokens/s over off's\n\n" + _table(rate, "tokens/s"))
    if elastic.cells:
        parts.append("### Elastic memory: tokens/s\n\n" + _levels(elastic))
    stated = claims(closed, latency, elastic, runs[0]["design"]["cells"])
    rows = [[c.text, c.floor, c.found, c.verdict] for c in stated]
    parts.append("### Claims\n\n" + markdown(["claim", "floor", "found", "verdict"], rows))
    record = pooled(run["record"] for run in runs)
    parts.append("### Acceptance by prompt class and position\n\n" + _classes(record))
    if replay:
        parts.append(_replayed(runs, record, closed, latency))
    left = [f"- {run['run']}: {words}" for run in runs for words in run["left_out"]]
    if left:
        parts.append("### Left out\n\n" + "\n".join(left))
    return "\n\n".join(parts)


def _setting(runs: Sequence[Run]) -> str:
    run, design = runs[0], runs[0]["design"]
    engine = run["engine"]
    seconds = f"{design['slice_s']:g} s a slice, {design['warm_passes']} passes before not counted"
    lines = ["**A rehearsal: it measures nothing.**"] if design["rehearsal"] else []
    lines += [
        f"Target {run['models']['target']}, draft {run['models']['draft']}; {engine['device']}, "
        f"{engine['dtype']}, {engine['arithmetic']} arithmetic, {engine['build']}; commit "
        f"{run['machine'].get('commit', 'unknown')}.",
        f"{run['num_prompts']} prompts, temperature {design['temperature']:g}, answers of at most "
        f"{design['max_tokens']} tokens, seed {design['seed']}; {seconds}; traces of "
        f"{design['trace_s']:g} s. Requests are the same for every arm of a pass.",
        f"{len(runs)} runs; intervals are of 95 %, over pairs of slices. A tilde marks arms that "
        "were never in one run: both are taken over `off`.",
    ]
    warm = [
        f"{run['run'].split()[0]} ({', '.join(names)})" for run in runs if (names := _warm(run))
    ]
    lines.append(f"Began with what earlier runs had taught its arms: {', '.join(warm) or 'none'}.")
    capacity = [run["capacity_requests_per_s"] for run in runs if "capacity_requests_per_s" in run]
    if capacity:
        rates = ", ".join(f"{rate:.2f}" for rate in capacity)
        shares = ", ".join(f"{name} {share:g}" for name, share in TRACES.items())
        lines.append(f"Capacity of off, requests/s: {rates}. Peak load as a share of it: {shares}.")
    return "\n".join(lines)


def _warm(run: Run) -> list[str]:
    """Arms that did not begin cold, with the steps that they knew."""
    known = run.get("num_known_steps", {})
    return [f"{gamma_or_off(arm)}: {steps} steps" for arm, steps in known.items() if steps]


def _table(slices: Slices, unit: str) -> str:
    cells = slices.cells
    rows = []
    if unit:
        levels = [slices.level(cell, OFF) for cell in cells]
        shown_levels = ["-" if level is None else f"{level:.0f}" for level in levels]
        rows.append([f"off, {unit}", *shown_levels, ""])
    for arm in slices.all_arms():
        if arm == OFF:
            continue
        ratios = [shown(slices.ratio(cell, arm)) for cell in cells]
        rows.append([gamma_or_off(arm), *ratios, shown(slices.mean_ratio(cells, arm))])
    return markdown(["", *cells, "mean"], rows)


def _levels(slices: Slices) -> str:
    rows = [
        [gamma_or_off(arm), cell, f"{slices.level(cell, arm) or 0:.1f}"]
        for cell in slices.cells
        for arm in slices.arms(cell)
    ]
    return markdown(["arm", "trace", "tokens/s"], rows)


def _classes(record: Run) -> str:
    rows = []
    for name, counts in sorted(together(record["places"].values())["classes"].items()):
        pairs = zip(counts["accepted"], counts["reached"], strict=True)
        chances = [f"{a / r:.3f}" if r else "-" for a, r in pairs][:MAX_GAMMA]
        rows.append([name, *chances, str(counts["reached"][0])])
    return markdown(["class", *map(str, range(1, MAX_GAMMA + 1)), "drafting steps"], rows)


def _replayed(runs: Sequence[Run], record: Run, closed: Slices, latency: Slices) -> str:
    """The simulator beside what was measured, then what it says of all other arms."""
    cells = [int(cell) for cell in closed.cells]
    design = runs[0]["design"]
    decode = Slices(runs, "closed", "decode_tok_s")
    pool = max(int(run["engine"]["num_blocks"]) for run in runs) * 16
    try:
        simulated = Replay(
            record,
            cells,
            int(runs[0]["max_gamma"]),
            pool,
            slice_s=design["slice_s"],
            warm_passes=design["warm_passes"],
            passes=design["closed_passes"],
        )
    except NotEnough as error:
        return f"### Replayed\n\nNothing: {error}."
    traces = {name: _times(runs, name) for name in latency.cells}
    errors: dict[str, list[float]] = {"closed": [], "traces": []}
    rows = []
    for arm in decode.all_arms():
        _say(arm)
        own = [arm.partition("+")[0]]
        for cell in cells:
            measured = decode.level(str(cell), arm)
            own.append(_met(measured, simulated.closed(own[0], cell), errors["closed"]))
        for name, times in traces.items():
            inverse = latency.level(name, arm)
            seconds = 1 / inverse if inverse else None
            own.append(_met(seconds, simulated.trace(own[0], name, times), errors["traces"]))
        rows.append([gamma_or_off(arm), *own[1:]])
    heads = ["", *map(str, cells), *traces]
    verdicts = []
    for name, found in errors.items():
        if found:
            worst = max(map(abs, found))
            counts = "count" if worst <= TOLERANCE else "do not count"
            verdicts.append(f"{name}: at most {worst:.1%} off, so replayed figures {counts}")
    text = "### Replayed: how far the simulator is from what was measured\n\n"
    text += markdown(heads, rows) + "\n\n" + "; ".join(verdicts) + ".\n\n"
    base = {cell: simulated.closed(OFF, cell) for cell in cells}
    waits = {name: simulated.trace(OFF, name, times) for name, times in traces.items()}
    rows = []
    for arm in dict.fromkeys([*decode.all_arms(), *REPLAYED]):
        _say(arm)
        own_rates = [simulated.closed(arm, cell) / base[cell] for cell in cells]
        own_waits = [
            waits[name] / simulated.trace(arm, name, times) for name, times in traces.items()
        ]
        whole = mean([*own_rates, *own_waits])
        values = [f"{value:.3f}" for value in (*own_rates, *own_waits, whole)]
        rows.append([gamma_or_off(arm), *values])
    rows.sort(key=lambda row: -float(row[-1]))
    text += "### Replayed: over off; closed loops tokens/s, traces mean latency\n\n"
    return text + markdown([*heads, "mean"], rows)


def _say(arm: str) -> None:
    print(f"replaying {arm}", file=sys.stderr, flush=True)


def _times(runs: Sequence[Run], name: str) -> list[list[float]]:
    """Arrivals of the passes that count, as the runs had them."""
    design = runs[0]["design"]
    passes = {
        (run["capacity_requests_per_s"], found["pass"])
        for run in runs
        for found in run["slices"]
        if found["section"] == "open" and found["cell"] == name and found["counts"]
    }
    return [
        times_of(
            name,
            peak=TRACES[name] * capacity,
            seconds=design["trace_s"],
            seed=f"{design['seed']} {name} {number}",
        )
        for capacity, number in sorted(passes)
    ]


def _met(measured: float | None, simulated: float, errors: list[float]) -> str:
    if not measured:
        return "-"
    error = simulated / measured - 1
    errors.append(error)
    return f"{error:+.1%}"


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = [" | ".join(heads), " | ".join("---" for _ in heads)]
    lines += [" | ".join(row) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)
