"""Expansions and contractions by the hundred under random load: answers, acceptance, leaks."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import re
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import psutil

from gpu import memory_checks, memory_floors
from gpu.driver import JobFailed
from gpu.memory_link import Bench, device_used
from gpu.memory_load import Load
from worker.engine.transition import ElasticCounters
from worker.messages import Grant, RequestRefused

# A few blocks are enough for the draft to come back, so that there are too few for rows after.
AGENT = ("--hold-s=0", "--t-persist=1", "--tau-low=2", "--tau-high=2", "--backoff-s=0.05")
EVERY = 10  # cycles from one sample of memory, and one look at the agent's map, to the next
TIGHT_EVERY = 4
MOST_TIGHT_TURNS = 60  # after which requests arrive more slowly
SAY_S = 5.0
# Of growth over all cycles, from the first sample to the last; a quarter of that for the line
# through the second half of the samples, where they are many: what is used first is no leak.
LIMITS = {"engine": 64 << 20, "agent": 64 << 20, "device": 8 << 20}
MANY = 100  # cycles
MIN_DRAFTS = 12  # of a window, so that a share means something
MAX_WINDOW_TURNS = 60


@dataclass
class Tally:
    """What cycles have done."""

    num_expansions: int = 0
    num_contractions: int = 0
    blocks_granted: int = 0  # to be copied
    blocks_moved: int = 0  # that took the place of their sources
    num_rests: int = 0  # contractions with a copy for which steps paused
    num_tight_cycles: int = 0
    num_tight_preemptions: int = 0
    refused: dict[str, int] = field(default_factory=dict)  # requests of the agent, by reason

    def add(self, bench: Bench, before: ElasticCounters, num_moved: int) -> None:
        """Count a cycle, and forget what was noted of it: it would look like a leak."""
        now = bench.elastic.counters
        self.num_expansions += now.num_expansions - before.num_expansions
        self.num_contractions += now.num_contractions - before.num_contractions
        self.blocks_moved += bench.num_moved - num_moved
        self.num_rests += len(bench.rests)
        kinds = {message.request_id: message.kind for _, message in bench.feed.asked}
        for _, message in bench.feed.sent:
            if isinstance(message, Grant) and message.kind == "copy":
                self.blocks_granted += len(message.source_ids)
            elif isinstance(message, RequestRefused):
                kind = kinds.get(message.request_id, "a request")
                reason = f"{kind}: {re.sub('[0-9]+', 'N', message.reason)}"
                self.refused[reason] = self.refused.get(reason, 0) + 1
        bench.forget()


def measure(bench: Bench, options: argparse.Namespace) -> dict[str, Any]:
    """Learn the answers, then cycle."""
    load, scheduler = Load(bench, options), bench.scheduler
    load.answer_alone()
    bench.say(f"cycles: {len(load.asked)} answers are known")
    before = _acceptance(bench, load, 8 * options.window)
    if not before:
        raise JobFailed("no draft was accepted before the first cycle")
    memory, tally = list[dict[str, int]](), Tally()
    windows: list[float | None] = []
    every = max(1, min(EVERY, options.cycles // 4))
    with bench.agent(*AGENT, *options.agent_flag) as address:
        agent = _process_at(address)
        for cycle in range(-max(2, options.cycles // 20), 0):  # everything is used once
            _cycle(bench, load, options, tally, tight=cycle % 2 == 0)
        memory_checks.agents_map(bench, address, load.turn)
        bench.say("cycles: warm")
        tally, begun = Tally(), time.perf_counter()
        baseline = _used(bench, agent, 0)
        num_preemptions, num_steps = scheduler.num_preemptions, scheduler.num_steps
        said, num_maps = begun, 0
        for cycle in range(options.cycles):
            tight = cycle % TIGHT_EVERY == TIGHT_EVERY - 1
            windows.append(_cycle(bench, load, options, tally, tight=tight))
            if (cycle + 1) % every == 0:
                memory_checks.agents_map(bench, address, load.turn)
                num_maps += 1
                memory.append(_used(bench, agent, cycle + 1))
                if time.perf_counter() - said > SAY_S:
                    said = time.perf_counter()
                    bench.say(f"cycle {cycle + 1}: {memory[-1]}, {windows[-1]}, {tally}")
        load.drain()
    grown, slopes = _growth(baseline, memory)
    acceptances = [accepted for accepted in windows if accepted is not None]
    share = [accepted / before for accepted in acceptances]
    result = {
        "cycles": options.cycles,
        "seconds": round(time.perf_counter() - begun, 1),
        "agent_flags": [*AGENT, *options.agent_flag],
        "num_answers": load.num_answered,
        "num_wrong": load.num_wrong,
        "num_steps": scheduler.num_steps - num_steps,
        "num_preemptions": scheduler.num_preemptions - num_preemptions,
        **dataclasses.asdict(tally),
        "num_maps_compared": num_maps,
        "acceptance_before": before,
        "acceptance_after": {f"{value:.4f}": n for value, n in Counter(acceptances).items()},
        "num_windows": len(acceptances),
        "num_windows_without": len(windows) - len(acceptances),
        "mean_acceptance_share": round(statistics.mean(share), 4) if share else None,
        "least_acceptance_share": round(min(share), 4) if share else None,
        "memory": [baseline, *memory],
        "grown_bytes": grown,
        "bytes_per_cycle": slopes,
    }
    _judge(result, options)
    return result


def _judge(found: dict[str, Any], options: argparse.Namespace) -> None:
    """What must hold: answers, acceptance, contractions, preemptions, and no leak."""

    def check(
        what: str, value: float | None, *, least: float | None = None, most: float | None = None
    ) -> None:
        memory_floors.check(found, options, what, value, least=least, most=most)

    check("answers that differ", found["num_wrong"], most=0)
    check("answers compared", found["num_answers"], least=1)
    check("contractions, of one a cycle", found["num_contractions"], least=found["cycles"])
    check("blocks that were moved", found["blocks_moved"], least=1)
    check("contractions with a last copy that pauses steps", found["num_rests"], least=1)
    check("least acceptance after a reload, of before", found["least_acceptance_share"], least=0.95)
    check("cycles whose reload no draft followed", found["num_windows_without"], most=0)
    if found["num_tight_cycles"]:
        gave_way = found["num_tight_preemptions"] + sum(found["refused"].values())
        check("rows and contractions that a full head made give way", gave_way, least=1)
    for name, size in found["grown_bytes"].items():
        check(f"MiB that {name} grew, levels", round(size / 2**20, 2), most=LIMITS[name] / 2**20)
        line = found["bytes_per_cycle"][name] * found["cycles"] / 2**20
        share = 0.25 if found["cycles"] >= MANY else 1
        most = share * LIMITS[name] / 2**20
        check(f"MiB that {name} grew, by its line", round(line, 2), most=most)


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
) -> float | None:
    """Press until the draft leaves, run on, ease until it is back; `tight` eases by a few blocks.

    Gives the share of drafts that are accepted right after the reload; None if there were too few.

    There the contraction begins with hardly a free head block to spare, and none is left to the
    rows that decode beside it and for some turns after: they wait, or are preempted.
    """
    rng, counters = load._rng, bench.elastic.counters
    num_preemptions, num_moved = bench.scheduler.num_preemptions, bench.num_moved
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
    accepted = _acceptance(bench, load, options.window)
    for _ in range(rng.randint(0, options.between)):
        bench.set_gamma(rng.choice([0, 1, 3, 5]))
        load.turn()
    tally.add(bench, counters, num_moved)
    return accepted


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
    """Share of drafts accepted by rows that have caught up; None if there were too few.

    Takes so many turns, and more until `MIN_DRAFTS` were drafted. A draft that leaves meanwhile,
    as the agent may have asked for before, is waited for.
    """
    bench.set_gamma(3)
    scheduler = bench.scheduler
    drafted, accepted = scheduler.num_draft_tokens, scheduler.num_accepted_tokens
    for turn in range(MAX_WINDOW_TURNS):
        if turn >= num_turns and scheduler.num_draft_tokens - drafted >= MIN_DRAFTS:
            break
        _turns(bench, load, "resident")
        load.turn()
    drafted = scheduler.num_draft_tokens - drafted
    if drafted < MIN_DRAFTS:
        return None
    return (scheduler.num_accepted_tokens - accepted) / drafted


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
        f"\n{found['cycles']} cycles in {found['seconds']} s, {found['num_contractions']} "
        f"contractions, {found['num_rests']} with a last copy that paused steps: "
        f"{found['blocks_granted']} blocks granted, {found['blocks_moved']} moved; "
        f"{found['num_maps_compared']} maps of the agent agree with the engine's counts",
        f"  acceptance after a reload, of before: mean {found['mean_acceptance_share']} of "
        f"{found['num_windows']} windows; {found['num_answers']} answers",
        f"  {found['num_preemptions']} preemptions, {found['num_tight_preemptions']} of them in "
        f"{found['num_tight_cycles']} tight cycles",
        f"  grown since the first cycles: {grown}; by the second half's line",
    ]
    lines += [f"  refused {count} x {reason}" for reason, count in found["refused"].items()]
    return "\n".join([*lines, *memory_floors.lines(found)])
