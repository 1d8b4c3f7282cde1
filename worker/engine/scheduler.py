"""Which rows run in a step and with which blocks, and what becomes of them when it has retired.

Continuous batching: decode rows first, then prompt chunks, then admissions, first come first
served. When blocks run out the youngest row is preempted and later recomputed, so the oldest
always advances.

A step may be planned while the one before it is in flight with the same rows: plans then go by
what those rows will have at least and at most.
"""

from __future__ import annotations

from collections.abc import Callable

from worker.engine.decisions import Choice
from worker.engine.output import Columns
from worker.engine.plan import MAX_SCORED, Plan, RowResult, StepResult
from worker.engine.rows import Rows
from worker.engine.sequence import PlannedRow, Sequence, SequenceStatus, advance
from worker.messages import Context, StepOutput

Chooser = Callable[[int, int], Choice]  # (decode rows, their KV tokens) -> gamma


class Scheduler(Rows):
    """Plans steps and commits them; the only one that moves blocks between rows."""

    # ---- a step begins ----

    def schedule(self, choose: Chooser) -> Plan:
        """Plan the next step; it may be empty when nothing fits at present."""
        assert self._num_launched - self._num_retired <= 1, "bounds hold over one step in flight"
        plan = Plan(self._num_launched + 1, [])
        rows = plan.rows
        self._add_decode_rows(plan)
        budget = self.max_num_batched_tokens - len(rows)
        if not rows:
            self._add_prefill_rows(plan, budget)
        else:
            # A row attends to all of its tokens, the last of which gets its KV in this step.
            num_kv_tokens = sum([row.bound for row in rows])
            plan.choice = choose(len(rows), num_kv_tokens)
            stale = self.drafting.plan(plan, plan.choice, budget)
            budget -= plan.num_verified
            plan.context = Context(
                batch_size=len(rows),
                num_kv_tokens=num_kv_tokens,
                num_prefill_tokens=self._add_prefill_rows(plan, budget),
                num_waiting=len(self._waiting),
                num_free_blocks=self.blocks.num_free,
                max_stale_tokens=stale.max_tokens,
                sum_stale_tokens=stale.sum_tokens,
                draft_resident=self.drafting.draft_resident,
                cpu_utilization=0.0,
                feasible_max_gamma=stale.feasible_gamma,
            )
        if plan.rows:
            self._num_launched = plan.step
            for row in plan.rows:
                row.sequence.last_step = plan.step
                row.sequence.flight = row
        return plan

    def _add_decode_rows(self, plan: Plan) -> None:
        """Every decode row that has room for its last token, found at the youngest's cost."""
        for sequence in list(self.running):
            if sequence.flight is None:
                if sequence.phase != "decode":
                    continue
                first, bound = sequence.num_computed_tokens, len(sequence.token_ids)
            elif sequence.will_decode and not sequence.will_end:
                first, bound = -1, sequence.bound
            else:
                continue
            if sequence.status is SequenceStatus.RUNNING and self._make_room(sequence, bound):
                row = PlannedRow(sequence, sequence.epoch, 1, True, True)
                row.first, row.bound, row.slot = first, bound, sequence.slot
                plan.rows.append(row)
        plan.num_decode_rows = len(plan.rows)

    def _make_room(self, sequence: Sequence, num_tokens: int) -> bool:
        # A table covers all that the row's last plan may have filled. A token more is a block
        # more at most: where that is missing none is free, and one that comes back will do.
        while not self.blocks.grow(sequence.block_table, num_tokens):
            if self._num_returning():
                return False
            youngest = self.running[-1]
            if youngest is self.running[0]:
                return False  # what is missing is granted
            self._preempt(youngest)
            if youngest is sequence:
                return False
        return True

    def _add_prefill_rows(self, plan: Plan, budget: int) -> int:
        """Spend the rest of the step's tokens on prompts; returns how many were spent."""
        left = budget
        for sequence in self.running:
            if left > 0 and not sequence.will_decode:
                left -= self._add_chunk(plan, sequence, left)
        while left > 0 and self._waiting and self._free_slots:
            if not self._admit(self._waiting[0]):
                break
            sequence = self._waiting.popleft()
            sequence.status = SequenceStatus.RUNNING
            sequence.slot = self._free_slots.pop()
            self.running.append(sequence)
            left -= self._add_chunk(plan, sequence, left)
        return budget - left

    def _add_chunk(self, plan: Plan, sequence: Sequence, budget: int) -> int:
        first, end = sequence.will_have_computed, sequence.num_prefill_tokens
        num_tokens = min(end - first, budget)
        scored = range(0)
        if sequence.num_unscored:
            # Nothing is generated before all of it is scored: the row's tokens are the prompt.
            start = max(first, sequence.first_unscored)
            num_tokens = min(num_tokens, start + MAX_SCORED - plan.num_scored - first)
            scored = range(start, min(first + num_tokens, end - 1))
            plan.num_scored += len(scored)
        if num_tokens <= 0:
            return 0
        row = PlannedRow(sequence, sequence.epoch, num_tokens, first + num_tokens == end, False)
        row.scored = scored
        row.first, row.bound, row.slot = first, end, sequence.slot
        plan.rows.append(row)
        return num_tokens

    def _admit(self, sequence: Sequence) -> bool:
        """Give a waiting request its cached prefix and blocks for all of its tokens, or nothing."""
        blocks, size = self.blocks, self.blocks.block_size
        if self._in_flight(sequence):
            return False
        num_tokens = len(sequence.token_ids)
        # The last token is always computed, its logits are wanted; so are those of tokens that
        # the prompt's log-probabilities are still to be read of.
        most = (
            min(num_tokens - 1, sequence.first_unscored)
            if sequence.num_unscored
            else num_tokens - 1
        )
        hashes = sequence.hashes(most // size, size, blocks.salt)
        cached = blocks.match(hashes)
        # A block each for the rows that run, so that admitting does not preempt at once.
        needed = -(-(num_tokens + 1) // size) - len(cached) + len(self.running)
        if blocks.num_free - blocks.num_unreferenced(cached) < needed:
            return False
        blocks.acquire(cached)
        sequence.num_computed_tokens = len(cached) * size
        sequence.block_table = cached
        found = blocks.grow(sequence.block_table, num_tokens)
        assert found
        sequence.num_prefill_tokens = num_tokens
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = min(
                sequence.num_computed_tokens, sequence.num_prompt_tokens
            )
        return True

    # ---- a step ends ----

    def commit(self, done: StepResult) -> StepOutput:
        """Apply what a step computed to the rows that are still as they were when it began."""
        plan = done.plan
        self._retire(plan.step)
        output = Columns()
        most = max([row.gamma for row in plan.rows])
        done.reached, done.accepted = [0] * most, [0] * most
        version = self.blocks.draft.version
        for row, result in zip(plan.rows, done.rows, strict=True):
            if row.epoch == row.sequence.epoch:
                self._apply(row, result, done, output, version)
        return output.message()

    def _apply(
        self,
        row: PlannedRow,
        result: RowResult,
        done: StepResult,
        output: Columns,
        draft_version: int,
    ) -> None:
        sequence = row.sequence
        if sequence.flight is row:
            sequence.flight = None
        num_known, num_before = len(sequence.token_ids), sequence.num_computed_tokens
        num_kept, reason, error = 0, "", result.error
        if not error:
            try:
                num_kept, reason = advance(sequence, result.token_ids)
            except Exception as failure:  # of a stop detector: its request alone is to blame
                error = f"stop strings could not be looked for: {failure}"
        if error:
            self.blocks.forget(sequence.block_table)
            del sequence.token_ids[num_known:]
            output.finished.append(self._finish(sequence, "error", error))
            return
        if row.is_decode:
            sequence.num_computed_tokens += num_kept
            self._count(row, result, num_kept, done)
        else:
            sequence.num_computed_tokens += row.num_tokens
            sequence.phase = "decode" if row.samples else "prefill"
        self._record_blocks(row, result, num_before, draft_version)
        if result.prompt_logprobs is not None:
            sequence.num_unscored -= len(row.scored)
            output.add_prompt_logprobs(sequence.request_id, result.prompt_logprobs)
        if num_kept:
            output.add(sequence.request_id, sequence.token_ids[num_known:], result.logprobs)
            self.num_generated_tokens += num_kept
        if reason:
            output.finished.append(self._finish(sequence, reason))

    def _count(self, row: PlannedRow, result: RowResult, num_kept: int, done: StepResult) -> None:
        """Count drafts as far as their tokens were delivered; nothing after a stop counts."""
        sequence = row.sequence
        num_accepted = min(result.num_accepted, num_kept)
        num_reached = min(result.num_drafts, num_kept)
        for position in range(num_reached):
            done.reached[position] += 1
        for position in range(num_accepted):
            done.accepted[position] += 1
        stopped_inside = num_kept <= result.num_accepted
        num_drafts = num_kept if stopped_inside else result.num_drafts
        done.num_emitted += num_kept
        sequence.num_steps += 1
        sequence.gamma_histogram[result.num_drafts] += 1
        sequence.num_draft_tokens += num_drafts
        sequence.num_accepted_tokens += num_accepted
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        if done.plan.choice is not None:
            sequence.policy_version = done.plan.choice.policy_version

    def _record_blocks(
        self, row: PlannedRow, result: RowResult, num_before: int, draft_version: int
    ) -> None:
        """Cut the draft's cache to the accepted length, and let full blocks be found.

        What the draft filled counts only if nothing that it built on was forgotten since the
        step was planned: the step before it may have been in flight then, and failed.
        """
        sequence, blocks = row.sequence, self.blocks
        table, num_computed = sequence.block_table, sequence.num_computed_tokens
        if result.draft_failed:
            sequence.draft_broken = True
            sequence.limit_speculation("the draft's logits were not numbers")
            blocks.draft.forget(table)
        elif result.draft_end and row.draft_version == draft_version:
            blocks.draft.fill(table, row.draft_start, min(result.draft_end, num_computed))
        size = blocks.block_size
        num_full = num_computed // size
        if blocks.prefix_cache and num_full > num_before // size:
            hashes = sequence.hashes(num_full, size, blocks.salt)
            for index in range(num_before // size, num_full):
                blocks.insert(table[index], hashes[index])

    def fail(self, plan: Plan, message: str) -> StepOutput:
        """End every row of a step that raised; their blocks are forgotten."""
        self._retire(plan.step)
        output = Columns()
        for row in plan.rows:
            if row.epoch == row.sequence.epoch:
                self.blocks.forget(row.sequence.block_table)
                output.finished.append(self._finish(row.sequence, "error", message))
        return output.message()
