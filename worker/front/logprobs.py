"""Log-probabilities from the engine's columns to entries that carry their tokens' bytes."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from worker.front.pieces import PositionLogprobs, TokenLogprob
from worker.messages import Logprobs
from worker.text.tokenizer import Tokenizer

Scores = tuple[float, list[tuple[int, float]]]  # the chosen token's; the likeliest ids with theirs


def scores(columns: Logprobs) -> Iterator[Scores]:
    """What the columns hold, position by position."""
    chosen, top_ids, top = array("f"), array("i"), array("f")
    chosen.frombytes(columns.chosen)
    top_ids.frombytes(columns.top_ids)
    top.frombytes(columns.top)
    k = columns.num_top
    for i, logprob in enumerate(chosen):
        begin, end = i * k, (i + 1) * k
        yield logprob, list(zip(top_ids[begin:end], top[begin:end], strict=True))


def entry(token_id: int, scored: Scores, tokenizer: Tokenizer, *, first: bool) -> PositionLogprobs:
    """The entry of one position; `first` is for a token that no text stands before."""

    def one(token_id: int, logprob: float) -> TokenLogprob:
        return TokenLogprob(token_id, logprob, tokenizer.own_bytes(token_id, first=first))

    logprob, likeliest = scored
    return PositionLogprobs(one(token_id, logprob), [one(*pair) for pair in likeliest])
