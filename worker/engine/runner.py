"""Runs a planned step: propose, verify, accept. Launch starts it, retire hands the result over.

Lossless by construction: every position takes the target's own sample, and a draft is accepted
while it equals that sample (arXiv 2408.07978), so drafts decide how far a step gets, never what
it says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from worker.engine.plan import Plan, RowResult, StepResult, TokenLogprobs
from worker.engine.sequence import PlannedRow
from worker.messages import SamplingParams
from worker.model.batch import Forward
from worker.sampling.logprobs import read
from worker.sampling.processors import Span, process
from worker.speculative.batches import BatchBuilder
from worker.speculative.proposer import Proposal, Proposer, Sampler

Float32s = npt.NDArray[np.float32]

NOT_NUMBERS = "the model's logits for this request are not numbers"


class Launched(Protocol):
    """A step on its way. Everything that it names stays with it until it has retired."""

    def retire(self) -> StepResult:
        """Wait for the step to end; steps retire in the order of their launch."""
        ...


class StepRunner(Protocol):
    """What runs planned steps, on whatever device."""

    @property
    def depth(self) -> int:
        """Steps that may be in flight while the next is planned: 0 or 1."""
        ...

    def warm(self, progress: Callable[[str, str], None]) -> None:
        """Do beforehand what the first steps would do; told (stage, detail) while it lasts."""
        ...

    def launch(self, plan: Plan) -> Launched:
        """Start a step that has rows."""
        ...


class Flight:
    """A step that its launch computed."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def retire(self) -> StepResult:
        """What came of it."""
        return self._result


class Runner:
    """Target, proposer and sampler on a CPU."""

    depth = 0

    def __init__(
        self,
        target: Forward,
        proposer: Proposer | None,
        sample: Sampler,
        *,
        vocab_size: int,
        block_size: int,
        clock: Callable[[], float],
    ) -> None:
        """Take the models.

        Args:
            target: The model whose answers count.
            proposer: What drafts, if anything.
            sample: Chooses tokens; the proposer's, if it has one, is the same.
            vocab_size: Ids that the tokenizer knows: padding above is never sampled.
            block_size: Tokens of a block.
            clock: Seconds, monotonic.
        """
        self._target = target
        self._proposer = proposer
        self._sample = sample
        self._vocab_size = vocab_size
        self._block_size = block_size
        self._clock = clock

    def warm(self, progress: Callable[[str, str], None]) -> None:
        """Nothing: no step is slower for being the first."""

    def launch(self, plan: Plan) -> Flight:
        """Run a step that has rows."""
        start = self._clock()
        proposal = self._propose(plan)
        inputs = _Inputs(plan, proposal, self._block_size)
        logits = self._target.run(inputs.batch.build())[:, : self._vocab_size]
        rows = [RowResult([]) for _ in plan.rows]
        if plan.num_scored:
            _score(plan, inputs, logits.numpy(), rows)
            logits = logits[inputs.choosing]
        raw = _raw(plan, inputs, logits)
        if inputs.spans:
            process(logits, inputs.spans)
        if inputs.params:
            chosen = self._sample(logits, inputs.params, inputs.positions)
            _accept(plan, proposal, chosen, rows)
        for index, lines in raw.items():
            _read(plan.rows[index], lines, rows[index])
        elapsed_us = round((self._clock() - start) * 1e6)
        if proposal is None:
            return Flight(StepResult(plan, rows, elapsed_us))
        return Flight(
            StepResult(
                plan,
                rows,
                max(0, elapsed_us - proposal.catch_up_us - proposal.draft_prefill_us),
                proposal.catch_up_us,
                proposal.num_catch_up_tokens,
                proposal.draft_prefill_us,
            )
        )

    def _propose(self, plan: Plan) -> Proposal | None:
        rows = plan.rows[: plan.num_decode_rows]
        if self._proposer is None or not any(row.gamma or row.num_catch_up for row in rows):
            return None
        return self._proposer.propose(rows, plan.num_verified)


class _Inputs:
    """The target's forward of a plan, and what is made of its logits."""

    def __init__(self, plan: Plan, proposal: Proposal | None, block_size: int) -> None:
        self.batch = BatchBuilder(block_size)
        self.params: list[SamplingParams] = []  # of each token to choose, row by row
        self.positions: list[int] = []
        self.choosing: list[int] = []  # the forward's lines that they are chosen of
        self.scoring: list[int] = []  # lines of prompt tokens to score, row by row
        self.starts: list[int] = []  # by row: the first of its tokens to choose
        self.spans: list[Span] = []  # over lines that choose
        num_lines = 0
        for index, row in enumerate(plan.rows):
            sequence, first = row.sequence, row.first
            token_ids = sequence.token_ids[first : first + row.num_tokens]
            drafts: list[int] = []
            if row.is_decode and proposal is not None:
                drafts = proposal.drafts[index]
                token_ids += drafts
            num_chosen = len(drafts) + 1 if row.samples else 0
            num_scored = len(row.scored)
            self.batch.add(token_ids, first, sequence.block_table, num_scored + num_chosen)
            self.starts.append(len(self.params))
            if num_chosen and sequence.processors is not None:
                self.spans.append(
                    Span.of(
                        sequence.processors,
                        sequence.token_ids,
                        drafts,
                        len(self.params),
                        num_chosen,
                    )
                )
            end = first + len(token_ids)
            self.params += [sequence.params] * num_chosen
            self.positions += range(end - num_chosen + 1, end + 1)
            if plan.num_scored:
                self.scoring += range(num_lines, num_lines + num_scored)
                num_lines += num_scored
                self.choosing += range(num_lines, num_lines + num_chosen)
                num_lines += num_chosen


def _score(plan: Plan, inputs: _Inputs, logits: Float32s, rows: list[RowResult]) -> None:
    """Read the log-probabilities of prompts' tokens."""
    start = 0
    for row, result in zip(plan.rows, rows, strict=True):
        if not row.scored:
            continue
        lines = logits[inputs.scoring[start : start + len(row.scored)]]
        start += len(row.scored)
        if not _are_numbers(lines):
            result.error = NOT_NUMBERS
            continue
        sequence = row.sequence
        token_ids = sequence.token_ids[row.scored.start + 1 : row.scored.stop + 1]
        num_top = sequence.params.num_prompt_logprobs
        result.prompt_logprobs = TokenLogprobs(*read(lines, token_ids, num_top))


def _raw(plan: Plan, inputs: _Inputs, logits: torch.Tensor) -> dict[int, Float32s]:
    """By row that asks for log-probabilities, its logits, safe from processors."""
    raw: dict[int, Float32s] = {}
    for index, row in enumerate(plan.rows):
        if row.samples and row.sequence.params.num_logprobs >= 0:
            end = inputs.starts[index + 1] if index + 1 < len(plan.rows) else len(inputs.params)
            lines = logits[inputs.starts[index] : end].numpy()
            raw[index] = lines if row.sequence.processors is None else lines.copy()
    return raw


def _read(row: PlannedRow, lines: Float32s, result: RowResult) -> None:
    """The log-probabilities of a row's new tokens."""
    lines = lines[: len(result.token_ids)]
    if result.error or not _are_numbers(lines):
        result.error = NOT_NUMBERS
        return
    num_top = row.sequence.params.num_logprobs
    result.logprobs = TokenLogprobs(*read(lines, result.token_ids, num_top))


def _are_numbers(lines: Float32s) -> bool:
    return bool(np.isfinite(lines.max(axis=1)).all())  # NaN, if any, is the maximum


def _accept(
    plan: Plan, proposal: Proposal | None, chosen: list[int], results: list[RowResult]
) -> None:
    """Keep each row's drafts while they equal the target's samples, and one sample more."""
    offset = 0
    for index, (row, result) in enumerate(zip(plan.rows, results, strict=True)):
        if not row.samples:
            continue
        drafts: list[int] = []
        if row.is_decode and proposal is not None:
            drafts = proposal.drafts[index]
        samples = chosen[offset : offset + len(drafts) + 1]
        offset += len(samples)
        num_accepted = 0
        while num_accepted < len(drafts) and drafts[num_accepted] == samples[num_accepted]:
            num_accepted += 1
        result.token_ids = samples[: num_accepted + 1]
        result.num_drafts, result.num_accepted = len(drafts), num_accepted
        if samples[num_accepted] < 0:
            result.error = NOT_NUMBERS
        if row.is_decode and proposal is not None and proposal.draft_ends:
            result.draft_end = proposal.draft_ends[index]
            result.draft_failed = proposal.failed[index]
