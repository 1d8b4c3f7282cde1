"""A runner at depth one: rows move on in its own memory, and nobody sees how before they retire."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from worker.engine.plan import Plan, StepResult
from worker.engine.runner import Launched, Runner
from worker.engine.sequence import PlannedRow, Sequence

Owner = tuple[Sequence, int]  # a sequence in one of its epochs


@dataclass
class _Staged:
    """A row of a launched step, as it was sent."""

    row: PlannedRow
    block_table: list[int]
    uploaded: list[int] | None  # tokens, at the first launch of an epoch
    num_prefill_tokens: int

    @property
    def owner(self) -> Owner:
        return self.row.sequence, self.row.epoch


class DeviceFlight:
    """A launched step."""

    def __init__(self, runner: FakeDeviceRunner, plan: Plan, staged: list[_Staged]) -> None:
        self._runner, self.plan, self.staged = runner, plan, staged
        self.done: StepResult | None = None
        self.error: Exception | None = None

    def retire(self) -> StepResult:
        """Let the device get here; the draft's end follows from what the host knows by now."""
        runner = self._runner
        assert runner.flights[0] is self, "steps retire in the order of their launch"
        runner.flights.popleft()
        runner.execute(self)
        if self.error is not None:
            raise self.error
        assert self.done is not None
        for staged, result in zip(self.staged, self.done.rows, strict=True):
            if staged.row.sequence.epoch == staged.row.epoch and result.draft_end:
                end = _draft_end(staged.row)
                assert end == result.draft_end or result.draft_failed
        return self.done


def _draft_end(row: PlannedRow) -> int:
    if row.gamma:
        return len(row.sequence.token_ids) + row.gamma - 1
    return row.draft_start + row.num_catch_up


class FakeDeviceRunner:
    """The CPU's runner over rows of its own, which know what was sent to the device alone.

    Args:
        runner: Over the models.
        eager: Whether a launch computes at once; else a step is computed when it retires, so
            that whatever the host does in between would be seen.
    """

    depth = 1

    def __init__(self, runner: Runner, *, eager: bool = True) -> None:
        self._runner, self._eager = runner, eager
        self._slots: dict[int, tuple[Owner, Sequence]] = {}
        self._sent: dict[int, Owner] = {}  # by slot: whose tokens were sent last
        self._tables: dict[int, tuple[list[int], list[int]]] = {}  # by slot: a row's, and its copy
        self.flights: deque[DeviceFlight] = deque()
        self.num_ahead = 0  # rows launched while a step with them was in flight

    def launch(self, plan: Plan) -> Launched:
        """Take a step in; at most one is on its way already."""
        assert len(self.flights) <= 1, "two steps are in flight"
        staged = [self._stage(row) for row in plan.rows]
        assert len({row.slot for row in plan.rows}) == len(plan.rows)
        for flight in self.flights:
            self._check_retire_rule(staged, flight.staged)
        flight = DeviceFlight(self, plan, staged)
        self.flights.append(flight)
        if self._eager:
            self.execute(flight)
            if flight.error is not None:
                self.flights.pop()
                raise flight.error
        return flight

    def _stage(self, row: PlannedRow) -> _Staged:
        sequence = row.sequence
        owner, uploaded = (sequence, row.epoch), None
        if self._sent.get(row.slot) != owner:
            assert row.first == sequence.num_computed_tokens
            self._sent[row.slot], uploaded = owner, list(sequence.token_ids)
        source, table = self._tables.get(row.slot, ([], []))
        if source is not sequence.block_table:
            source, table = self._tables[row.slot] = sequence.block_table, []
        table += source[len(table) :]  # of a table that it knows, it looks at what is new
        return _Staged(row, list(table), uploaded, sequence.num_prefill_tokens)

    def _check_retire_rule(self, new: list[_Staged], old: list[_Staged]) -> None:
        """What a step in flight names is another's only once it has retired."""
        size = self._runner._block_size
        owners = {staged.row.slot: staged.owner for staged in old}
        named = {block: staged.owner for staged in old for block in staged.block_table}
        for staged in new:
            row = staged.row
            self.num_ahead += staged.owner in owners.values()
            assert owners.get(row.slot, staged.owner) == staged.owner
            first = row.first if row.first >= 0 else len(row.sequence.token_ids) - 1
            for block in staged.block_table[first // size :]:
                assert named.get(block, staged.owner) == staged.owner

    def execute(self, flight: DeviceFlight) -> None:
        """Compute a step, if it has not been: in the order of their launch."""
        if flight.done is None and flight.error is None:
            try:
                flight.done = self._execute(flight)
            except RuntimeError as error:  # what the models raise
                flight.error = error

    def _execute(self, flight: DeviceFlight) -> StepResult:
        plan = flight.plan
        rows = [self._own_row(staged) for staged in flight.staged]
        own = replace(plan, rows=rows, choice=None, context=None)
        done = self._runner.launch(own).retire()
        for row, result in zip(rows, done.rows, strict=True):
            row.sequence.token_ids += result.token_ids
        return replace(done, plan=plan)

    def _own_row(self, staged: _Staged) -> PlannedRow:
        """A row that begins where the device knows it begins."""
        row = staged.row
        if staged.uploaded is not None:
            source = row.sequence
            own = Sequence(
                source.request_id,
                staged.uploaded[: source.num_prompt_tokens],
                source.params,
                max_model_len=1 << 30,
                max_gamma=0,
                eos_token_ids=tuple(source.stop_ids),
            )
            own.token_ids = staged.uploaded
            self._slots[row.slot] = staged.owner, own
        owner, own = self._slots[row.slot]
        assert owner == staged.owner
        own.block_table = staged.block_table
        own.num_prefill_tokens = staged.num_prefill_tokens
        num_tokens, size = len(own.token_ids), self._runner._block_size
        if not row.is_decode:
            assert row.first + row.num_tokens <= num_tokens
            return replace(row, sequence=own)
        assert row.first in (-1, num_tokens - 1)
        assert num_tokens <= row.bound
        assert row.bound + row.gamma <= len(staged.block_table) * size
        draft_start = row.draft_start
        if row.gamma and row.num_catch_up:
            assert draft_start + row.num_catch_up == num_tokens - 1
        elif row.gamma:
            draft_start = num_tokens - 2  # the last two, whichever of them the cache lacks
        return replace(row, sequence=own, first=num_tokens - 1, draft_start=draft_start)
