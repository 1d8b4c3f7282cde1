"""Expansions and contractions by the hundred under random load: answers, acceptance, leaks."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil

from gpu.driver import JobFailed
from gpu.memory_link import Bench, device_used
from gpu.memory_load import Load
from worker.engine.transition import ElasticCounters
from worker.messages import Grant, RequestRefused

# A few blocks are enough for the draft to come back, so that there are too few for rows after.
AGENT = ("--hold-s=0", "--t-persist=1", "--tau-low=2", "--tau-high=2", "--backoff-s=0.05")
EVERY = 10  # cycles from one sample of memory and acceptance to the next
TIGHT_EVERY = 4
MOST_TIGHT_TURNS = 60  # after which requests arrive more slowly
SAY_S = 5.0
LIMITS = {"engine": 64 << 20, "agent": 64 << 20, "device": 8 << 20}  # of growth, over all cycles


@dataclass
class Tally:
    """What cycles have done."""

    num_expansions: int = 0
    num_contractions: int = 0
    num_refused: int = 0  # contractions given up, for want of free head blocks
    blocks_moved: int = 0
    num_tight_cycles: int = 0
    num_tight_preemptions: int = 0

    def add(self, bench: Bench, before: ElasticCounters) -> None:
        """Count a cycle, and forget what was noted of it: it would look like a leak."""
        now = bench.elastic.counters
        self.num_expansions += now.num_expansions - before.num_expansions
        self.num_contractions += now.num_contractions - before.num_contractions
        for _, message in bench.feed.sent:
            if isinstance(message, Grant) and message.kind == "copy":
                self.blocks_moved += len(message.source_ids)
            self.num_refused += isinstance(message, RequestRefused)
        bench.feed.sent.clear()
        bench.phases.clear()


def measure(bench: Bench, options: argparse.Namespace) -> dict[str, Any]:
    """Learn the answers, then cycle."""
    load, scheduler = Load(bench, options), bench.scheduler
    load.answer_alone()
    bench.say(f"cycles: {len(load.asked)} answers are known")
    before = _acceptance(bench, load, 4 * options.window)
    if not before:
        raise JobFailed("no draft was accepted before the first cycle")
    acceptances, memory, tally = [], [], Tally()
    every = max(1, min(EVERY, options.cycles // 4))
    with bench.agent(*AGENT, *options.agent_flag) as address:
        agent = _process_at(address)
        for cycle in range(-max(2, options.cycles // 20), 0):  # everything is used once
            _cycle(bench, load, options, tally, tight=cycle % 2 == 0)
            _acceptance(bench, load, options.window)
        bench.say("cycles: warm")
        tally, begun = Tally(), time.perf_counter()
        baseline = _used(bench, agent, 0)
        num_preemptions, num_steps = scheduler.num_preemptions, scheduler.num_steps
        said = begun
        for cycle in range(options.cycles):
            _cycle(bench, load, options, tally, tight=cycle % TIGHT_EVERY == TIGHT_EVERY - 1)
            if (cycle + 1) % every == 0:
                found = _acceptance(bench, load, options.window)
                acceptances += [] if found is None else [found]
                memory.append(_used(bench, agent, cycle + 1))
                if time.perf_counter() - said > SAY_S:
                    said = time.perf_counter()
                    bench.say(f"cycle {cycle + 1}: {memory[-1]}, acceptance {found}, {tally}")
        load.drain()
    grown, slopes = _growth(baseline, memory)
    share = [accepted / before for accepted in acceptances]
    result = {
        "cycles": options.cycles,
        "seconds": round(time.perf_counter() - begun, 1),
        "num_answers": load.num_answered,
        "num_wrong": load.num_wrong,
        "num_steps": scheduler.num_steps - num_steps,
        "num_preemptions": scheduler.num_preemptions - num_preemptions,
        **dataclasses.asdict(tally),
        "acceptance_before": before,
        "acceptance_after": acceptances,
        "num_windows_without": options.cycles // every - len(acceptances),
        "mean_acceptance_share": round(statistics.mean(share), 4) if share else None,
        "least_acceptance_share": round(min(share), 4) if share else None,
        "memory": [baseline, *memory],
        "grown_bytes": grown,
        "bytes_per_cycle": slopes,
    }
    return {**result, "failed": _failures(result)}


def _failures(found: dict[str, Any]) -> list[str]:
    """What must not be, a sentence each."""
    failed = [
        f"a leak: {name} {size / 2**20:+.1f} MiB over {found['cycles']} cycles"
        for name, size in found["grown_bytes"].items()
        if size > LIMITS[name]
    ]
    if found["num_wrong"]:
        failed.append(f"{found['num_wrong']} of {found['num_answers']} answers differ")
    if not found["acceptance_after"]:
        failed.append("the draft was not in its place in any window")
    if found["num_tight_cycles"] and not found["num_tight_preemptions"] + found["num_refused"]:
        failed.append("the tight cycles made no row and no contraction give way")
    return failed


def _growth(
    baseline: dict[str, int], memory: list[dict[str, int]]
) -> tuple[dict[str, int], dict[str, float]]:
    """Bytes from the baseline to the last sample, and by cycle in the second half, by a line."""
    grown = {name: memory[-1][name] - baseline[name] for name in LIMITS}
    half = memory[(len(memory) - 1) // 2 :]
    cycles = [sample["cycle"] for sample in half]
    lines = {
        name: statistics.linear_regression(cycles, [sample[name] for sample in half])
        for name in LIMITS
    }
    return grown, {name: round(line.slope, 1) for name, line in lines.items()}


def _used(bench: Bench, agent: psutil.Process, cycle: int) -> dict[str, int]:
    return {
        "cycle": cycle,
        "engine": psutil.Process().memory_info().rss,
        "agent": agent.memory_info().rss,
        "device": device_used(bench.ready.device),
    }


def _cycle(
    bench: Bench, load: Load, options: argparse.Namespace, tally: Tally, *, tight: bool
) -> None:
    """Press until the draft leaves, run on, ease until it is back; `tight` eases by a few blocks.

    There the contraction begins with hardly a free head block to spare, and none is left to the
    rows that decode beside it and for some turns after: they wait, or are preempted.
    """
    rng, counters = load._rng, bench.elastic.counters
    num_preemptions = bench.scheduler.num_preemptions
    bench.set_gamma(0)
    num_left = rng.randint(0, 1)
    taken = bench.squeeze(num_left)
    for _ in _turns_until(bench, load, "offloaded"):
        taken += bench.squeeze(num_left)  # rows that end would ease it
    for _ in range(rng.randint(0, options.between)):
        bench.set_gamma(rng.choice([0, 2, 5]))
        load.turn()
    if tight:
        bench.set_gamma(2)  # so that it does not leave again
        _release(bench, taken, len(bench.blocks.live_tail_blocks()) - bench.num_free_head())
        for turn in _turns_until(bench, load, "resident"):
            if bench.elastic.residency == "reloading":
                taken += bench.squeeze(0)
            elif turn % 4 == 0:
                _release(bench, taken, 2)
            if turn > MOST_TIGHT_TURNS:
                load.most = max(1, options.cycle_rows // 4)
        for _ in range(options.between):
            load.turn()
        tally.num_tight_cycles += 1
        tally.num_tight_preemptions += bench.scheduler.num_preemptions - num_preemptions
    bench.release(taken)
    load.most = max(1, options.cycle_rows // 4)  # rows end, so that there is room to spare
    _turns(bench, load, "resident")
    load.most = options.cycle_rows
    for _ in range(rng.randint(0, options.between)):
        bench.set_gamma(rng.choice([0, 1, 3, 5]))
        load.turn()
    tally.add(bench, counters)


def _release(bench: Bench, taken: list[int], count: int) -> None:
    """Give up to so many of the blocks back."""
    for _ in range(min(count, len(taken))):
        bench.release([taken.pop()])


def _turns_until(bench: Bench, load: Load, residency: str) -> Iterator[int]:
    """Turns under load until the draft is there; gives the number of each."""
    deadline = time.monotonic() + 60
    for turn in itertools.count(1):
        if bench.elastic.residency == residency:
            return
        if time.monotonic() > deadline:
            raise JobFailed(f"the draft did not become {residency}: {bench.elastic.residency}")
        load.turn()
        yield turn


def _turns(bench: Bench, load: Load, residency: str) -> None:
    for _ in _turns_until(bench, load, residency):
        pass


def _acceptance(bench: Bench, load: Load, num_turns: int) -> float | None:
    """Share of drafts accepted by rows that have caught up; None if the draft left meanwhile."""
    bench.set_gamma(3)
    most, load.most = load.most, max(1, load.most // 4)
    _turns(bench, load, "resident")
    load.most = most
    scheduler = bench.scheduler
    drafted, accepted = scheduler.num_draft_tokens, scheduler.num_accepted_tokens
    for _ in range(num_turns):
        load.turn()
        if bench.elastic.residency != "resident":
            return None
    drafted = scheduler.num_draft_tokens - drafted
    return (scheduler.num_accepted_tokens - accepted) / drafted if drafted else None


def _process_at(address: str) -> psutil.Process:
    """The process that listens there; JobFailed if there is none, whose growth nobody would see."""
    port = int(address.rsplit(":", 1)[1])
    for child in psutil.Process().children(recursive=True):
        for connection in child.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                return child
    raise JobFailed(f"the process of the agent at {address} was not found")


def show(found: dict[str, Any]) -> str:
    """What must hold, in a few lines."""
    grown = ", ".join(
        f"{name} {size / 2**20:+.1f} MiB ({found['bytes_per_cycle'][name]:+.0f} bytes a cycle)"
        for name, size in found["grown_bytes"].items()
    )
    lines = [
        f"\n{found['cycles']} cycles in {found['seconds']} s, {found['blocks_moved']} blocks "
        f"moved: {found['num_wrong']} of {found['num_answers']} answers differ (0)",
        f"  acceptance after a reload, of before: mean {found['mean_acceptance_share']}, least "
        f"{found['least_acceptance_share']} of {len(found['acceptance_after'])} windows (.95)",
        f"  {found['num_preemptions']} preemptions, {found['num_tight_preemptions']} of them in "
        f"{found['num_tight_cycles']} tight cycles; {found['num_refused']} contractions refused",
        f"  grown since the first cycles: {grown}; by the second half's line",
    ]
    return "\n".join([*lines, *(f"  FAILED: {reason}" for reason in found["failed"])])
