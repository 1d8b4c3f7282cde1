"""Runs a planned step: propose, verify, accept. Launch starts it, retire hands the result over.

Lossless by construction: every position takes the target's own sample, and a draft is accepted
while it equals that sample (arXiv 2408.07978), so drafts decide how far a step gets, never what
it says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from worker.engine.plan import Plan, RowResult, StepResult
from worker.messages import SamplingParams
from worker.model.batch import Forward
from worker.speculative.batches import BatchBuilder
from worker.speculative.proposer import Proposal, Proposer, Sampler

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
        batch = BatchBuilder(self._block_size)
        params: list[SamplingParams] = []
        positions: list[int] = []
        for index, row in enumerate(plan.rows):
            sequence = row.sequence
            first = row.first
            token_ids = sequence.token_ids[first : first + row.num_tokens]
            num_logits = int(row.samples)
            if row.is_decode and proposal is not None:
                token_ids += proposal.drafts[index]
                num_logits = len(token_ids)
            batch.add(token_ids, first, sequence.block_table, num_logits)
            end = first + len(token_ids)
            params += [sequence.params] * num_logits
            positions += range(end - num_logits + 1, end + 1)
        logits = self._target.run(batch.build())
        chosen = self._sample(logits[:, : self._vocab_size], params, positions) if params else []
        rows = _accept(plan, proposal, chosen)
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


def _accept(plan: Plan, proposal: Proposal | None, chosen: list[int]) -> list[RowResult]:
    """Keep each row's drafts while they equal the target's samples, and one sample more."""
    results, offset = [], 0
    for index, row in enumerate(plan.rows):
        if not row.samples:
            results.append(RowResult([]))
            continue
        drafts: list[int] = []
        if row.is_decode and proposal is not None:
            drafts = proposal.drafts[index]
        samples = chosen[offset : offset + len(drafts) + 1]
        offset += len(samples)
        num_accepted = 0
        while num_accepted < len(drafts) and drafts[num_accepted] == samples[num_accepted]:
            num_accepted += 1
        result = RowResult(samples[: num_accepted + 1], len(drafts), num_accepted)
        if samples[num_accepted] < 0:
            result.error = NOT_NUMBERS
        if row.is_decode and proposal is not None and proposal.draft_ends:
            result.draft_end = proposal.draft_ends[index]
            result.draft_failed = proposal.failed[index]
        results.append(result)
    return results
