"""Drafts by a small model that shares the target's vocabulary, noise and block tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from worker.engine.plan import caught_up
from worker.engine.sequence import PlannedRow
from worker.model.batch import Forward
from worker.sampling import log_probabilities
from worker.sampling.processors import Span, process
from worker.speculative.batches import BatchBuilder
from worker.speculative.proposer import Proposal, Sampler
from worker.speculative.selection import likeliest


class DraftModelProposer:
    """Runs the draft once per draft token, over all rows that still draft.

    The first forward of a row takes every token that the draft's cache lacks; rows that lack
    more than the usual are caught up before, in a forward of its own, so that its cost is known.
    The draft chooses with the target's own processors, sampler, parameters and positions.
    """

    has_cache = True
    has_probabilities = True

    def __init__(
        self,
        draft: Forward,
        sample: Sampler,
        *,
        vocab_size: int,
        block_size: int,
        clock: Callable[[], float],
    ) -> None:
        """Take a draft.

        Args:
            draft: The model, over the blocks' draft halves.
            sample: The target's sampler.
            vocab_size: Ids that both models and the tokenizer know.
            block_size: Tokens of a block.
            clock: Seconds, monotonic.
        """
        self._draft = draft
        self._sample = sample
        self._vocab_size = vocab_size
        self._block_size = block_size
        self._clock = clock

    def max_row_gamma(self, num_tokens: int) -> int:
        """Drafts before the draft's own context ends: the last draft is no input of it."""
        return self._draft.max_model_len - num_tokens + 1

    def propose(self, rows: Sequence[PlannedRow], num_verified: int) -> Proposal:
        """Catch up, draft `row.gamma` tokens for each row, and keep the likeliest of too many.

        How likely drafts are is not even looked at while all of them are verified.
        """
        proposal = Proposal(
            [[] for _ in rows],
            [row.draft_start + row.num_catch_up if row.num_catch_up else 0 for row in rows],
            [False] * len(rows),
        )
        if any(row.num_catch_up for row in rows):
            self._catch_up(rows, proposal)
        active = [index for index, row in enumerate(rows) if row.gamma]
        chooses = sum([row.gamma for row in rows]) > num_verified
        scores: list[list[float]] | None = [[] for _ in rows] if chooses else None
        while active:
            active = self._draft_once(rows, active, proposal, scores)
        if scores is not None:
            # What is dropped stays in the draft's cache, which is cut to what is accepted anyway.
            for drafts, num_kept in zip(
                proposal.drafts, likeliest(scores, num_verified), strict=True
            ):
                del drafts[num_kept:]
        return proposal

    def _catch_up(self, rows: Sequence[PlannedRow], proposal: Proposal) -> None:
        start = self._clock()
        batch = BatchBuilder(self._block_size)
        for row in rows:
            if row.num_catch_up:
                first, end = row.draft_start, row.draft_start + row.num_catch_up
                sequence = row.sequence
                batch.add(sequence.token_ids[first:end], first, sequence.block_table, 0)
        self._draft.run(batch.build())
        elapsed_us = round((self._clock() - start) * 1e6)
        num_prefill, num_emitted = caught_up(rows)
        proposal.num_catch_up_tokens = num_emitted
        proposal.catch_up_us = elapsed_us * num_emitted // (num_prefill + num_emitted)
        proposal.draft_prefill_us = elapsed_us - proposal.catch_up_us

    def _draft_once(
        self,
        rows: Sequence[PlannedRow],
        active: list[int],
        proposal: Proposal,
        scores: list[list[float]] | None,
    ) -> list[int]:
        """One more draft, and its log-probability, for the active rows; returns who goes on."""
        batch = BatchBuilder(self._block_size)
        positions, spans = [], []
        for line, index in enumerate(active):
            row, drafts = rows[index], proposal.drafts[index]
            sequence = row.sequence
            num_tokens = len(sequence.token_ids) + len(drafts)
            if drafts:
                batch.add(drafts[-1:], num_tokens - 1, sequence.block_table, 1)
            else:
                first = row.draft_start + row.num_catch_up
                batch.add(sequence.token_ids[first:], first, sequence.block_table, 1)
            positions.append(num_tokens)
            if sequence.processors is not None:
                spans.append(Span.of(sequence.processors, sequence.token_ids, drafts, line, 1))
        logits = self._draft.run(batch.build())[:, : self._vocab_size]
        if spans:
            process(logits, spans)
        params = [rows[index].sequence.params for index in active]
        chosen = self._sample(logits, params, positions)
        if scores is not None:
            for index, score in zip(active, log_probabilities(logits, params, chosen), strict=True):
                scores[index].append(score)
        left = []
        for index, token_id, position in zip(active, chosen, positions, strict=True):
            if token_id < 0:  # the target alone goes on, and this cache is not trusted again
                proposal.failed[index] = True
                proposal.drafts[index].clear()
                if scores is not None:
                    scores[index].clear()
                continue
            proposal.draft_ends[index] = position
            proposal.drafts[index].append(token_id)
            if len(proposal.drafts[index]) < rows[index].gamma:
                left.append(index)
        return left
