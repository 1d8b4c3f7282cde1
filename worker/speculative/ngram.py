"""Drafts by prompt lookup: what followed the last time the row's newest tokens occurred."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from worker.engine.sequence import PlannedRow, Sequence
from worker.speculative.proposer import Proposal

MAX_N = 4


class NgramProposer:
    """Looks for the longest suffix, of 4 tokens down to 1, in prompt and output.

    Each row keeps the place after the last occurrence of each of its n-grams, so that a step
    costs in proportion to the tokens that are new.
    """

    has_cache = False
    has_probabilities = False

    def max_row_gamma(self, num_tokens: int) -> int:
        """No limit of its own."""
        return num_tokens

    def propose(self, rows: Seq[PlannedRow], num_verified: int) -> Proposal:
        """Drafts of each row; none where no suffix has occurred before."""
        return Proposal([_lookup(row.sequence, row.gamma) if row.gamma else [] for row in rows])


class _Index:
    """Where each n-gram of a row last ended, the row's very end left out."""

    def __init__(self) -> None:
        self.num_indexed = 0
        self.ends: list[dict[tuple[int, ...], int]] = [{} for _ in range(MAX_N)]

    def extend(self, token_ids: list[int]) -> None:
        """Take in n-grams that end before the last token: those have a continuation."""
        for end in range(self.num_indexed + 1, len(token_ids)):
            for n in range(1, min(MAX_N, end) + 1):
                self.ends[n - 1][tuple(token_ids[end - n : end])] = end
        self.num_indexed = max(self.num_indexed, len(token_ids) - 1)


def _lookup(sequence: Sequence, gamma: int) -> list[int]:
    index = sequence.proposer_state
    if not isinstance(index, _Index):
        index = sequence.proposer_state = _Index()
    token_ids = sequence.token_ids
    index.extend(token_ids)
    for n in range(min(MAX_N, len(token_ids)), 0, -1):
        end = index.ends[n - 1].get(tuple(token_ids[-n:]))
        if end is not None:
            return token_ids[end : end + gamma]
    return []
