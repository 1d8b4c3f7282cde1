"""Requests and when they come: a closed loop, Poisson, bursts, or a trace from a file."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import count, cycle
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from nightjar.errors import ConfigError

_CHUNK = 4096
ENDLESS = 10**6  # output tokens from which a row never ends in a run
MAX_TOKENS = ENDLESS - 1  # of a request in a trace
_SIGMA, _MOST = 0.8, 2048


@dataclass(slots=True, eq=False)
class Request:
    """A request and what became of it; times in simulated seconds."""

    arrived_at: float
    num_prompt_tokens: int
    num_output_tokens: int
    uniform: float  # draws its class
    request_class: int = 0
    num_emitted: int = 0  # up to its last preemption; while it runs the row counts
    first_token_at: float = -1.0


Pairs = tuple[list[int], list[int]]  # prompts, outputs


class Lengths(Protocol):
    """Lengths of requests."""

    name: str
    mean_prompt: float
    mean_output: float
    most: int  # tokens of a request, those of an endless output aside

    def draw(self, rng: np.random.Generator, first: int, number: int) -> Pairs:
        """Prompt and output tokens of requests [first, first + number), each at least 1."""
        ...


class LognormalLengths:
    """Lognormal lengths with a data set's means, cut at 2,048 tokens.

    The spread is a guess, and the texts, hence the acceptance, are not the data set's.
    """

    most = 2 * _MOST

    def __init__(self, data_set: str, mean_prompt: float, mean_output: float) -> None:
        self.name = f"{data_set}-like lengths"
        self.mean_prompt, self.mean_output = mean_prompt, mean_output

    def draw(self, rng: np.random.Generator, first: int, number: int) -> Pairs:
        """Prompt and output tokens of requests [first, first + number), each at least 1."""
        prompts, outputs = (
            np.clip(rng.lognormal(math.log(mean) - _SIGMA**2 / 2, _SIGMA, number), 1, _MOST)
            for mean in (self.mean_prompt, self.mean_output)
        )
        return prompts.astype(int).tolist(), outputs.astype(int).tolist()


# Means of the vLLM paper's figure 11 (arXiv 2309.06180).
SHARE_GPT_LIKE = LognormalLengths("ShareGPT", 161.3, 338.0)
ALPACA_LIKE = LognormalLengths("Alpaca", 19.3, 58.5)


class FixedLengths:
    """The same lengths for all requests; from `ENDLESS` on an output has no end."""

    def __init__(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        ends = num_output_tokens < ENDLESS
        output = str(num_output_tokens) if ends else "endless"
        self.name = f"prompts of {num_prompt_tokens} tokens, outputs {output}"
        self.mean_prompt = float(num_prompt_tokens)
        self.mean_output = float(num_output_tokens) if ends else math.inf
        self.most = num_prompt_tokens + (num_output_tokens if ends else 0)
        # What no run of any length emits stands for no end.
        self._pair = num_prompt_tokens, num_output_tokens if ends else 10**15

    def draw(self, rng: np.random.Generator, first: int, number: int) -> Pairs:
        """Prompt and output tokens of requests [first, first + number)."""
        prompt, output = self._pair
        return [prompt] * number, [output] * number


class TraceLengths:
    """Lengths of a trace, in its order."""

    def __init__(self, name: str, prompts: Sequence[int], outputs: Sequence[int]) -> None:
        self.name = f"lengths of {name}"
        self.mean_prompt = sum(prompts) / len(prompts)
        self.mean_output = sum(outputs) / len(outputs)
        self.most = max(map(sum, zip(prompts, outputs, strict=True)))
        self._pairs = list(zip(prompts, outputs, strict=True))

    def draw(self, rng: np.random.Generator, first: int, number: int) -> Pairs:
        """Prompt and output tokens of requests [first, first + number); the trace goes round."""
        drawn = [self._pairs[i % len(self._pairs)] for i in range(first, first + number)]
        return [p for p, _ in drawn], [o for _, o in drawn]


Kind = Literal["closed", "poisson", "burst", "oscillation", "azure"]
# (requests per second, requests, burstiness) of Nightjar's stress traces; a burstiness below 1
# means gamma-distributed gaps of that shape, as in vLLM's benchmark: 1 is Poisson.
PATTERNS: dict[str, tuple[tuple[float, int, float], ...]] = {
    "burst": ((2, 30, 1.0), (8, 40, 0.9), (24, 80, 0.5), (40, 120, 0.35), (6, 40, 1.2)),
    "oscillation": ((4, 30, 1.1), (28, 30, 0.7)) * 3,
}


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """When requests come, and how long they are."""

    kind: Kind = "closed"
    rows: int = 64  # closed: requests that are there at any time
    rate: float = 10.0  # poisson: requests per second; others: factor on the pattern's speed
    lengths: Lengths = SHARE_GPT_LIKE
    trace: tuple[float, ...] = ()  # azure: seconds from the first request

    def requests(self, rng: np.random.Generator) -> Iterator[Request]:
        """Requests in order of time; of a closed loop each comes when one has ended."""
        times = self._times(rng)
        for first in count(0, _CHUNK):
            prompts, outputs = self.lengths.draw(rng, first, _CHUNK)
            uniforms = rng.random(_CHUNK).tolist()
            for prompt, output, uniform in zip(prompts, outputs, uniforms, strict=True):
                at = next(times, None)
                if at is None:
                    return
                yield Request(at, prompt, output, uniform)

    def _times(self, rng: np.random.Generator) -> Iterator[float]:
        if self.kind == "closed":
            while True:
                yield 0.0
        if self.kind == "azure":
            yield from (at / self.rate for at in self.trace)
            return
        now = 0.0
        phases = PATTERNS.get(self.kind, ((1.0, _CHUNK, 1.0),))
        for rate, number, burstiness in cycle(phases):
            gap = 1 / (rate * self.rate * burstiness)
            for wait in rng.gamma(burstiness, gap, number).tolist():
                now += wait
                yield now


def read_trace(path: str) -> tuple[TraceLengths, tuple[float, ...]]:
    """Read a trace with the header TIMESTAMP,ContextTokens,GeneratedTokens (Azure's).

    Raises:
        ConfigError: It cannot be read; names the line.
    """
    times: list[float] = []
    prompts: list[int] = []
    outputs: list[int] = []
    line = 0
    try:
        with Path(path).open(newline="") as file:
            rows = csv.reader(file)
            header = next(rows, [])
            if header != ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]:
                raise ValueError("the header must be TIMESTAMP,ContextTokens,GeneratedTokens")
            for at, prompt, output in rows:
                line = rows.line_num
                times.append(datetime.fromisoformat(at[:26]).timestamp())
                prompts.append(_tokens(prompt))
                outputs.append(_tokens(output))
    except OSError as error:
        raise ConfigError(f"trace {path}: cannot be read ({error.strerror})") from None
    except (ValueError, csv.Error) as error:
        raise ConfigError(f"trace {path}: after line {line}: {error}") from None
    if not times:
        raise ConfigError(f"trace {path}: holds no requests")
    order = sorted(range(len(times)), key=times.__getitem__)
    lengths = TraceLengths(
        Path(path).stem, [prompts[i] for i in order], [outputs[i] for i in order]
    )
    return lengths, tuple(times[i] - times[order[0]] for i in order)


def _tokens(text: str) -> int:
    number = int(text)
    if not 0 <= number <= MAX_TOKENS:
        raise ValueError(f"{number} is no count of tokens")
    return max(1, number)
