"""When the draft should leave and return: a sweep of the memory agent's thresholds.

    python benchmarks/memory_thresholds.py

A worker is modelled in ticks of 10 ms, one pressure report each: 7.6B Qwen2 shape with a 0.5B draft
on a small card. Step times are those measured on an H200 (`benchmarks/RESULTS.md`), the draft adds
tokens at small batches, the reload takes its time and the draft then catches up. The agent is the
real one. Each setting runs on loads that press in different ways; what counts is the mean time that
requests take, as a share of the best setting's on that load, and how often the draft went round.

The default sweep, 82 settings, takes about eight minutes of one core: half a second for each run
of 120 s. The table comes at the end; until then standard error says how far it is.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
import sys
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from memory_agent.agent import Agent, Pressure, Request, Residency, Thresholds

TICK_S = 0.01
BASE, EXTRA = 3_500, 1_750  # blocks: the draft's KV and weights are half as many as the head
BLOCK = 16
# Seconds of a step by rows; tokens that a row gets of one while the draft is used.
STEP_S = [(1, 0.0042), (32, 0.0049), (64, 0.0054), (128, 0.0062), (256, 0.0092)]
DRAFTED_S = [(1, 0.0072), (32, 0.0086), (64, 0.0112), (96, 0.0150), (128, 0.0190)]
TOKENS = 2.2  # of a drafting row's step
MOST_ROWS, PREFILL_RATE = 256, 40_000.0  # rows; tokens a second
RELOAD_S = 0.25  # from the grant of the first copy to RESIDENT
CATCH_UP_RATE = 150_000.0  # tokens a second, while nothing else runs


@dataclass
class Row:
    """A request."""

    arrived_s: float
    prompt: int
    answer: int
    done: float = 0.0  # tokens
    left_to_prefill: float = 0.0

    @property
    def num_blocks(self) -> int:
        """That it has, with room for what follows."""
        return math.ceil((self.prompt + self.done + 1) / BLOCK)


Load = Callable[[float], float]  # seconds -> requests a second


def bursts(t: float) -> float:
    """Twenty seconds of too much, forty of little."""
    return 75.0 if t % 60 < 20 else 12.0


def spikes(t: float) -> float:
    """Two seconds of far too much in every fifteen."""
    return 150.0 if t % 15 < 2 else 18.0


def waves(t: float) -> float:
    """Rises and falls in two minutes."""
    return 32.0 + 26.0 * math.sin(t * 2 * math.pi / 120)


def hovers(t: float) -> float:
    """Just about what fills the head."""
    return 40.0


def steady(t: float) -> float:
    """More than the head holds, all the time."""
    return 47.0


def long(t: float) -> float:
    """A burst, then few requests whose long prompts fill two thirds of the head."""
    return 75.0 if t < 15 else 3.4


LOADS: dict[str, Load] = {f.__name__: f for f in (bursts, spikes, waves, hovers, steady, long)}
PROMPTS, LONG_PROMPTS = (64, 256, 768), (5_000, 6_000, 7_000)  # tokens, of equal chances


@dataclass
class Outcome:
    """What became of one run."""

    mean_s: float  # of requests that ended
    num_expansions: int
    num_contractions: int
    num_preemptions: int


def run(thresholds: Thresholds, load: Load, seconds: float, seed: int) -> Outcome:
    """Serve a load with an agent that decides."""
    world = _World(thresholds, load, seed)
    for tick in range(round(seconds / TICK_S)):
        world.tick(tick * TICK_S)
    lasted = [*world.lasted, *(seconds - row.arrived_s for row in world.rows)]
    lasted += [seconds - row.arrived_s for row in world.waiting]
    agent = world.agent
    return Outcome(
        statistics.mean(lasted), agent.num_expansions, agent.num_contractions, world.num_preemptions
    )


class _World:
    def __init__(self, thresholds: Thresholds, load: Load, seed: int) -> None:
        self.agent = Agent(
            thresholds,
            num_base_blocks=BASE,
            num_extra_blocks=EXTRA,
            residency=Residency.RESIDENT,
        )
        self.load, self.rng = load, random.Random(seed)
        self.waiting: deque[Row] = deque()
        self.rows: list[Row] = []
        self.lasted: list[float] = []
        self.num_preemptions = 0
        self.residency = Residency.RESIDENT
        self.back_at_s = 0.0
        self.num_stale = 0.0  # tokens that the draft has to catch up
        self.next_s = 0.0
        self.request: Request | None = None

    def tick(self, now: float) -> None:
        while self.next_s <= now:
            rng = self.rng
            prompts = LONG_PROMPTS if self.load is long and now >= 15 else PROMPTS
            self.waiting.append(Row(now, rng.choice(prompts), rng.choice([64, 256, 384])))
            self.next_s += rng.expovariate(self.load(now))
        if self.residency is Residency.RELOADING and now >= self.back_at_s:
            assert self.request is not None
            self.residency, self.num_stale = (
                Residency.RESIDENT,
                sum(row.prompt + row.done for row in self.rows),
            )
            self.agent.on_done(self.request.request_id, self.residency, now)
        total = BASE + (EXTRA if self.residency is Residency.OFFLOADED else 0)
        free = self._admit(total)
        exploit = 3 if len(self.rows) < 96 else 0
        self._step(now, total, exploit)
        self._report(now, free, total, exploit)

    def _admit(self, total: int) -> int:
        free = total - sum(row.num_blocks for row in self.rows)
        while self.waiting and len(self.rows) < MOST_ROWS:
            row = self.waiting[0]
            if row.num_blocks + len(self.rows) > free:
                break
            self.rows.append(self.waiting.popleft())
            row.left_to_prefill = row.prompt + row.done
            free -= row.num_blocks
        return free

    def _step(self, now: float, total: int, exploit: int) -> None:
        left = TICK_S
        for row in self.rows:
            if row.left_to_prefill and left > 0:
                spent = min(row.left_to_prefill, left * PREFILL_RATE)
                row.left_to_prefill -= spent
                left -= spent / PREFILL_RATE
        decoding = [row for row in self.rows if not row.left_to_prefill]
        drafts = exploit and self.residency is Residency.RESIDENT
        if drafts and self.num_stale > 0 and left > 0:
            spent = min(self.num_stale, left * CATCH_UP_RATE)
            self.num_stale -= spent
            left -= spent / CATCH_UP_RATE
        rate = 0.0
        if decoding:
            step = _at(DRAFTED_S if drafts else STEP_S, len(decoding))
            rate = (TOKENS if drafts else 1.0) / step
        if not drafts:
            self.num_stale += rate * left * len(decoding)
        for row in decoding:
            row.done += rate * left
        ended = [row for row in decoding if row.done >= row.answer]
        self.lasted += [now + TICK_S - row.arrived_s for row in ended]
        self.rows = [row for row in self.rows if row.done < row.answer]
        while self.rows and sum(row.num_blocks for row in self.rows) > total:
            self.waiting.appendleft(self.rows.pop())
            self.num_preemptions += 1

    def _report(self, now: float, free: int, total: int, exploit: int) -> None:
        request = self.agent.on_pressure(
            Pressure(
                num_free_blocks=max(0, min(free, total)),
                num_total_blocks=total,
                num_waiting=len(self.waiting),
                exploit_gamma=exploit,
                residency=self.residency,
            ),
            now,
        )
        if request is None:
            return
        self.request = request
        if request.kind == "expand":
            self.residency = Residency.OFFLOADED
            self.agent.on_done(request.request_id, self.residency, now)
        else:
            self.residency, self.back_at_s = Residency.RELOADING, now + RELOAD_S
            self.agent.on_load_granted()
            self.agent.on_load_answered(ok=True)


def _at(points: Sequence[tuple[int, float]], count: int) -> float:
    """Between two measured points in a straight line; above the last one in proportion."""
    index = bisect_left(points, (count, 0.0))
    if index == 0:
        return points[0][1]
    if index == len(points):
        return points[-1][1] * count / points[-1][0]
    (x0, y0), (x1, y1) = points[index - 1], points[index]
    return y0 + (y1 - y0) * (count - x0) / (x1 - x0)


def main() -> int:
    """Sweep and print the settings, best first."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--seconds", type=float, default=120, help="of each run")
    add("--seeds", type=int, default=2, help="runs of each load")
    add("--tau-low", type=float, nargs="+", default=[0.03, 0.1, 0.2])
    add("--tau-high", type=float, nargs="+", default=[0.0, 0.2, 0.4])
    add("--t-persist", type=int, nargs="+", default=[1, 3, 10])
    add("--hold-s", type=float, nargs="+", default=[0.0, 2.0, 10.0])
    options = parser.parse_args()
    settings = list(
        itertools.product(options.tau_low, options.tau_high, options.t_persist, options.hold_s)
    )
    settings.insert(0, (0.0, 0.0, 1, 0.0))
    runs: dict[tuple[float, ...], dict[str, list[Outcome]]] = {}
    began = time.monotonic()
    for number, (low, high, persist, hold) in enumerate(settings, 1):
        thresholds = Thresholds(
            tau_low=low, tau_high=high, t_persist=persist, hold_s=hold, backoff_s=1.0
        )
        runs[low, high, persist, hold] = {
            name: [run(thresholds, load, options.seconds, seed) for seed in range(options.seeds)]
            for name, load in LOADS.items()
        }
        spent = time.monotonic() - began
        left = spent / number * (len(settings) - number)
        told = f"{number} of {len(settings)} settings in {spent:.0f} s, about {left:.0f} s left"
        print(told, file=sys.stderr, flush=True)
    best = {
        name: min(statistics.mean(o.mean_s for o in found[name]) for found in runs.values())
        for name in LOADS
    }
    print("tau_low tau_high t_persist hold_s  mean over best   worst  " + "  ".join(LOADS))
    lines = []
    for setting, found in runs.items():
        over = {
            name: statistics.mean(o.mean_s for o in outcomes) / best[name]
            for name, outcomes in found.items()
        }
        trips = {name: sum(o.num_expansions for o in found[name]) for name in LOADS}
        cells = "  ".join(f"{over[name]:.2f} ({trips[name]})" for name in LOADS)
        mean = statistics.mean(over.values())
        low, high, persist, hold = setting
        text = f"{low:7.2f} {high:8.2f} {persist:9} {hold:6.1f}  {mean:14.3f}"
        lines.append((mean, f"{text} {max(over.values()):7.2f}  {cells}"))
    for _, line in sorted(lines):
        print(line)
    print("tau_low 0 never expands; in brackets the expansions of all runs of a load")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
