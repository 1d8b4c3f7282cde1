"""What makes draft tokens: one interface for a draft model and for n-grams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from worker.engine.sequence import PlannedRow
from worker.messages import SamplingParams

# worker.sampling.sample: logits [n, vocab] float32, parameters and positions of n choices -> ids,
# -1 where the logits are no numbers.
Sampler = Callable[[torch.Tensor, Sequence[SamplingParams], Sequence[int]], list[int]]


@dataclass(slots=True)
class Proposal:
    """Drafts of a step's rows; times in microseconds."""

    drafts: list[list[int]]  # by row; at most its gamma; only what is to be verified
    draft_ends: list[int] = field(default_factory=list)  # by row, see RowResult; [] without cache
    failed: list[bool] = field(default_factory=list)  # by row: logits were no numbers
    catch_up_us: int = 0  # for tokens emitted at gamma 0
    num_catch_up_tokens: int = 0
    draft_prefill_us: int = 0  # for tokens that the target prefilled


class Capabilities(Protocol):
    """What the scheduler must know of whatever makes the drafts."""

    has_cache: bool  # whether it keeps KV in the blocks' draft halves, and so can be stale
    has_probabilities: bool  # whether it knows how likely its drafts are, and so can choose of them

    def max_row_gamma(self, num_tokens: int) -> int:
        """Most drafts it can make after `num_tokens` tokens; may be negative."""
        ...


class Proposer(Capabilities, Protocol):
    """Makes drafts for decode rows."""

    def propose(self, rows: Sequence[PlannedRow], num_verified: int) -> Proposal:
        """Drafts for each decode row, and the catch-up of each, as planned.

        Args:
            rows: Each drafts up to its gamma.
            num_verified: Most drafts that are handed over, of all rows together; without
                probabilities, the rows' gammas never add up to more.
        """
        ...
