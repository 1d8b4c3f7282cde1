"""Which rows run in a step and with which blocks, and what becomes of them when it has retired.

Continuous batching: decode rows first, then prompt chunks, then admissions, first come first
served. When blocks run out the youngest row is preempted and later recomputed, so the oldest
always advances. A row keeps its blocks until every step launched with it has retired.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable

from worker.engine.block_manager import BlockManager
from worker.engine.decisions import Choice
from worker.engine.drafting import Drafting
from worker.engine.plan import Plan, PlannedRow, RowResult, StepResult
from worker.engine.sequence import Sequence, SequenceStatus, advance
from worker.messages import Context, Finished, StepOutput

Chooser = Callable[[int, int], Choice]  # (decode rows, their KV tokens) -> gamma


class Scheduler:
    """Owner of all sequences; the only one that moves blocks between them."""

    def __init__(
        self,
        blocks: BlockManager,
        drafting: Drafting,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> None:
        assert max_num_batched_tokens >= max_num_seqs, "every decode row needs one token of a step"
        self.blocks = blocks
        self.drafting = drafting
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.running: list[Sequence] = []  # oldest first
        self._waiting: deque[Sequence] = deque()  # oldest first, preempted rows in front
        self._by_id: dict[int, Sequence] = {}
        self._num_launched = 0
        self._num_retired = 0
        # (last step that names them, blocks): of rows that ended or were preempted in flight.
        self._limbo: list[tuple[int, list[int]]] = []
        self.num_preemptions = 0
        self.num_generated_tokens = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0

    # ---- requests ----

    @property
    def num_waiting(self) -> int:
        """Requests that wait for admission, preempted ones included."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests in the batch."""
        return len(self.running)

    @property
    def num_steps(self) -> int:
        """Steps that have retired."""
        return self._num_retired

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._by_id)

    def submit(self, sequence: Sequence) -> Finished | None:
        """Queue a request, or say why it can never run."""
        reason = self._refusal(sequence)
        if reason:
            return _finished(sequence, "error", reason)
        self._by_id[sequence.request_id] = sequence
        self._waiting.append(sequence)
        return None

    def _refusal(self, sequence: Sequence) -> str:
        blocks = self.blocks
        if sequence.request_id in self._by_id:
            return f"request {sequence.request_id} is already being served"
        if sequence.num_prompt_tokens == 0:
            return "the prompt is empty"
        if sequence.num_prompt_tokens >= sequence.max_num_tokens:
            return (
                f"a prompt of {sequence.num_prompt_tokens} tokens leaves no room for an answer "
                f"in {sequence.max_num_tokens}"
            )
        if sequence.max_num_tokens > blocks.num_base_blocks * blocks.block_size:
            return (
                f"the request may need {sequence.max_num_tokens} tokens of KV; "
                f"the pool holds {blocks.num_base_blocks * blocks.block_size}"
            )
        return ""

    def abort(self, request_id: int, reason: str = "abort", error: str = "") -> Finished | None:
        """End a request, waiting or running; None if nothing has that id."""
        sequence = self._by_id.get(request_id)
        return None if sequence is None else self._finish(sequence, reason, error)

    def abort_all(self) -> list[Finished]:
        """End every request."""
        return [self._finish(sequence, "abort") for sequence in list(self._by_id.values())]

    def _finish(self, sequence: Sequence, reason: str, error: str = "") -> Finished:
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
        else:
            self._waiting.remove(sequence)
        sequence.status = SequenceStatus.FINISHED
        del self._by_id[sequence.request_id]
        self._release(sequence)
        return _finished(sequence, reason, error)

    def _release(self, sequence: Sequence) -> None:
        """Take a row's blocks; a step in flight that names them delays it."""
        table, sequence.block_table = sequence.block_table, []
        sequence.epoch += 1
        sequence.draft_hint = 0
        if sequence.last_step > self._num_retired:
            self._limbo.append((sequence.last_step, table))
        else:
            self.blocks.release(table)

    def _preempt(self, sequence: Sequence) -> None:
        """Send the youngest running row back to the front of the queue, to be recomputed."""
        assert sequence is self.running[-1]
        self.running.pop()
        self._release(sequence)
        sequence.status, sequence.phase = SequenceStatus.WAITING, "prefill"
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.appendleft(sequence)

    # ---- a step begins ----

    def schedule(self, choose: Chooser) -> Plan:
        """Plan the next step; it may be empty when nothing fits at present."""
        rows = self._decode_rows()
        plan = Plan(self._num_launched + 1, rows, len(rows), draft_epoch=self.blocks.draft_epoch)
        budget = self.max_num_batched_tokens - len(rows)
        if not rows:
            self._add_prefill_rows(plan, budget)
        else:
            # A row attends to all of its tokens, the last of which gets its KV in this step.
            num_kv_tokens = sum([len(row.sequence.token_ids) for row in rows])
            plan.choice = choose(len(rows), num_kv_tokens)
            stale = self.drafting.plan(plan, plan.choice.gamma, budget)
            budget -= sum([row.gamma for row in rows])
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
        return plan

    def _in_flight(self, sequence: Sequence) -> bool:
        return sequence.last_step > self._num_retired

    def _decode_rows(self) -> list[PlannedRow]:
        """Every decode row that has a slot for its last token, found at the youngest's cost."""
        rows: list[PlannedRow] = []
        for sequence in list(self.running):
            if sequence.phase != "decode" or self._in_flight(sequence):
                continue
            if sequence.status is SequenceStatus.RUNNING and self._make_room(sequence):
                rows.append(PlannedRow(sequence, sequence.epoch, 1, True, True))
        return rows

    def _make_room(self, sequence: Sequence) -> bool:
        while not self.blocks.grow(sequence.block_table, len(sequence.token_ids)):
            youngest = self.running[-1]
            if youngest is self.running[0] or self._in_flight(youngest):
                return False  # what is missing is granted, or comes back when a step retires
            self._preempt(youngest)
            if youngest is sequence:
                return False
        return True

    def _add_prefill_rows(self, plan: Plan, budget: int) -> int:
        """Spend the rest of the step's tokens on prompts; returns how many were spent."""
        left = budget
        for sequence in self.running:
            if left > 0 and sequence.phase == "prefill" and not self._in_flight(sequence):
                left -= self._add_chunk(plan, sequence, left)
        while left > 0 and self._waiting and len(self.running) < self.max_num_seqs:
            if not self._admit(self._waiting[0]):
                break
            sequence = self._waiting.popleft()
            sequence.status = SequenceStatus.RUNNING
            self.running.append(sequence)
            left -= self._add_chunk(plan, sequence, left)
        return budget - left

    def _add_chunk(self, plan: Plan, sequence: Sequence, budget: int) -> int:
        missing = sequence.num_prefill_tokens - sequence.num_computed_tokens
        num_tokens = min(missing, budget)
        is_last = num_tokens == missing
        plan.rows.append(PlannedRow(sequence, sequence.epoch, num_tokens, is_last, False))
        return num_tokens

    def _admit(self, sequence: Sequence) -> bool:
        """Give a waiting request its cached prefix and blocks for all of its tokens, or nothing."""
        blocks, size = self.blocks, self.blocks.block_size
        if self._in_flight(sequence):
            return False
        num_tokens = len(sequence.token_ids)
        # The last token is always computed: its logits are wanted.
        hashes = sequence.hashes((num_tokens - 1) // size, size, blocks.salt)
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
            sequence.num_cached_tokens = sequence.num_computed_tokens
        return True

    # ---- a step ends ----

    def commit(self, done: StepResult) -> StepOutput:
        """Apply what a step computed to the rows that are still as they were when it began."""
        plan = done.plan
        self._retire(plan.step)
        output = _Columns()
        done.reached, done.accepted = [0] * plan.gamma, [0] * plan.gamma
        for row, result in zip(plan.rows, done.rows, strict=True):
            sequence = row.sequence
            if row.epoch != sequence.epoch:
                continue
            if result.error:
                self.blocks.forget(sequence.block_table)
                output.finished.append(self._finish(sequence, "error", result.error))
                continue
            first, num_before = len(sequence.token_ids), sequence.num_computed_tokens
            num_kept, reason = advance(sequence, result.token_ids)
            if row.is_decode:
                sequence.num_computed_tokens += num_kept
                self._count(row, result, num_kept, done)
            else:
                sequence.num_computed_tokens += row.num_tokens
                sequence.phase = "decode" if row.samples else "prefill"
            self._record_blocks(row, result, plan, num_before)
            if num_kept:
                output.add(sequence.request_id, sequence.token_ids[first:])
                self.num_generated_tokens += num_kept
            if reason:
                output.finished.append(self._finish(sequence, reason))
        return output.message()

    def _retire(self, step: int) -> None:
        assert step == self._num_retired + 1, "steps retire in the order of their launch"
        self._num_retired = step
        due = [table for last_step, table in self._limbo if last_step <= step]
        self._limbo = [entry for entry in self._limbo if entry[0] > step]
        for table in due:
            self.blocks.release(table)

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
        self, row: PlannedRow, result: RowResult, plan: Plan, num_before: int
    ) -> None:
        """Cut the draft's cache to the accepted length, and let full blocks be found."""
        sequence, blocks = row.sequence, self.blocks
        table, num_computed = sequence.block_table, sequence.num_computed_tokens
        if result.draft_failed:
            sequence.draft_broken = True
            blocks.forget_draft(table)
        elif result.draft_end and plan.draft_epoch == blocks.draft_epoch:
            blocks.fill_draft(table, row.draft_start, min(result.draft_end, num_computed))
        size = blocks.block_size
        num_full = num_computed // size
        if blocks.prefix_cache and num_full > num_before // size:
            hashes = sequence.hashes(num_full, size, blocks.salt)
            for index in range(num_before // size, num_full):
                blocks.insert(table[index], hashes[index])

    def fail(self, plan: Plan, message: str) -> StepOutput:
        """End every row of a step that raised; their blocks are forgotten."""
        self._retire(plan.step)
        output = _Columns()
        for row in plan.rows:
            if row.epoch == row.sequence.epoch:
                self.blocks.forget(row.sequence.block_table)
                output.finished.append(self._finish(row.sequence, "error", message))
        return output.message()

    # ---- elastic memory ----

    def blocks_being_filled(self) -> set[int]:
        """Blocks that a step may still write."""
        size = self.blocks.block_size
        filling = {b for _, table in self._limbo for b in table}
        for sequence in self.running:
            filling.update(sequence.block_table[sequence.num_computed_tokens // size :])
        return filling

    def rename(self, moves: dict[int, int]) -> None:
        """Let rows and block manager know moved blocks by their new ids; nothing is in flight."""
        assert self._num_launched == self._num_retired
        self.blocks.rename(moves)
        for sequence in self.running:
            sequence.block_table[:] = [moves.get(b, b) for b in sequence.block_table]

    # ---- invariants ----

    def check_integrity(self) -> None:
        """Assert the invariants of sequences and blocks."""
        blocks, size = self.blocks, self.blocks.block_size
        tables = [sequence.block_table for sequence in self.running]
        blocks.check_integrity([*tables, *(table for _, table in self._limbo)])
        assert len(self.running) <= self.max_num_seqs
        assert all(step > self._num_retired for step, _ in self._limbo)
        assert {s.request_id for s in [*self.running, *self._waiting]} == set(self._by_id)
        for sequence in self._waiting:
            assert sequence.status is SequenceStatus.WAITING
            assert not sequence.block_table
            assert sequence.num_computed_tokens == 0
        for sequence in self.running:
            num_computed, num_tokens = sequence.num_computed_tokens, len(sequence.token_ids)
            assert sequence.status is SequenceStatus.RUNNING
            assert num_computed <= len(sequence.block_table) * size
            assert num_tokens < sequence.max_num_tokens
            if sequence.phase == "decode":
                assert num_computed == num_tokens - 1
            else:
                assert num_computed < sequence.num_prefill_tokens == num_tokens
            assert self.drafting.num_draft_computed(sequence) <= num_computed
            blocks.check_row(
                sequence.block_table,
                sequence.hashes(num_computed // size, size, blocks.salt),
                self.drafting.num_draft_computed(sequence),
            )


class _Columns:
    """Collects a `StepOutput`."""

    def __init__(self) -> None:
        self._request_ids: list[int] = []
        self._num_tokens: list[int] = []
        self._token_ids = array("i")
        self.finished: list[Finished] = []

    def add(self, request_id: int, token_ids: list[int]) -> None:
        self._request_ids.append(request_id)
        self._num_tokens.append(len(token_ids))
        self._token_ids.extend(token_ids)

    def message(self) -> StepOutput:
        return StepOutput(
            request_ids=self._request_ids,
            num_tokens=self._num_tokens,
            token_ids=self._token_ids.tobytes(),
            finished=self.finished,
        )


def _finished(sequence: Sequence, reason: str, error: str = "") -> Finished:
    return Finished(
        request_id=sequence.request_id, reason=reason, usage=sequence.usage(), error=error
    )
