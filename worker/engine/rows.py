"""All sequences of an engine, waiting and running, and what they hold: the state of the scheduler.

A row keeps its blocks and its slot until every step launched with it has retired: what it
releases while a step in flight names it waits in limbo.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from typing import NamedTuple

from worker.engine.block_manager import BlockManager
from worker.engine.drafting import Drafting
from worker.engine.sequence import NO_SLOT, Sequence, SequenceStatus
from worker.messages import Finished


class _Held(NamedTuple):
    """What a row had that ended, or was preempted, in flight."""

    last_step: int  # that names it
    block_table: list[int]
    slot: int


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
        self._limbo: list[_Held] = []
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
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

    def submit(self, sequence: Sequence, prior_token_ids: Seq[int] = ()) -> Finished | None:
        """Queue a request, or say why it can never run.

        Args:
            sequence: As its prompt left it.
            prior_token_ids: Of its answer, generated elsewhere. If they fulfil a stop rule it
                ends at once, with that reason; it is refused if they go on after their end.
        """
        reason = self._refusal(sequence)
        if reason:
            return sequence.ended("error", reason)
        num_kept, ended = sequence.resume(prior_token_ids)
        if num_kept < len(prior_token_ids):
            return sequence.ended(
                "error",
                f"the answer to be resumed ended with its token {num_kept} ({ended}), "
                f"but has {len(prior_token_ids)}",
            )
        if ended:
            return sequence.ended(ended)
        asked, most = sequence.params.max_gamma, self.drafting.max_gamma
        if asked is not None and asked > most:
            sequence.limit_speculation(f"this worker drafts at most {most} tokens a step")
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
        """Take a row's blocks and slot; a step in flight that names them delays it."""
        held = _Held(sequence.last_step, sequence.block_table, sequence.slot)
        sequence.block_table, sequence.slot, sequence.flight = [], NO_SLOT, None
        sequence.epoch += 1
        sequence.draft_hint = 0
        if held.slot == NO_SLOT:
            return  # it waits
        if self._in_flight(sequence):
            self._limbo.append(held)
        else:
            self._give_back(held)

    def _give_back(self, held: _Held) -> None:
        self.blocks.release(held.block_table)
        self._free_slots.append(held.slot)

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
        due = [held for held in self._limbo if held.last_step <= step]
        self._limbo = [held for held in self._limbo if held.last_step > step]
        for held in due:
            self._give_back(held)

    def _num_returning(self) -> int:
        """Blocks that come free for sure when what is in flight has retired."""
        tables = [held.block_table for held in self._limbo]
        tables += [sequence.block_table for sequence in self.running if sequence.will_end]
        return self.blocks.num_returning(tables)

    # ---- elastic memory ----

    def blocks_being_filled(self) -> set[int]:
        """Blocks that a step may still write."""
        size = self.blocks.block_size
        filling = {b for held in self._limbo for b in held.block_table}
        for sequence in self.running:
            filling.update(sequence.block_table[sequence.num_computed_tokens // size :])
        return filling

    def rename(self, moves: dict[int, int]) -> None:
        """Let rows and block manager know moved blocks by their new ids; nothing is in flight."""
        assert self._num_launched == self._num_retired
        self.blocks.rename(moves)
        for sequence in self.running:
            # A new list: runners keep copies of tables, and take in only what is appended.
            sequence.block_table = [moves.get(b, b) for b in sequence.block_table]

    # ---- invariants ----

    def check_integrity(self) -> None:
        """Assert the invariants of sequences and blocks."""
        blocks, size = self.blocks, self.blocks.block_size
        tables = [sequence.block_table for sequence in self.running]
        blocks.check_integrity([*tables, *(held.block_table for held in self._limbo)])
        assert all(held.last_step > self._num_retired for held in self._limbo)
        slots = [sequence.slot for sequence in self.running] + [held.slot for held in self._limbo]
        assert sorted(slots + self._free_slots) == list(range(self.max_num_seqs))
        assert {s.request_id for s in [*self.running, *self._waiting]} == set(self._by_id)
        for sequence in self._waiting:
            assert sequence.status is SequenceStatus.WAITING
            assert not sequence.block_table
            assert sequence.num_computed_tokens == 0
            assert (sequence.slot, sequence.flight) == (NO_SLOT, None)
        for sequence in self.running:
            num_computed, num_tokens = sequence.num_computed_tokens, len(sequence.token_ids)
            assert sequence.status is SequenceStatus.RUNNING
            assert num_computed <= len(sequence.block_table) * size
            assert num_tokens < sequence.max_num_tokens
            assert num_tokens == sequence.num_prompt_tokens or sequence.num_unscored == 0
            self._check_flight(sequence)
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

    def _check_flight(self, sequence: Sequence) -> None:
        flight = sequence.flight
        assert (flight is not None) == self._in_flight(sequence)
        if flight is None:
            return
        assert (flight.sequence, flight.epoch) == (sequence, sequence.epoch)
        assert flight.slot == sequence.slot
        num_slots = len(sequence.block_table) * self.blocks.block_size
        if flight.is_decode:
            assert len(sequence.token_ids) <= flight.bound <= sequence.max_num_tokens
            assert num_slots >= flight.bound + flight.gamma
        else:
            assert flight.first >= sequence.num_computed_tokens
            assert flight.first + flight.num_tokens <= sequence.num_prefill_tokens <= num_slots
