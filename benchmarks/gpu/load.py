"""What engines are asked: random prompts, and a trace's arrivals; and how late answers were."""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

Arrival = tuple[float, int, int]  # due in seconds, tokens of the prompt, tokens of the answer


def prompts(count: int, length: int, *, vocab: int, seed: int) -> list[list[int]]:
    """Random token ids, the same for every engine; special ids are left out."""
    rng = random.Random(seed)
    return [[rng.randrange(256, vocab) for _ in range(length)] for _ in range(count)]


def read_trace(path: Path) -> list[Arrival]:
    """Rows of an Azure LLM inference trace: seconds since the first, prompt and answer tokens."""
    with path.open(newline="") as file:
        rows = [
            (datetime.fromisoformat(row["TIMESTAMP"][:26]), row) for row in csv.DictReader(file)
        ]
    begin = rows[0][0]
    return [
        ((at - begin).total_seconds(), int(row["ContextTokens"]), int(row["GeneratedTokens"]))
        for at, row in rows
    ]


def arrivals(
    trace: Sequence[Arrival], *, rate: float, seconds: float, max_len: int
) -> list[Arrival]:
    """The trace's first requests, as many as `rate` gives in `seconds`, squeezed into them.

    Bursts stay as they are relative to the mean. Lengths are cut to what fits `max_len`: the
    answer to half of it, the prompt to the rest.
    """
    count = min(len(trace), max(2, round(rate * seconds)))
    taken = trace[:count]
    squeeze = (count / rate) / max(taken[-1][0], 1e-9)
    found = []
    for at, prompt, answer in taken:
        num_answer = max(1, min(answer, max_len // 2))
        found.append((at * squeeze, max(1, min(prompt, max_len - num_answer)), num_answer))
    return found


@dataclass
class Latencies:
    """Times of the requests of one open-loop run; more than one in a hundred late fails it."""

    due: list[float]
    limit_s: float
    first: dict[int, float] = field(default_factory=dict)
    last: dict[int, float] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)

    def add(self, index: int, count: int, now: float) -> None:
        """Request `index` got `count` tokens."""
        self.first.setdefault(index, now)
        self.last[index] = now
        self.tokens[index] = self.tokens.get(index, 0) + count

    @property
    def complete(self) -> bool:
        """Whether every request has a first token."""
        return len(self.first) == len(self.due)

    def num_late(self, now: float) -> int:
        """Requests whose first token came, or is still to come, after the limit."""
        return sum(
            self.first.get(index, now) - due > self.limit_s for index, due in enumerate(self.due)
        )

    def failed(self, now: float) -> bool:
        """True once the 99th percentile cannot stay within the limit any more."""
        return self.num_late(now) > len(self.due) // 100

    def summary(self, now: float) -> dict[str, float | bool | int]:
        """Percentiles in seconds, of what has been seen."""
        ttft = sorted(at - self.due[index] for index, at in self.first.items())
        tpot = sorted(
            (self.last[index] - self.first[index]) / (count - 1)
            for index, count in self.tokens.items()
            if count > 1
        )
        found: dict[str, float | bool | int] = {
            "passed": self.complete and not self.failed(now),
            "num_requests": len(self.due),
            "num_first_tokens": len(ttft),
        }
        for name, values in (("ttft", ttft), ("tpot", tpot)):
            for share in (50, 90, 99):
                found[f"{name}_p{share}_s"] = round(percentile(values, share), 5)
        return found


def percentile(ordered: Sequence[float], share: float) -> float:
    """Nearest rank; NaN of nothing."""
    if not ordered:
        return math.nan
    return ordered[max(0, math.ceil(len(ordered) * share / 100) - 1)]


def highest_rate(
    passes: Callable[[float], bool], *, start: float, runs: int, factor: float = 1.5
) -> float:
    """Highest rate seen to pass: brackets by `factor`, then halves in logarithms; 0 if none."""
    low, high, rate = 0.0, math.inf, start
    for _ in range(runs):
        if passes(rate):
            low = max(low, rate)
        else:
            high = min(high, rate)
        if math.isinf(high):
            rate = low * factor
        else:
            rate = math.sqrt(low * high) if low else high / factor
    return low
