"""Expansions and contractions by the hundred under random load: answers, acceptance, leaks."""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

import psutil

from gpu.memory_link import Bench, device_free
from worker.messages import SamplingParams, Submit

AGENT = ("--hold-s=0", "--t-persist=1", "--tau-low=0.2", "--tau-high=0.2", "--backoff-s=0.05")
Asked = tuple[list[int], int, float]  # prompt, tokens of the answer, temperature


class Load:
    """Requests at random, each of a fixed set whose answers are known."""

    def __init__(self, bench: Bench, options: argparse.Namespace) -> None:
        self._bench, self._rng = bench, random.Random(11)
        self.asked = [self._draw(options) for _ in range(options.distinct)]
        self.expected: list[list[int]] = []
        self.num_answered = self.num_wrong = 0
        self._open: dict[int, tuple[int, list[int]]] = {}
        self.most = options.cycle_rows  # requests at once

    def _draw(self, options: argparse.Namespace) -> Asked:
        rng, vocab = self._rng, self._bench.engine.vocab_size
        length = rng.choice([1, 5, 33, 150, 260][: options.lengths])
        prompt = [rng.randrange(vocab) for _ in range(length)]
        return prompt, rng.randint(8, options.longest), rng.choice([0.0, 0.7, 1.0])

    def answer_alone(self) -> None:
        """Learn what each answer is, at gamma 0 and with the draft in its place."""
        self._bench.set_gamma(0)
        for index in range(len(self.asked)):
            self._submit(index)
            while self._open:
                self.turn(submit=False)

    def _submit(self, index: int) -> None:
        prompt, count, temperature = self.asked[index]
        driver = self._bench.driver
        params = SamplingParams(
            temperature=temperature, seed=index, max_tokens=count, ignore_eos=True
        )
        request = Submit(request_id=next(driver._ids), prompt_token_ids=prompt, sampling=params)
        driver._submit(request)
        self._open[request.request_id] = index, []

    def turn(self, *, submit: bool = True) -> None:
        """One turn of the engine, every invariant checked after it."""
        bench = self._bench
        if submit and len(self._open) < self.most and self._rng.random() < 0.6:
            self._submit(self._rng.randrange(len(self.asked)))
        for request_id, ids in bench.driver._turn():
            index, tokens = self._open[request_id]
            tokens += ids
            if len(tokens) == self.asked[index][1]:
                del self._open[request_id]
                self._compare(index, tokens)
        bench.driver.retired.clear()  # else they would look like a leak
        bench.scheduler.check_integrity()
        _check_counts(bench)

    def _compare(self, index: int, tokens: list[int]) -> None:
        if len(self.expected) < len(self.asked):
            assert index == len(self.expected)
            self.expected.append(tokens)
            return
        self.num_answered += 1
        self.num_wrong += tokens != self.expected[index]

    def drain(self) -> None:
        """Answer what is open."""
        while self._open:
            self.turn(submit=False)


def _check_counts(bench: Bench) -> None:
    """Free + used + granted blocks are all that can hold KV, and what the tail has else."""
    counts = dict.fromkeys(("free", "cached", "row", "granted", "draft"), 0)
    for _, count, owner in bench.blocks.ranges():
        counts[owner.value] += count
    blocks = bench.blocks
    assert counts["free"] + counts["cached"] == blocks.num_free
    assert sum(counts.values()) == blocks.num_base_blocks + blocks.num_extra_blocks
    assert counts["draft"] <= blocks.num_extra_blocks


def measure(bench: Bench, options: argparse.Namespace) -> dict[str, Any]:
    """Learn the answers, then cycle."""
    load, scheduler = Load(bench, options), bench.scheduler
    load.answer_alone()
    bench.say(f"cycles: {len(load.asked)} answers are known")
    before = _acceptance(bench, load, options)
    begun = time.perf_counter()
    acceptances, memory = [], []
    with bench.agent(*AGENT, *options.agent_flag) as address:
        agent = _process_at(address)
        for cycle in range(options.cycles):
            _cycle(bench, load, options)
            if cycle % max(1, options.cycles // 20) == 0:
                acceptances.append(_acceptance(bench, load, options))
                memory.append(
                    {
                        "cycle": cycle,
                        "engine_rss": psutil.Process().memory_info().rss,
                        "agent_rss": agent.memory_info().rss if agent is not None else 0,
                        "device_free": device_free(bench.ready.device),
                    }
                )
                bench.say(f"cycle {cycle}: {memory[-1]}, acceptance {acceptances[-1]:.4f}")
        load.drain()
    settled = memory[len(memory) // 4]  # once everything has been used
    grown = {name: memory[-1][name] - settled[name] for name in memory[0] if name != "cycle"}
    counters = bench.elastic.counters
    return {
        "cycles": options.cycles,
        "seconds": round(time.perf_counter() - begun, 1),
        "num_expansions": counters.num_expansions,
        "num_contractions": counters.num_contractions,
        "num_answers": load.num_answered,
        "num_wrong": load.num_wrong,
        "num_steps": scheduler.num_steps,
        "num_preemptions": scheduler.num_preemptions,
        "acceptance_before": before,
        "acceptance_after": acceptances,
        "least_acceptance_share": round(min(acceptances) / before, 4) if before else None,
        "blocks_moved": sum(
            len(m.source_ids) for _, m in bench.feed.sent if getattr(m, "kind", "") == "copy"
        ),
        "memory": memory,
        "grown_bytes": grown,
    }


def _cycle(bench: Bench, load: Load, options: argparse.Namespace) -> None:
    """Press until the draft leaves, run on, ease until it is back."""
    rng = load._rng
    bench.set_gamma(0)
    taken = bench.squeeze(rng.randint(2, 6))
    _turns(bench, load, "offloaded")
    for _ in range(rng.randint(0, options.between)):
        bench.set_gamma(rng.choice([0, 2, 5]))
        load.turn()
    bench.release(taken)
    load.most = max(1, options.cycle_rows // 4)  # rows end, so that there is room to spare
    _turns(bench, load, "resident")
    load.most = options.cycle_rows
    for _ in range(rng.randint(0, options.between)):
        bench.set_gamma(rng.choice([0, 1, 3, 5]))
        load.turn()


def _turns(bench: Bench, load: Load, residency: str) -> None:
    deadline = time.monotonic() + 60
    while bench.elastic.residency != residency:
        if time.monotonic() > deadline:
            raise SystemExit(f"the draft did not become {residency}: {bench.elastic.residency}")
        load.turn()


def _acceptance(bench: Bench, load: Load, options: argparse.Namespace) -> float:
    """Share of drafts accepted by rows that have caught up."""
    bench.until(lambda: bench.elastic.residency in ("resident", "offloaded"), "no transition")
    bench.set_gamma(3)
    scheduler = bench.scheduler
    drafted, accepted = scheduler.num_draft_tokens, scheduler.num_accepted_tokens
    for _ in range(options.window):
        load.turn()
    drafted = scheduler.num_draft_tokens - drafted
    return (scheduler.num_accepted_tokens - accepted) / drafted if drafted else 0.0


def _process_at(address: str) -> psutil.Process | None:
    """The process that listens there."""
    port = int(address.rsplit(":", 1)[1])
    for child in psutil.Process().children(recursive=True):
        for connection in child.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                return child
    return None


def show(found: dict[str, Any]) -> str:
    """What must hold, in a few lines."""
    grown = ", ".join(f"{n} {size / 1e6:+.1f} MB" for n, size in found["grown_bytes"].items())
    return (
        f"\n{found['cycles']} cycles in {found['seconds']} s, {found['blocks_moved']} blocks "
        f"moved: {found['num_wrong']} of {found['num_answers']} answers differ (0), acceptance "
        f"after a reload at least {found['least_acceptance_share']} of before (.95)\n"
        f"  grown since a quarter of the way: {grown}"
    )
