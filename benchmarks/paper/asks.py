"""Requests of a slice: the same for every arm, by section, pass and seed alone."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from paper.design import Design
from planner_service.load.workload import read_questions
from planner_service.simulate.arrivals import PATTERNS
from worker.text.chat_template import Chat, Message
from worker.text.tokenizer import Tokenizer

# For --tiny, which has no questions: a few of each of three kinds.
EXAMPLES = (
    ("translation", "Translate into German: the river is long and the boat is small."),
    ("translation", "Translate into French: my sister reads a book every week."),
    ("summarization", "Summarise: it rained all day, the road was closed, and nobody came."),
    ("summarization", "Summarise: the shop opens at nine and sells bread, milk and eggs."),
    ("math_reasoning", "Anna has 12 apples and gives away a third. How many are left?"),
    ("math_reasoning", "A train takes 3 hours for 240 km. How fast is it?"),
)


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A question as the engine gets it."""

    category: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request; `due_s` after the start of its slice."""

    prompt: Prompt
    seed: int
    due_s: float = 0.0
    share: float = 1.0  # of the design's most tokens, at which its answer is cut


def load_prompts(spec_bench: str, tokenizer: Tokenizer, design: Design) -> list[Prompt]:
    """Questions as chats, those aside that are too long; without a file a few examples."""
    rows = read_questions(spec_bench) if spec_bench else EXAMPLES
    found = []
    for category, text in rows:
        if tokenizer.has_chat_template:
            ids = tokenizer.encode_chat(Chat([Message("user", text)]))
        else:
            ids = tokenizer.encode(text)[: design.max_prompt]
        if len(ids) <= design.max_prompt:
            found.append(Prompt(category=category, token_ids=tuple(ids)))
    return found


def endless(prompts: list[Prompt], seed: str) -> Iterator[Ask]:
    """All prompts in the order of a shuffle, then of another one, for ever."""
    rng = random.Random(seed)
    while True:
        for prompt in rng.sample(prompts, len(prompts)):
            yield Ask(prompt=prompt, seed=rng.getrandbits(48))


def amid(asks: Iterator[Ask], num_rows: int, seed: str) -> Iterator[Ask]:
    """The same requests, of which the first rows' worth are cut short, each elsewhere.

    So a closed loop is from its start as it goes on: rows end, and prompts come, all the time.
    """
    shares = [(i + 0.5) / num_rows for i in range(num_rows)]
    random.Random(seed).shuffle(shares)
    for share in shares:
        yield replace(next(asks), share=share)
    yield from asks


def trace(prompts: list[Prompt], name: str, *, peak: float, seconds: float, seed: str) -> list[Ask]:
    """Requests of a trace.

    Args:
        prompts: What they ask.
        name: "poisson …", or a stress pattern: its rates are scaled so that the
            highest is `peak`, its phases so that they last `seconds` together.
        peak: Requests per second; of a Poisson trace the rate.
        seconds: Until the last arrival.
        seed: Of times and questions.
    """
    times = times_of(name, peak=peak, seconds=seconds, seed=seed)
    asks = itertools.islice(endless(prompts, seed), len(times))
    return [
        Ask(prompt=ask.prompt, seed=ask.seed, due_s=at) for ask, at in zip(asks, times, strict=True)
    ]


def times_of(name: str, *, peak: float, seconds: float, seed: str) -> list[float]:
    """Seconds of the arrivals of `trace`."""
    rng = np.random.default_rng(list(seed.encode()))
    pattern = PATTERNS.get(name, ((1.0, 1, 1.0),))
    highest = max(rate for rate, _, _ in pattern)
    stretch = seconds / sum(number / rate for rate, number, _ in pattern)
    found, begin = [], 0.0
    for rate, number, burstiness in pattern:
        end = begin + number / rate * stretch
        gap = highest / (rate * peak * burstiness)
        at = begin
        while (at := at + float(rng.gamma(burstiness, gap))) < end:
            found.append(at)
        begin = end
    return found or [0.0]


def digest(asks: list[Ask]) -> str:
    """A few characters that differ where requests do, so that pooled runs can be told apart."""
    words = json.dumps([(a.due_s, a.seed, len(a.prompt.token_ids)) for a in asks])
    return hashlib.sha256(words.encode()).hexdigest()[:12]
