"""Speculation-aware placement against least loaded, simulated on measured step times of a GPU.

Two workers run batches whose steps take what the file of `--costs` says; each uses, as a learned
planner would, the gamma that emits most tokens a second at its batch. The policies are the
gateway's own and see statuses 200 ms old at most, with what was sent and ended since.
"""

from __future__ import annotations

import argparse
import heapq
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np

if sys.path[0] == str(Path(__file__).parent):
    del sys.path[0]  # where gateway.py would stand before the gateway itself

from gateway.registry import Status, smoothed_gamma
from gateway.router import Routing, choose, make_policy
from gateway.routing.facts import Policy, RequestFacts, WorkerLoad

COSTS = Path(__file__).parent / "raw" / "gpu_decode-5f54eb2.json"
PROBE_S, MEAN_THINK_S, IDLE_S, WARM_UP_S = 0.2, 0.5, 0.001, 5.0
POLICIES: tuple[Routing, Routing] = ("least_loaded", "speculation_aware")
MEAN_TOKENS, NUM_BLOCKS = 200, 32768
LOADS = (16, 64, 128, 192, 224, 256, 288, 320, 352, 384, 416, 448, 512)  # clients
FLEETS = {  # acceptance on each worker; None: no draft
    "alike .5": (0.5, 0.5),
    "alike .7": (0.7, 0.7),
    "alike .9": (0.9, 0.9),
    ".8 and .3": (0.8, 0.3),
    ".7 and no draft": (0.7, None),
}


class Costs:
    """Step time and tokens of a row's step, by batch and gamma."""

    def __init__(self, file: Path, acceptance: float | None) -> None:
        self.max_gamma = 0 if acceptance is None else 5
        found = json.loads(file.read_text())["spec"]["exact+draft"]
        self._batches = sorted(int(batch) for batch in found)
        self._step_s = {
            gamma: [found[str(batch)][str(gamma)]["step_ms"] / 1000 for batch in self._batches]
            for gamma in range(self.max_gamma + 1)
        }
        self._tokens = {g: sum((acceptance or 0) ** i for i in range(g + 1)) for g in self._step_s}
        self._memo: dict[int, tuple[int, float, float]] = {}

    def best(self, batch: int) -> tuple[int, float, float]:
        """Gamma that is fastest at `batch`, its step in seconds, and tokens of a row in it."""
        if batch not in self._memo:
            times = {g: self._time(batch, g) for g in self._step_s}
            gamma = max(times, key=lambda g: self._tokens[g] / times[g])
            self._memo[batch] = (gamma, times[gamma], self._tokens[gamma])
        return self._memo[batch]

    def _time(self, batch: int, gamma: int) -> float:
        """Between measured batches on the line; beyond the last, as the last two go on."""
        low, high = self._batches[-2:]
        at_low, at_high = self._step_s[gamma][-2:]
        if batch > high:
            slope = (at_high - at_low) / (high - low)
            return float(at_high + (batch - high) * slope)
        return float(np.interp(batch, self._batches, self._step_s[gamma]))


class Worker:
    """Rows that decode together, and what the gateway last heard of them."""

    def __init__(self, address: str, costs: Costs) -> None:
        self.address = address
        self.costs = costs
        self.left = np.zeros(0)  # tokens that each row still has to emit
        self.num_stepping = 0  # rows in the step in progress; those after them wait for the next
        self.ends_at = 0.0  # when that step ends
        self.gamma, self.tokens = 0, 0.0  # of that step; tokens are those of a row
        self.num_dispatched = 0
        self.status = Status()
        self.smoothed: float | None = None

    def probe(self) -> None:
        """Let the gateway know the state of now."""
        self.status = Status(num_running=len(self.left), gamma=self.gamma)
        self.num_dispatched = 0
        self.smoothed = smoothed_gamma(self.smoothed, self.status)

    def step(self, now: float) -> tuple[float, int]:
        """End the step in progress and begin the next; returns tokens emitted and rows ended."""
        emitted = self.num_stepping * self.tokens
        self.left[: self.num_stepping] -= self.tokens
        num_ended = int((self.left <= 0).sum())
        self.left = self.left[self.left > 0]
        self.num_dispatched -= num_ended
        self.num_stepping = len(self.left)
        step_s = IDLE_S
        if self.num_stepping:
            self.gamma, step_s, self.tokens = self.costs.best(self.num_stepping)
        self.ends_at = now + step_s
        return emitted, num_ended

    @property
    def load(self) -> WorkerLoad:
        """The router's view."""
        return WorkerLoad(
            address=self.address,
            model="m",
            ready=True,
            num_waiting=0,
            num_running=self.status.num_running,
            num_dispatched=self.num_dispatched,
            num_free_blocks=0,
            num_total_blocks=NUM_BLOCKS,
            max_gamma=self.costs.max_gamma,
            gamma=self.smoothed,
            planner_connected=True,
        )


def simulate(
    fleet: list[Costs], policy: Policy, num_clients: int, seconds: float, seed: int
) -> float:
    """Tokens a second to clients that ask, read an answer of random length, think, ask again."""
    rng = np.random.default_rng(seed)
    workers = {name: Worker(name, costs) for name, costs in zip("ab", fleet, strict=True)}
    asks_at = list(rng.exponential(MEAN_THINK_S, num_clients))  # of the clients that think
    heapq.heapify(asks_at)
    next_probe, emitted = 0.0, 0.0
    while True:
        worker = min(workers.values(), key=lambda w: w.ends_at)
        now = worker.ends_at
        if now > WARM_UP_S + seconds:
            return emitted / seconds
        while next_probe <= now:
            for each in workers.values():
                each.probe()
            next_probe += PROBE_S
        while asks_at and asks_at[0] <= now:
            heapq.heappop(asks_at)
            loads = [each.load for each in workers.values()]
            chosen = choose(policy, RequestFacts(), loads, model="", excluded=())
            assert chosen is not None
            target = workers[chosen.address]
            target.left = np.append(target.left, rng.exponential(MEAN_TOKENS))
            target.num_dispatched += 1
        tokens, num_ended = worker.step(now)
        emitted += tokens * (now > WARM_UP_S)
        for thought in rng.exponential(MEAN_THINK_S, num_ended):
            heapq.heappush(asks_at, now + thought)


def main() -> None:
    """Print, as JSON, tokens a second of each policy and their ratio, paired by seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--costs", type=Path, default=COSTS)
    parser.add_argument("--load-factor", type=float, default=1.25)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    given = parser.parse_args()
    least, aware = (make_policy(name, given.load_factor) for name in POLICIES)
    result: dict[str, Any] = {}
    for name, acceptances in FLEETS.items():
        fleet = [Costs(given.costs, acceptance) for acceptance in acceptances]
        for num_clients in LOADS:
            pairs = [
                [
                    simulate(fleet, policy, num_clients, given.seconds, seed)
                    for policy in (least, aware)
                ]
                for seed in range(given.first_seed, given.first_seed + given.seeds)
            ]
            ratios = [b / a for a, b in pairs]
            result[f"{name}, {num_clients} clients"] = {
                "least_loaded tok_s": round(statistics.median(a for a, _ in pairs)),
                "aware over least_loaded": [
                    round(value, 3)
                    for value in (statistics.median(ratios), min(ratios), max(ratios))
                ],
            }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
