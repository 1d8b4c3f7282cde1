"""Steps and tokens around a contraction and a reload: what they cost the rows that decode.

Three groups of cycles: rows that never draft, for the floors; rows that draft again once the draft
is back, for the catch-up; and a head that gets full during the contraction, for rows that are
preempted.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from gpu import memory_floors
from gpu.driver import JobFailed
from gpu.memory_contraction import (
    AGENT,
    Contraction,
    clear,
    contract,
    expand,
    overlapping,
    within,
)
from gpu.memory_link import Bench

Found = dict[str, Any]


def measure(bench: Bench, options: argparse.Namespace) -> Found:
    """Cycles of expansion and contraction under rows that decode and live in the tail."""
    flags = [*AGENT, *options.agent_flag]
    seeds, gamma = itertools.count(), bench.config.max_gamma
    failed: list[str] = []
    bench.driver.reset()
    with tempfile.TemporaryDirectory() as folder:
        marks = Path(folder) / "marks"

        def plain() -> Found:
            found = _plain(contract(bench, options, next(seeds), marks))
            return {**found, "longest_of_expansion_ms": _ms(expand(bench, options))}

        def drafting() -> Found:
            return _drafting(contract(bench, options, next(seeds), marks, gamma=gamma))

        def full() -> Found:
            return _full(contract(bench, options, next(seeds), marks, full=True))

        # The first of a group is where everything is used for the first time.
        with bench.agent(*flags, marks=marks):
            cycles = _group(bench, "reload", plain, options.reload_cycles + 1, failed)[1:]
            count = options.drafting_cycles + 1 if options.drafting_cycles else 0
            again = _group(bench, "reload, drafting again", drafting, count, failed)[1:]
            under = _group(bench, "reload, full head", full, options.full_cycles, failed)
    if not cycles:
        raise JobFailed("; ".join(failed))
    found: Found = {
        "rows": options.rows + 1,
        "context": options.context,
        "agent_flags": flags,
        "image_mb": round(bench.pool.image_bytes / 1e6, 1),
        "cycles": cycles,
        "drafting_again": {"gamma": gamma, "cycles": again},
        "full_head": {"cycles": under},
        "failed": failed,
    }
    _sum_up(found)
    _judge(found, options)
    return found


def _group(
    bench: Bench, what: str, cycle: Callable[[], Found], count: int, failed: list[str]
) -> list[Found]:
    """So many cycles; one that fails ends its group, and costs no figure of another."""
    done: list[Found] = []
    try:
        for index in range(count):
            done.append(cycle())
            brief = {k: v for k, v in done[-1].items() if not k.startswith("all_")}
            bench.say(f"{what}, cycle {index}: {brief}")
            clear(bench)
    except (JobFailed, SystemExit, ArithmeticError, LookupError, ValueError) as error:
        failed.append(f"{what}, cycle {len(done)}: {str(error) or repr(error)}")
        bench.say(failed[-1])
        bench.set_gamma(0)
        clear(bench)
    return done


def _plain(seen: Contraction) -> Found:
    """Figures of a cycle in which nobody drafts."""
    usual, spans = seen.usual(), seen.spans()
    mean, median = statistics.mean(usual), statistics.median(usual)
    gaps_before = _flat(seen.gaps(seen.before[0].at, seen.before[-1].at))
    gaps = _flat(seen.gaps(seen.decided, seen.end))
    usual_gap = statistics.median(gaps_before)
    longest = max(gaps)
    copying, loading = seen.copying, (seen.loading, seen.resident)
    return {
        "before_ms": _ms(median),
        "before_mean_ms": _ms(mean),
        "gap_before_ms": _ms(usual_gap),
        "longest_gap_ms": _ms(longest),
        "added_in_steps": round((longest - usual_gap) / median, 4),
        "longest_step_ms": _ms(max(end - begin for begin, end in spans if end > seen.decided)),
        "loading_ms": _ms(statistics.mean(overlapping(spans, loading))),
        "copying_ms": _ms(statistics.mean(overlapping(spans, copying))),
        "decided_ms": _ms(seen.decided - seen.released),
        "copying_took_ms": _ms(copying[1] - copying[0]),
        "reload_took_ms": _ms(seen.resident - seen.loading),
        "blocks_in_tail": seen.num_in_tail,
        "blocks_granted": seen.moved,
        "blocks_in_rest": seen.num_in_rest,
        "blocks_moved": seen.num_moved,
        "tokens_between_first_copy_and_rest": seen.tokens_between,
        "num_refused": seen.num_refused,
        "all_loading": [_share(span, mean) for span in overlapping(spans, loading)],
        "all_copying": [_share(span, mean) for span in overlapping(spans, copying)],
        "all_within_copying": [_share(span, mean) for span in within(spans, copying)],
        # Of the grant of the tail; times of steps, between two retirements.
        "all_steps_began_ms": [_ms(begin - seen.loading) for begin, _ in spans],
        "all_steps_took_ms": [_ms(end - begin) for begin, end in spans],
        "all_steps_before_ms": [_ms(span) for span in usual],
        "all_copying_ms": [_ms(at - seen.loading) for at in copying],
        "all_resident_ms": _ms(seen.resident - seen.loading),
        "all_decided_ms": _ms(seen.decided - seen.loading),
        "all_gaps_before_ms": _distribution(gaps_before),
        "all_gaps_ms": _distribution(gaps),
    }


def _drafting(seen: Contraction) -> Found:
    """Figures of a cycle whose rows draft as soon as the draft is back."""
    steady = statistics.median(b.at - a.at for a, b in itertools.pairwise(seen.steady))
    gaps = _flat(seen.gaps(seen.decided, seen.end))
    after = _flat(seen.gaps(seen.resident, seen.end))
    rows = [row for step in seen.catch_up for row in step.done.plan.rows]
    return {
        "before_ms": _ms(statistics.median(seen.usual())),
        "drafting_ms": _ms(steady),
        "longest_gap_ms": _ms(max(gaps)),
        "longest_gap_in_steps": round(max(gaps) / steady, 4),
        "longest_in_catch_up_ms": _ms(max(after)),
        "longest_in_catch_up_in_steps": round(max(after) / steady, 4),
        "catch_up_ms": _ms(seen.steady[0].at - seen.resident),
        "num_steps_of_catch_up": len(seen.catch_up),
        "tokens_caught_up": sum(row.num_catch_up for row in rows),
        "all_steps_of_catch_up_ms": [
            _ms(b.at - a.at) for a, b in itertools.pairwise([*seen.catch_up, seen.steady[0]])
        ],
        "all_gaps_ms": _distribution(gaps),
    }


def _full(seen: Contraction) -> Found:
    """Figures of a cycle whose head gets full, of rows that were preempted and of those not."""
    gaps = seen.gaps(seen.decided, seen.end)
    usual = statistics.median(seen.usual())
    found: Found = {
        "before_ms": _ms(usual),
        "rows_preempted": len(seen.preempted),
        "blocks_in_rest": seen.num_in_rest,
        "watched_ms": _ms(seen.end - seen.decided),
    }
    for name, ids in (
        ("others", gaps.keys() - seen.preempted),
        ("preempted", gaps.keys() & seen.preempted),
    ):
        part = _flat({request_id: gaps[request_id] for request_id in ids})
        found[f"longest_of_{name}_ms"] = _ms(max(part)) if part else None
        found[f"longest_of_{name}_in_steps"] = round(max(part) / usual, 4) if part else None
        found[f"all_of_{name}_ms"] = _distribution(part)
    return found


def _sum_up(found: Found) -> None:
    """Figures over all cycles."""
    cycles = found["cycles"]
    for name, key in (
        ("loading_over_before", "all_loading"),
        ("copying_over_before", "all_copying"),
        ("within_copying_over_before", "all_within_copying"),
    ):
        shares = [share for c in cycles for share in c[key]]
        found[name] = round(statistics.mean(shares), 4) if shares else None
        found[f"num_steps_of_{name}"] = len(shares)
    for name in ("before_mean_ms", "loading_ms", "copying_ms", "copying_took_ms", "reload_took_ms"):
        found[name] = statistics.median(c[name] for c in cycles)
    found["added_in_steps"] = max(c["added_in_steps"] for c in cycles)
    found["longest_gap_ms"] = max(c["longest_gap_ms"] for c in cycles)
    found["longest_of_expansion_ms"] = max(c["longest_of_expansion_ms"] for c in cycles)
    found["num_with_rest"] = sum(c["blocks_in_rest"] > 0 for c in cycles)
    found["num_that_grew"] = sum(
        c["blocks_in_rest"] > 0 and c["tokens_between_first_copy_and_rest"] > 0 for c in cycles
    )
    found["blocks_moved"] = sum(c["blocks_moved"] for c in cycles)
    for group in (found["drafting_again"], found["full_head"]):
        for name in group["cycles"][0] if group["cycles"] else ():
            if name.startswith("longest"):
                values = [c[name] for c in group["cycles"] if c[name] is not None]
                group[name] = max(values, default=None)


def _judge(found: Found, options: argparse.Namespace) -> None:
    during = "a step while the draft comes back, over one before"
    memory_floors.check(
        found, options, f"{during}, the whole reload", found["loading_over_before"],
        most=1.05, of_time=True,
    )  # fmt: skip
    memory_floors.check(
        found, options, f"{during}, copies to the device in flight", found["copying_over_before"],
        most=1.05, of_time=True,
    )  # fmt: skip
    memory_floors.check(
        found, options, "most that a token's gap exceeds the median before, in median steps",
        found["added_in_steps"], most=1, of_time=True,
    )  # fmt: skip
    memory_floors.check(
        found, options, "contractions with a last copy that pauses steps, rows having grown",
        found["num_that_grew"], least=1,
    )  # fmt: skip
    memory_floors.check(found, options, "blocks moved", found["blocks_moved"], least=1)


def _flat(gaps: dict[int, list[float]]) -> list[float]:
    return [gap for of_row in gaps.values() for gap in of_row]


def _distribution(gaps: Iterable[float]) -> dict[str, int]:
    """How many have a length, in hundredths of a millisecond."""
    counts = Counter(round(gap * 1e3, 2) for gap in gaps)
    return {f"{ms:g}": counts[ms] for ms in sorted(counts)}


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 4)


def _share(seconds: float, of: float) -> float:
    return round(seconds / of, 5)


def show(found: Found) -> str:
    """What is asked of it, and what has no floor."""
    cycles, again, full = found["cycles"], found["drafting_again"], found["full_head"]
    moved, rest = (
        [c["blocks_moved"] for c in cycles],
        [c["blocks_in_rest"] for c in cycles],
    )
    lines = [
        f"\nreload of {found['image_mb']} MB under {found['rows']} rows: "
        f"{found['reload_took_ms']:.1f} ms, of which the copies to the device "
        f"{found['copying_took_ms']:.1f}; a step before takes {found['before_mean_ms']:.3f} ms",
        f"  {len(cycles)} contractions moved {moved} blocks; {found['num_with_rest']} had a last "
        f"copy, of {rest} blocks, for which steps paused",
        f"  longest gap of a token {found['longest_gap_ms']:.2f} ms; of an expansion "
        f"{found['longest_of_expansion_ms']:.2f} ms",
        f"  steps that lie within the copies to the device, over one before: "
        f"{found['within_copying_over_before']} ({found['num_steps_of_within_copying_over_before']}"
        " steps, no floor)",
    ]
    if again["cycles"]:
        first = again["cycles"][0]
        lines.append(
            f"  rows that draft again at gamma {again['gamma']}, no floor: longest gap "
            f"{again['longest_gap_ms']:.2f} ms, {again['longest_gap_in_steps']:.2f} steps of "
            f"{first['drafting_ms']:.2f} ms; in the catch-up of {first['tokens_caught_up']} tokens "
            f"{again['longest_in_catch_up_in_steps']:.2f}"
        )
    if full["cycles"]:
        preempted = [c["rows_preempted"] for c in full["cycles"]]
        parts = [
            f"{name} {full[f'longest_of_{name}_ms']} ms, {full[f'longest_of_{name}_in_steps']}"
            for name in ("others", "preempted")
        ]
        lines.append(
            f"  full head until the draft is back, no floor, {preempted} rows preempted: longest "
            f"gap of {' steps, of '.join(parts)} steps"
        )
    return "\n".join([*lines, *memory_floors.lines(found)])
