"""Processors against a plain reference, to the bit, over rows, draft positions and rollbacks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_processors import plain_logits

from worker.messages import SamplingParams
from worker.sampling import sample
from worker.sampling.processors import Processors, Span, is_asked, process

VOCAB_SIZE = 12
TOKENS = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=8)
LOGITS = st.sampled_from([0.0, -0.0, 1.5, -2.25, 3.3, -7.1, 0.1, 40.0, -np.inf, 1e-3])


def params(**fields: object) -> SamplingParams:
    """Greedy, with a seed and max_tokens filled in."""
    defaults = {"temperature": 0.0, "seed": 1, "max_tokens": 9}
    return SamplingParams(**{**defaults, **fields})  # type: ignore[arg-type]


@dataclass
class Row:
    """A request with a history, and the drafts of a step."""

    params: SamplingParams
    prompt: list[int]
    output: list[int]
    rejected: list[int]
    drafts: list[int]
    stops: list[int]
    num_lines: int


@st.composite
def rows(draw: st.DrawFn) -> Row:
    """Any request; the target's spans begin before all drafts, a draft's after some."""
    bias = draw(st.dictionaries(st.integers(0, VOCAB_SIZE - 1), st.floats(-9, 9), max_size=3))
    asked = params(
        repetition_penalty=draw(st.sampled_from([1.0, 1.1, 0.4, 2.0])),
        presence_penalty=draw(st.sampled_from([0.0, 0.3, -2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.7, -0.1])),
        logit_bias=tuple(sorted(bias.items())),
        min_tokens=draw(st.integers(0, 6)),
    )
    drafts = draw(TOKENS)
    return Row(
        asked,
        draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=8)),
        draw(TOKENS),
        draw(TOKENS),
        drafts,
        draw(TOKENS),
        draw(st.integers(1, len(drafts) + 1)),
    )


@settings(max_examples=80, deadline=None)
@given(st.lists(rows(), min_size=1, max_size=4), st.data())
def test_equals_the_plain_reference(batch: list[Row], data: st.DataObject) -> None:
    """Whatever rows and positions share a call, whatever was rejected before: the same bits."""
    num_lines = sum(row.num_lines for row in batch)
    drawn = data.draw(
        st.lists(
            st.lists(LOGITS, min_size=VOCAB_SIZE, max_size=VOCAB_SIZE),
            min_size=num_lines,
            max_size=num_lines,
        )
    )
    logits = torch.tensor(drawn, dtype=torch.float32)
    expected, spans, line = [], [], 0
    for row in batch:
        processors = Processors(row.params, len(row.prompt), set(row.stops))
        known = len(row.output) // 2
        early = row.prompt + row.output[:known]
        scratch = torch.zeros(len(row.rejected) + 1, VOCAB_SIZE)
        process(scratch, [Span.of(processors, early, row.rejected, 0, len(row.rejected) + 1)])
        tokens = row.prompt + row.output
        spans.append(Span.of(processors, tokens, row.drafts, line, row.num_lines))
        for index in range(row.num_lines):
            seen = row.drafts[: len(row.drafts) - row.num_lines + 1 + index]
            output = row.output + seen
            raw = logits[line].numpy().copy()
            expected.append(plain_logits(raw, row.params, row.prompt, output, row.stops))
            line += 1
    process(logits, spans)
    # Zeros of either sign are equal: no choice can tell them apart.
    np.testing.assert_array_equal(logits.numpy(), np.array(expected))


def test_lines_of_nobody_keep_their_bits() -> None:
    """Beside a row that asks for everything, a row that asks for nothing is untouched."""
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(3))
    before = logits.clone()
    asked = params(
        repetition_penalty=1.3, frequency_penalty=1.0, logit_bias=((5, 9.0),), min_tokens=9
    )
    processors = Processors(asked, 2, [7])
    process(logits, [Span.of(processors, [1, 2, 3], [], 1, 1)])
    assert torch.equal(logits[[0, 2]], before[[0, 2]])
    assert {int(i) for i in (logits[1] != before[1]).nonzero()} == {1, 2, 3, 5, 7}


def test_who_asks_for_nothing_has_no_processors() -> None:
    """Neutral values are the same as none; each other value asks."""
    assert not is_asked(params(top_p=0.5, top_k=3, stop_token_ids=(3,), num_logprobs=4))
    for fields in (
        {"min_tokens": 1},
        {"repetition_penalty": 1.01},
        {"presence_penalty": -0.1},
        {"frequency_penalty": 0.1},
        {"logit_bias": ((3, 0.5),)},
    ):
        assert is_asked(params(**fields))


@pytest.mark.parametrize("width", [6, 12])
def test_a_draft_may_know_fewer_tokens(width: int) -> None:
    """Ids beyond the logits are left out; the others are as with all of them."""
    asked = params(
        repetition_penalty=1.5, presence_penalty=1.0, logit_bias=((2, 1.0), (9, 2.0)), min_tokens=8
    )
    processors = Processors(asked, 3, [4, 11])
    raw = torch.linspace(-3, 3, 12)
    logits = raw[:width].clone()[None]
    process(logits, [Span.of(processors, [1, 8, 10, 2, 11], [9, 3], 0, 1)])
    plain = plain_logits(raw.numpy(), asked, [1, 8, 10], [2, 11, 9, 3], [4, 11])
    np.testing.assert_array_equal(logits[0].numpy(), plain[:width])


def test_a_tiny_repetition_penalty_overflows_nothing() -> None:
    """The strongest reward of repetition still leaves numbers to choose from."""
    logits = torch.tensor([[30.0, 2.0, -5.0, 1.0]])
    processors = Processors(params(repetition_penalty=1e-300), 2, [])
    process(logits, [Span.of(processors, [1, 2], [], 0, 1)])
    assert sample(logits, [params()], [2]) == [1]


def test_counts_grow_with_the_answer() -> None:
    """Hundreds of distinct tokens, counted a few at a time, count as all at once."""
    rng = np.random.default_rng(5)
    tokens = rng.integers(0, 5000, 3000).tolist()
    asked = params(frequency_penalty=0.5, repetition_penalty=1.2)
    slowly, at_once = Processors(asked, 700, []), Processors(asked, 700, [])
    for end in range(1, 3001, 7):
        slowly.count(tokens[:end])
    slowly.count(tokens)
    at_once.count(tokens)
    assert slowly.ids.tolist() == at_once.ids.tolist() == list(dict.fromkeys(tokens))
    assert slowly.counts.tolist() == [tokens[700:].count(token) for token in slowly.ids.tolist()]
    assert at_once.counts.tolist() == slowly.counts.tolist()
