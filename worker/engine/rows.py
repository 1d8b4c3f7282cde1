"""All sequences of an engine, waiting and running, and what they hold: the state of the scheduler.

A row keeps its blocks until every step launched with it has retired: what it releases while a
step in flight names it waits in limbo.
"""

from __future__ import annotations

from collections import deque

from worker.engine.block_manager import BlockManager
from worker.engine.drafting import Drafting
from worker.engine.sequence import Sequence, SequenceStatus
from worker.messages import Finished


class Rows:
    """Sequences from submission to their end."""

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
            return sequence.ended("error", reason)
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
        return sequence.ended(reason, error)

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

    # ---- steps in flight ----

    def _in_flight(self, sequence: Sequence) -> bool:
        return sequence.last_step > self._num_retired

    def _retire(self, step: int) -> None:
        assert step == self._num_retired + 1, "steps retire in the order of their launch"
        self._num_retired = step
        due = [table for last_step, table in self._limbo if last_step <= step]
        self._limbo = [entry for entry in self._limbo if entry[0] > step]
        for table in due:
            self.blocks.release(table)

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
