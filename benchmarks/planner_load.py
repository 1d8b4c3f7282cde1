"""Many simulated workers on one planner: is a new decision in use soon after the old bin's end?

    python benchmarks/planner_load.py --planner 127.0.0.1:7001 --workers 32 --seconds 20

The workers' own code holds decisions, adds sums up and speaks to the planner; only the model is
left out. As on a GPU, a step is launched before the one ahead of it has been reported, so that
the step right after a bin never has the next decision: 2 steps is the least there is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field

from nightjar import log
from worker.engine.decisions import Choice
from worker.engine.links import CpuMeter, Planner
from worker.engine.plan import Plan, StepResult
from worker.messages import Context, Ready
from worker.planner_client import PlannerClient

MAX_GAMMA, MAX_BATCH_SIZE, NUM_KV_PER_ROW = 5, 64, 400
ACCEPTANCE = 0.7
SIZE_CHANGES = 1 / 40  # per step: a request came or went


@dataclass
class Figures:
    """What all workers saw."""

    lags: Counter[int] = field(default_factory=Counter)  # steps from a bin's end to a decision
    num_steps: int = 0
    num_held: int = 0  # steps that ran under a held decision
    late_s: float = 0.0  # by which steps began late: of this process, not of the planner
    num_messages: int = 0


class Worker:
    """One worker's step loop, with the model left out."""

    def __init__(self, address: str, number: int, steps_per_s: float, figures: Figures) -> None:
        self._rng = random.Random(number)
        self._step_s, self._figures = 1 / steps_per_s, figures
        ready = Ready(
            engine_pid=0,
            vocab_size=1,
            max_model_len=1,
            dtype="float16",
            device="simulated",
            max_gamma=MAX_GAMMA,
            max_batch_size=MAX_BATCH_SIZE,
            proposer="draft_model",
            target_identity="target",
            draft_identity="draft",
            arithmetic="exact",
            arithmetic_reason="",
            fingerprint="",
            build="eager",
            pool=None,
        )
        clock = time.perf_counter
        self._planner = Planner(
            planned=True, fixed_gamma=0, send=self._send, clock=clock, cpu=CpuMeter(1, clock)
        )
        self.client = PlannerClient(address, f"load-{number}", ready, self._planner.on_message)
        self._size = self._rng.randint(1, MAX_BATCH_SIZE)
        # Batch size of the bin that ended, and steps launched since; none under way: -1.
        self._ended, self._since = -1, 0

    def _send(self, message: object) -> None:
        self._figures.num_messages += 1
        self.client.report(message)  # type: ignore[arg-type]

    async def run(self, until: float) -> None:
        """Step at the given pace."""
        previous: StepResult | None = None
        at = time.perf_counter() + self._rng.random() * self._step_s
        while at < until:
            await asyncio.sleep(max(0.0, at - time.perf_counter()))
            now = time.perf_counter()
            self._figures.late_s += now - at
            previous = self._step(previous)
            at = now + self._step_s if now > at + self._step_s else at + self._step_s

    def _step(self, previous: StepResult | None) -> StepResult:
        """Launch a step, then report the one before."""
        rng, figures = self._rng, self._figures
        if rng.random() < SIZE_CHANGES:
            self._size = min(MAX_BATCH_SIZE, max(1, self._size + rng.choice((-1, 1))))
        num_kv_tokens = self._size * NUM_KV_PER_ROW
        choice = self._planner.decision()(self._size, num_kv_tokens)
        figures.num_steps += 1
        figures.num_held += choice.held
        self._count(choice)
        if previous is not None:
            held = previous.plan.choice
            self._planner.report(previous)
            if held is not None and held.held and held.bucket == choice.bucket:
                after = self._planner.decision()(self._size, num_kv_tokens)
                if not after.held and self._ended < 0:
                    self._ended, self._since = self._size, 1  # one is under way already
        return self._result(choice, num_kv_tokens)

    def _count(self, choice: Choice) -> None:
        if self._ended < 0:
            return
        self._since += 1
        if self._size != self._ended:
            self._ended = -1  # the next decision is for another batch
        elif choice.held:
            self._figures.lags[self._since] += 1
            self._ended = -1

    def _result(self, choice: Choice, num_kv_tokens: int) -> StepResult:
        context = Context(
            batch_size=self._size,
            num_kv_tokens=num_kv_tokens,
            num_prefill_tokens=0,
            num_waiting=0,
            num_free_blocks=1000,
            max_stale_tokens=0,
            sum_stale_tokens=0,
            draft_resident=True,
            cpu_utilization=0.0,
            feasible_max_gamma=MAX_GAMMA,
        )
        gamma = min(choice.gamma, MAX_GAMMA)
        plan = Plan(0, [], self._size, choice, gamma, context=context, possible_gamma=MAX_GAMMA)
        reached, accepted, rows = [], [], self._size
        for _ in range(gamma):
            reached.append(rows)
            rows = sum([self._rng.random() < ACCEPTANCE for _ in range(rows)])
            accepted.append(rows)
        step_us = round((3000 + 30 * self._size + 350 * gamma) * self._rng.lognormvariate(0, 0.1))
        emitted = self._size + sum(accepted)
        return StepResult(
            plan, [], step_us, num_emitted=emitted, reached=reached, accepted=accepted
        )


async def load(address: str, num_workers: int, steps_per_s: float, seconds: float) -> Figures:
    """Run the workers; figures of the second half, when bins have grown."""
    figures, until = Figures(), time.perf_counter() + seconds
    workers = [Worker(address, number, steps_per_s, figures) for number in range(num_workers)]
    clients = [asyncio.create_task(worker.client.run()) for worker in workers]
    try:
        running = asyncio.gather(*(worker.run(until) for worker in workers))
        await asyncio.sleep(seconds / 2)
        print("half", flush=True)  # whoever started this measures the planner from here on
        figures.__init__()  # type: ignore[misc]
        await running
    finally:
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    return figures


def percentile(lags: Counter[int], share: float) -> int:
    """Least lag that this share of the bins does not exceed; 0 without bins."""
    left = share * sum(lags.values())
    for lag, count in sorted(lags.items()):
        left -= count
        if left <= 0:
            return lag
    return 0


def main() -> None:
    """Run, and print a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--planner", required=True, metavar="ADDRESS")
    parser.add_argument("--workers", type=int, default=32)
    parser.add_argument("--steps-per-s", type=float, default=215, help="of each worker")
    parser.add_argument("--seconds", type=float, default=20, help="the first half warms up")
    options = parser.parse_args()
    log.configure("load")
    used = time.process_time()
    figures = asyncio.run(
        load(options.planner, options.workers, options.steps_per_s, options.seconds)
    )
    used = time.process_time() - used
    lags = figures.lags
    print(
        json.dumps(
            {
                "workers": options.workers,
                "steps_per_s": round(2 * figures.num_steps / options.seconds),
                "messages_per_s": round(2 * figures.num_messages / options.seconds),
                "bins": sum(lags.values()),
                "steps_to_next_decision": {
                    "p50": percentile(lags, 0.5),
                    "p99": percentile(lags, 0.99),
                    "p99.9": percentile(lags, 0.999),
                    "max": max(lags, default=0),
                },
                "held_share_of_steps": round(figures.num_held / max(1, figures.num_steps), 4),
                "load_generator_cores": round(used / options.seconds, 2),
                "mean_step_late_ms": round(1000 * figures.late_s / max(1, figures.num_steps), 3),
            }
        )
    )


if __name__ == "__main__":
    main()
