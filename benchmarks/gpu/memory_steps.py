"""Steps around a contraction and a reload: what the agent's work costs the rows that decode."""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from typing import Any

from gpu.load import prompts
from gpu.memory_link import Bench
from worker.messages import Grant

AGENT = ("--hold-s=0", "--tau-low=0.1", "--tau-high=0.1", "--backoff-s=0.1")


def measure(bench: Bench, options: argparse.Namespace) -> dict[str, Any]:
    """Cycles of expansion and contraction under rows that decode and live in the tail."""
    with bench.agent(*AGENT, *options.agent_flag):
        cycles = [_cycle(bench, options, seed) for seed in range(options.reload_cycles + 1)]
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
    bench.until(lambda: driver.retired[-1].at > reached + 0.05, "steps after")
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
    driver.reset()
    return {
        "before_ms": round(statistics.median(usual) * 1e3, 4),
        "before_mean_ms": round(statistics.mean(usual) * 1e3, 4),
        "before_p95_ms": round(sorted(usual)[int(0.95 * len(usual))] * 1e3, 4),
        "moving_ms": [round(span * 1e3, 3) for span in moving],
        "longest_ms": round(max(moving) * 1e3, 4),
        "loading_ms": round(statistics.mean(loading) * 1e3, 4),
        "num_steps_loading": len(loading),
        "reload_ms": round((loaded - loads[0]) * 1e3, 3),
        "decided_ms": round((first - begun) * 1e3, 2),
        "blocks_in_tail": num_in_tail,
        "blocks_moved": [len(m.source_ids) for m in copies],
    }


def _submit(bench: Bench, asked: list[list[int]]) -> None:
    driver = bench.driver
    for seed, ids in enumerate(asked):
        room = bench.engine.max_model_len - len(ids)
        driver._submit(driver._request(ids, room, max_gamma=0, temperature=0.0, seed=seed))


def _all_decode(bench: Bench, num_rows: int) -> bool:
    running = bench.scheduler.running
    return len(running) == num_rows and all(row.phase == "decode" for row in running)


def show(found: dict[str, Any]) -> str:
    """What is asked of it, in two lines."""
    return (
        f"\nreload of {found['image_mb']} MB in {found['reload_ms']:.1f} ms under "
        f"{found['rows']} rows: a step takes {found['step_loading_ms']:.3f} ms, before "
        f"{found['step_before_ms']:.3f}: {found['loading_over_before']:.3f} (at most 1.05)\n"
        f"contraction: the longest step takes {found['added_by_contraction_ms']:.2f} ms more, "
        f"{found['added_in_steps']:.2f} steps (at most 1)"
    )
