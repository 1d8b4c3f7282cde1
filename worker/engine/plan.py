"""What a step will do and what came of it: values between scheduler, proposer and runner."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from worker.engine.decisions import Choice
from worker.engine.sequence import PlannedRow
from worker.messages import Context, Logprobs

MAX_SCORED = 256  # prompt tokens of a step whose logits are kept: memory for logits is bounded


def caught_up(rows: Iterable[PlannedRow]) -> tuple[int, int]:
    """Tokens that the draft catches up for `rows`: of prompts, and emitted at gamma 0."""
    num_prefill = num_emitted = 0
    for row in rows:
        if row.num_catch_up:
            first, end = row.draft_start, row.draft_start + row.num_catch_up
            border = min(max(row.sequence.num_prefill_tokens, first), end)
            num_prefill += border - first
            num_emitted += end - border
    return num_prefill, num_emitted


@dataclass(slots=True)
class Plan:
    """A step: decode rows first, oldest first, then prefill rows."""

    step: int
    rows: list[PlannedRow]
    num_decode_rows: int = 0
    choice: Choice | None = None  # None without decode rows: nothing to decide
    gamma: int = 0  # the step's, after what is feasible; rows may draft more, see num_verified
    num_verified: int = 0  # most drafts the target takes: of more, the likeliest of all rows
    context: Context | None = None  # of the step, as far as the scheduler knows it
    possible_gamma: int = 0  # feasible once the draft has caught up: what a decision may ask for
    num_scored: int = 0  # tokens of all rows' `scored`


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probabilities at m positions, of the logits before any processor."""

    chosen: npt.NDArray[np.float32]  # [m]
    top_ids: npt.NDArray[np.int32]  # [m, k], best first; of equals the lowest id first
    top: npt.NDArray[np.float32]  # [m, k]

    def message(self, request_id: int, num_tokens: int) -> Logprobs:
        """The first positions', to be sent."""
        return Logprobs(
            request_id=request_id,
            num_top=self.top_ids.shape[1],
            chosen=self.chosen[:num_tokens].astype("<f4", copy=False).tobytes(),
            top_ids=self.top_ids[:num_tokens].astype("<i4", copy=False).tobytes(),
            top=self.top[:num_tokens].astype("<f4", copy=False).tobytes(),
        )


@dataclass(slots=True)
class RowResult:
    """What a step did for one row."""

    token_ids: list[int]  # accepted drafts, then the recovered or bonus token; [] if none sampled
    num_drafts: int = 0  # verified
    num_accepted: int = 0
    draft_end: int = 0  # tokens whose draft KV exists now, drafts included; 0: not touched
    draft_failed: bool = False  # the draft's logits were no numbers
    error: str = ""
    logprobs: TokenLogprobs | None = None  # as token_ids, where the row asks
    prompt_logprobs: TokenLogprobs | None = None  # of prompt tokens after those of row.scored


@dataclass(slots=True)
class StepResult:
    """What a step did; times in microseconds. `commit` fills in what stop rules decide."""

    plan: Plan
    rows: list[RowResult]  # as plan.rows
    step_us: int  # catch-up and draft prefill left out
    catch_up_us: int = 0
    num_catch_up_tokens: int = 0
    draft_prefill_us: int = 0
    num_emitted: int = 0  # tokens delivered by decode rows
    reached: list[int] = field(default_factory=list)  # by draft position
    accepted: list[int] = field(default_factory=list)
