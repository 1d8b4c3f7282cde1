"""Steps around a contraction and a reload: what the agent's work costs the rows that decode."""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from typing import Any

from gpu.driver import JobFailed
from gpu.load import prompts
from gpu.memory_link import Bench
from worker.messages import Grant

AGENT = ("--hold-s=0", "--tau-low=0.1", "--tau-high=0.1", "--backoff-s=0.1")
AFTER_S = 0.05  # that a transition is watched for once the draft is where it belongs


def measure(bench: Bench, options: argparse.Namespace) -> dict[str, Any]:
    """Cycles of expansion and contraction under rows that decode and live in the tail."""
    cycles = []
    with bench.agent(*AGENT, *options.agent_flag):
        for seed in range(options.reload_cycles + 1):
            cycles.append(_cycle(bench, options, seed))
            bench.say(f"reload, cycle {seed}: {cycles[-1]}")
    cycles = cycles[1:]  # the first one is where everything is used for the first time
    median = statistics.median
    found: dict[str, Any] = {"rows": options.rows, "context": options.context, "cycles": cycles}
    found["step_before_ms"] = median(c["before_mean_ms"] for c in cycles)
    found["step_loading_ms"] = median(c["loading_ms"] for c in cycles)
    ratios = [c["loading_ms"] / c["before_mean_ms"] for c in cycles]
    found["loading_over_before"] = round(median(ratios), 4)
    added = [c["longest_ms"] - c["before_ms"] for c in cycles]
    found["added_by_contraction_ms"] = round(max(added), 3)
    ratios = [more / c["before_ms"] for more, c in zip(added, cycles, strict=True)]
    found["added_in_steps"] = round(max(ratios), 3)
    for name in ("contraction", "expansion"):
        longest = [c[f"longest_of_{name}_ms"] for c in cycles]
        found[f"longest_of_{name}_ms"] = max(longest)
        found[f"longest_of_{name}_in_steps"] = round(
            max(span / c["before_ms"] for span, c in zip(longest, cycles, strict=True)), 3
        )
    found["reload_ms"] = median(c["reload_ms"] for c in cycles)
    found["image_mb"] = round(bench.pool.image_bytes / 1e6, 1)
    return found


def _cycle(bench: Bench, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    driver, blocks = bench.driver, bench.blocks
    low = max(2, int(0.05 * blocks.num_base_blocks))
    size = blocks.block_size
    _submit(bench, [prompts(1, options.context, vocab=options.vocab, seed=7_000 + seed)[0]])
    bench.until(lambda: bench.scheduler.num_running == 1, "a row runs")
    taken = bench.squeeze(low)
    bench.until(lambda: bench.elastic.residency == "offloaded", "the pool grew")
    needed = options.rows * -(-options.context // size) + 2 * options.rows
    if needed > blocks.num_free:
        raise SystemExit(f"{options.rows} rows need {needed} blocks; {blocks.num_free} are free")
    asked = prompts(options.rows, options.context, vocab=options.vocab, seed=seed)
    _submit(bench, asked)
    rows = options.rows + 1
    bench.until(lambda: _all_decode(bench, rows), "every row decodes")
    driver.retired.clear()
    bench.until(lambda: len(driver.retired) > options.steps, "steps before")
    before = list(driver.retired)
    num_in_tail = len(blocks.live_tail_blocks())
    bench.feed.sent.clear()
    bench.phases.clear()
    driver.retired.clear()
    bench.release(taken)
    begun = time.perf_counter()
    bench.until(lambda: bench.elastic.residency == "resident", "the draft came back")
    reached = time.perf_counter()
    bench.until(lambda: driver.retired[-1].at > reached + AFTER_S, "steps after")
    _check_running(bench, rows)
    grants = [(at, m) for at, m in bench.feed.sent if isinstance(m, Grant)]
    loads = [at for at, m in grants if m.kind == "load"]
    copies = [m for _, m in grants if m.kind == "copy"]
    first = grants[0][0]
    ends = [at for at, phase in bench.phases if phase in ("IDLE", "RESTORING") and at > loads[-1]]
    loaded = ends[0] if ends else reached
    whole = [before[-1], *driver.retired]
    spans = [(a.at, b.at) for a, b in itertools.pairwise(whole)]
    moving = [e - b for b, e in spans if e > first and b < loads[0]]
    loading = [e - b for b, e in spans if b >= loads[0] and e <= loaded]
    if not loading:  # a load shorter than a step: the one that it fell into
        loading = [e - b for b, e in spans if e > loads[0] and b < loaded]
    usual = [b.at - a.at for a, b in itertools.pairwise(before)]
    expansion = _expansion(bench, low, rows)
    return {
        "before_ms": round(statistics.median(usual) * 1e3, 4),
        "before_mean_ms": round(statistics.mean(usual) * 1e3, 4),
        "before_p95_ms": round(sorted(usual)[int(0.95 * len(usual))] * 1e3, 4),
        "moving_ms": [round(span * 1e3, 3) for span in moving],
        "longest_ms": round(max(moving) * 1e3, 4),
        "longest_of_contraction_ms": round(max(e - b for b, e in spans) * 1e3, 4),
        "longest_of_expansion_ms": round(expansion * 1e3, 4),
        "loading_ms": round(statistics.mean(loading) * 1e3, 4),
        "num_steps_loading": len(loading),
        "reload_ms": round((loaded - loads[0]) * 1e3, 3),
        "decided_ms": round((first - begun) * 1e3, 2),
        "blocks_in_tail": num_in_tail,
        "blocks_moved": [len(m.source_ids) for m in copies],
    }


def _expansion(bench: Bench, low: int, num_rows: int) -> float:
    """Press until the draft has left; longest seconds between two steps, from the squeeze on.

    Ends every row and waits for the draft's return, so that the next cycle begins as this one.
    """
    driver = bench.driver
    last = driver.retired[-1]
    driver.retired.clear()
    taken = bench.squeeze(low)
    bench.until(lambda: bench.elastic.residency == "offloaded", "the pool grew")
    reached = time.perf_counter()
    bench.until(
        lambda: bool(driver.retired) and driver.retired[-1].at > reached + AFTER_S, "steps after"
    )
    _check_running(bench, num_rows)
    longest = max(b.at - a.at for a, b in itertools.pairwise([last, *driver.retired]))
    driver.reset()
    bench.release(taken)
    bench.until(lambda: bench.elastic.residency == "resident", "the draft came back")
    return longest


def _check_running(bench: Bench, num_rows: int) -> None:
    """Raise JobFailed unless all rows have decoded until now."""
    if not _all_decode(bench, num_rows):
        raise JobFailed(f"{bench.scheduler.num_running} of {num_rows} rows are left")


def _submit(bench: Bench, asked: list[list[int]]) -> None:
    driver = bench.driver
    for seed, ids in enumerate(asked):
        room = bench.engine.max_model_len - len(ids)
        driver._submit(driver._request(ids, room, max_gamma=0, temperature=0.0, seed=seed))


def _all_decode(bench: Bench, num_rows: int) -> bool:
    running = bench.scheduler.running
    return len(running) == num_rows and all(row.phase == "decode" for row in running)


def show(found: dict[str, Any]) -> str:
    """What is asked of it, and the whole transitions beside it."""
    return (
        f"\nreload of {found['image_mb']} MB in {found['reload_ms']:.1f} ms under "
        f"{found['rows']} rows: a step takes {found['step_loading_ms']:.3f} ms, before "
        f"{found['step_before_ms']:.3f}: {found['loading_over_before']:.3f} (at most 1.05)\n"
        f"contraction: the longest step takes {found['added_by_contraction_ms']:.2f} ms more, "
        f"{found['added_in_steps']:.2f} steps (at most 1)\n"
        f"longest of the whole transition, between two steps: "
        f"contraction {found['longest_of_contraction_ms']:.2f} ms, "
        f"{found['longest_of_contraction_in_steps']:.2f} steps; "
        f"expansion {found['longest_of_expansion_ms']:.2f} ms, "
        f"{found['longest_of_expansion_in_steps']:.2f} steps"
    )
