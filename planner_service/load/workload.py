"""What is asked and when: questions or lengths from data sets, and arrival processes, by seed."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nightjar.errors import ConfigError
from planner_service.simulate.arrivals import (
    ALPACA_LIKE,
    MAX_TOKENS,
    SHARE_GPT_LIKE,
    Arrivals,
    FixedLengths,
    Kind,
    Lengths,
    TraceLengths,
    read_trace,
)

DATA = "spec-bench:FILE, azure:FILE, mooncake:FILE, sharegpt-like, alpaca-like, fixed:PROMPT,OUTPUT"
ARRIVALS = "closed, poisson, burst, oscillation, trace, rates:RxS,RxS,..."
_CHUNK = 1024
# Short words, each of which most vocabularies hold as one token: so many words, about so many
# tokens, whatever the model. What the server counted is what is reported.
_TEXT = (
    "the of and to in is it that was for on are as with his they at be this from have or by one "
    "had not but what all were when we there can an your which their said if do will each about "
    "how up out them then she many some so these would other into has more her two like him see "
    "time could no make than first been its who now people my made over did down only way find "
    "use may water long little very after words called just where most know"
)
_WORDS = _TEXT.split()


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request of a workload."""

    index: int
    due_s: float  # after the start; 0 in a closed loop
    text: str
    is_chat: bool
    max_tokens: int
    category: str
    seed: int


@dataclass(frozen=True, kw_only=True)
class Questions:
    """Chat questions in the order of a shuffle; the same again after the last."""

    rows: tuple[tuple[str, str], ...]  # (category, text)
    max_tokens: int

    @property
    def name(self) -> str:
        """For people."""
        return f"{len(self.rows)} Spec-Bench questions, answers of {self.max_tokens} tokens"

    def asks(self, times: Iterator[float], seed: int) -> Iterator[Ask]:
        """One request for each time."""
        rows = list(self.rows)
        random.Random(seed).shuffle(rows)
        for index, (at, (category, text)) in enumerate(
            zip(times, itertools.cycle(rows), strict=False)
        ):
            yield Ask(
                index=index,
                due_s=at,
                text=text,
                is_chat=True,
                max_tokens=self.max_tokens,
                category=category,
                seed=seed + index,
            )


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Texts of common words with the lengths of a data set, cut to what the server takes."""

    lengths: Lengths
    max_prompt: int
    max_output: int

    @property
    def name(self) -> str:
        """For people."""
        return (
            f"{self.lengths.name}, prompts of common words cut at {self.max_prompt}, "
            f"outputs at {self.max_output}"
        )

    def asks(self, times: Iterator[float], seed: int) -> Iterator[Ask]:
        """One request for each time."""
        rng, words = np.random.default_rng([seed, 0x10AD]), random.Random(seed)
        for first in itertools.count(0, _CHUNK):
            prompts, outputs = self.lengths.draw(rng, first, _CHUNK)
            for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True), first):
                at = next(times, None)
                if at is None:
                    return
                yield Ask(
                    index=index,
                    due_s=at,
                    text=" ".join(words.choices(_WORDS, k=min(prompt, self.max_prompt))),
                    is_chat=False,
                    max_tokens=min(output, self.max_output),
                    category=self.lengths.name,
                    seed=seed + index,
                )


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Requests and their times; equal seeds give equal workloads."""

    content: Questions | Sizes
    arrivals: str
    rate: float
    trace: tuple[float, ...] = ()

    @property
    def is_closed(self) -> bool:
        """Whether a request comes when another one has ended."""
        return self.arrivals == "closed"

    @property
    def name(self) -> str:
        """For people."""
        rate = "" if self.is_closed or ":" in self.arrivals else f" x {self.rate:g}"
        return f"{self.content.name}; {self.arrivals}{rate}"

    def asks(self, seed: int) -> Iterator[Ask]:
        """Requests in order of time; of a trace as many as it has, else without end."""
        return self.content.asks(self._times(seed), seed)

    def _times(self, seed: int) -> Iterator[float]:
        rng = np.random.default_rng([seed, 0xA221])
        if self.arrivals.startswith("rates:"):
            yield from _by_rates(_phases(self.arrivals), rng)
            return
        kinds: dict[str, Kind] = {
            "closed": "closed",
            "poisson": "poisson",
            "burst": "burst",
            "oscillation": "oscillation",
            "trace": "azure",
        }
        arrivals = Arrivals(
            kind=kinds[self.arrivals],
            rate=self.rate,
            lengths=FixedLengths(1, 2),
            trace=self.trace,
        )
        for request in arrivals.requests(rng):
            yield request.arrived_at


def workload(
    data: str, arrivals: str, *, rate: float, max_prompt: int, max_output: int
) -> Workload:
    """Put a workload together.

    Args:
        data: One of `DATA`.
        arrivals: One of `ARRIVALS`.
        rate: poisson: requests per second; burst, oscillation, trace: factor on their speed.
        max_prompt: Tokens at which prompts are cut; questions are left as they are.
        max_output: Tokens at which answers are cut; the length of answers to questions.

    Raises:
        ConfigError: A name is unknown, or a file cannot be read.
    """
    kind, _, rest = data.partition(":")
    times: tuple[float, ...] = ()
    content: Questions | Sizes
    if kind == "spec-bench" and rest:
        content = Questions(rows=read_questions(rest), max_tokens=max_output)
    else:
        lengths, times = _lengths(data, kind, rest)
        content = Sizes(lengths=lengths, max_prompt=max_prompt, max_output=max_output)
    if arrivals.startswith("rates:"):
        _phases(arrivals)
    elif arrivals not in ("closed", "poisson", "burst", "oscillation", "trace"):
        raise ConfigError(f"--arrivals {arrivals[:64]!r}: must be one of {ARRIVALS}")
    if arrivals == "trace" and not times:
        raise ConfigError("--arrivals trace: needs --data azure:FILE or mooncake:FILE")
    return Workload(content=content, arrivals=arrivals, rate=rate, trace=times)


def _lengths(data: str, kind: str, rest: str) -> tuple[Lengths, tuple[float, ...]]:
    match kind:
        case "azure" if rest:
            return read_trace(rest)
        case "mooncake" if rest:
            return read_mooncake(rest)
        case "sharegpt-like" if not rest:
            return SHARE_GPT_LIKE, ()
        case "alpaca-like" if not rest:
            return ALPACA_LIKE, ()
        case "fixed" if match := re.fullmatch(r"([1-9][0-9]{0,5}),([1-9][0-9]{0,5})", rest):
            return FixedLengths(int(match[1]), int(match[2])), ()
    raise ConfigError(f"--data {data[:64]!r}: must be one of {DATA}")


def read_questions(path: str) -> tuple[tuple[str, str], ...]:
    """Category and first turn of each question of Spec-Bench's question.jsonl.

    Raises:
        ConfigError: It cannot be read; names the line.
    """
    found = []
    for number, row in _json_lines(path):
        try:
            found.append((str(row["category"]), str(row["turns"][0])))
        except (KeyError, IndexError, TypeError):
            raise ConfigError(f"{path}: line {number}: has no category and turns") from None
    return tuple(found)


def read_mooncake(path: str) -> tuple[TraceLengths, tuple[float, ...]]:
    """Lengths and arrivals of a Mooncake trace; which prefixes requests share is left out.

    Raises:
        ConfigError: It cannot be read; names the line.
    """
    rows = []
    for number, row in _json_lines(path):
        try:
            at, prompt, output = (
                int(row[key]) for key in ("timestamp", "input_length", "output_length")
            )
            if not (0 <= prompt <= MAX_TOKENS and 0 <= output <= MAX_TOKENS):
                raise ValueError
        except (KeyError, TypeError, ValueError):
            problem = "needs timestamp, input_length and output_length"
            raise ConfigError(f"{path}: line {number}: {problem}") from None
        rows.append((at / 1000, max(1, prompt), max(1, output)))
    rows.sort(key=lambda row: row[0])
    lengths = TraceLengths(Path(path).stem, [row[1] for row in rows], [row[2] for row in rows])
    return lengths, tuple(row[0] - rows[0][0] for row in rows)


def _json_lines(path: str) -> list[tuple[int, dict[str, Any]]]:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        found = [(i, json.loads(line)) for i, line in enumerate(lines, 1) if line.strip()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    if not found or not all(isinstance(row, dict) for _, row in found):
        raise ConfigError(f"{path}: must hold a JSON object a line")
    return found


def _phases(text: str) -> list[tuple[float, float]]:
    """(requests per second, seconds) of each phase of "rates:5x20,30x10"."""
    found = []
    for part in text.removeprefix("rates:").split(","):
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)x([0-9]+(?:\.[0-9]+)?)", part)
        if match is None or float(match[2]) <= 0:
            raise ConfigError(f"--arrivals {text[:64]!r}: {part[:32]!r} is not RATExSECONDS")
        found.append((float(match[1]), float(match[2])))
    if not any(rate for rate, _ in found):
        raise ConfigError(f"--arrivals {text[:64]!r}: no phase has requests")
    return found


def _by_rates(phases: list[tuple[float, float]], rng: np.random.Generator) -> Iterator[float]:
    """Poisson arrivals whose rate goes through the phases, over and over."""
    begin = 0.0
    for rate, seconds in itertools.cycle(phases):
        at = begin
        while rate and (at := at + float(rng.exponential(1 / rate))) < begin + seconds:
            yield at
        begin += seconds
