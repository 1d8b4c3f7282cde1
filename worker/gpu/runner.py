"""Launches planned steps on the device and hands their results over one step late.

Nothing is read back between propose, verify and accept: the target's forward takes drafts from
the rows' tokens on the device, and acceptance moves the rows on there.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch

from worker.engine.plan import Plan, RowResult, StepResult, caught_up
from worker.engine.runner import NOT_NUMBERS
from worker.engine.sequence import PlannedRow
from worker.gpu.buckets import Buckets
from worker.gpu.device_rows import DeviceRows, force, shape_of
from worker.gpu.drafter import Drafter
from worker.gpu.forward import DeviceDraftForward, DeviceForward
from worker.gpu.graphs import Graphs
from worker.gpu.reports import Reports
from worker.gpu.staging import Stage
from worker.gpu.timing import Marks, Timer, elapsed_us, wait
from worker.kernels.logprobs import REPORT_WIDTH, ReportScratch, report_rows
from worker.kernels.row_state import RESULT_WIDTH, Choices, Field, RowState
from worker.kernels.sampling import SampleScratch, sample_rows
from worker.kernels.step import StepKernels
from worker.speculative.ngram import NgramProposer


class DeviceFlight:
    """A launched step; its results lie in pinned memory once it has ended."""

    def __init__(
        self,
        plan: Plan,
        marks: Marks,
        previous: Marks | None,
        results: torch.Tensor,
        reports: Reports | None,
    ) -> None:
        self._plan, self._results, self._reports = plan, results, reports
        self._marks, self._previous = marks, previous

    def retire(self) -> StepResult:
        """Wait for the step to end, and read what it did."""
        wait(self._marks.ended)
        plan = self._plan
        numbers = self._results[: len(plan.rows)].tolist()
        rows = [_result(row, values) for row, values in zip(plan.rows, numbers, strict=True)]
        if self._reports is not None:
            self._reports.add_to(rows)
        marks, previous = self._marks, self._previous
        whole = elapsed_us(marks.begun, marks.ended)
        if previous is not None:  # it began when the step before had ended, if that was later
            whole = min(whole, elapsed_us(previous.ended, marks.ended))
        catch_up = min(elapsed_us(marks.begun, marks.caught_up), whole)
        num_prefill, num_emitted = caught_up(plan.rows[: plan.num_decode_rows])
        if not num_prefill + num_emitted:
            return StepResult(plan, rows, round(whole))
        for_emitted = round(catch_up * num_emitted / (num_prefill + num_emitted))
        return StepResult(
            plan,
            rows,
            round(whole - catch_up),
            for_emitted,
            num_emitted,
            round(catch_up) - for_emitted,
        )


class DeviceRunner:
    """Target, draft and sampler on one device."""

    def __init__(
        self,
        target: DeviceForward,
        draft: DeviceDraftForward | None,
        ngram: NgramProposer | None,
        buckets: Buckets,
        *,
        max_num_seqs: int,
        vocab_size: int,
        clock: Callable[[], float],
    ) -> None:
        """Allocate what steps read and write.

        Args:
            target: The model whose answers count.
            draft: The draft model, if one drafts.
            ngram: Drafts by prompt lookup, on the host: steps then run at depth zero.
            buckets: Sizes to capture.
            max_num_seqs: Rows of a batch, and slots.
            vocab_size: Ids that the tokenizer knows: padding above is never sampled.
            clock: Seconds, monotonic.
        """
        self.synthetic_acceptance: float | None = None  # of each draft reached; for benchmarks
        self._target, self._ngram, self._buckets = target, ngram, buckets
        self._vocab_size = vocab_size
        device = target.buffers.device
        table_width = target.buffers.tables.shape[1]
        block_size = target.block_size
        self._stage = Stage(max_rows=max_num_seqs, table_width=table_width, device=device)
        width = table_width * block_size + RESULT_WIDTH
        state = RowState.allocate(max_num_seqs, width, vocab_size, device)
        self._rows = DeviceRows(state, table_width=table_width, vocab_size=vocab_size)
        self._kernels = StepKernels(
            state, self._stage.tables, block_size=block_size, max_position=target.max_model_len - 1
        )
        self._choices = Choices.allocate(buckets.max_tokens, device)
        self._scratch = SampleScratch.allocate(buckets.max_kept, vocab_size, device)
        self._results = torch.zeros(max_num_seqs, RESULT_WIDTH, dtype=torch.int32, device=device)
        shape = (buckets.max_reports, REPORT_WIDTH)
        self._report_scratch = ReportScratch.allocate(buckets.max_kept, vocab_size, device)
        self._reports = torch.zeros(shape, dtype=torch.int32, device=device)
        pinned = device.type == "cuda"
        self._host_results = [
            (
                torch.zeros(max_num_seqs, RESULT_WIDTH, dtype=torch.int32, pin_memory=pinned),
                torch.zeros(shape, dtype=torch.int32, pin_memory=pinned),
            )
            for _ in range(2)
        ]
        self._timer = Timer(device, clock)
        self._previous: Marks | None = None
        self._random = random.Random(0)
        self.graphs = Graphs(device, self._stage.empty)
        target.use_tables(self._stage.tables)
        self.drafter: Drafter | None = None
        if draft is not None:
            draft.use_tables(self._stage.tables)
            self.drafter = Drafter(
                draft,
                self._stage,
                self._kernels,
                self.graphs,
                buckets,
                vocab_size=min(vocab_size, draft.vocab_size),
            )

    @property
    def depth(self) -> int:
        """Steps in flight while the next is planned: none where the host makes the drafts."""
        return 0 if self._ngram is not None else 1

    def warm(self, progress: Callable[[str, str], None]) -> None:
        """Capture every graph, largest first: they share one pool of memory."""
        buckets = self._buckets
        progress("graphs", f"of {len(buckets.decode) + len(buckets.mixed)} sizes")
        for size in reversed(buckets.mixed):
            for kept in reversed(buckets.kept_buckets(size)):
                for height in buckets.height_buckets(size, has_prompt=True):
                    self._graph(size, kept, height, has_prompt=True)
        for size in reversed(buckets.decode):
            for height in buckets.height_buckets(size, has_prompt=False):
                self._graph(size, size, height, has_prompt=False)
        if self.drafter is not None:
            self.drafter.warm()
        self.graphs.trim()
        progress("graphs", f"{len(self.graphs)} captured in {self.graphs.capture_s:.1f} s")

    def launch(self, plan: Plan) -> DeviceFlight:
        """Enqueue a step that has rows."""
        with torch.inference_mode():
            return self._launch(plan)

    def _launch(self, plan: Plan) -> DeviceFlight:
        host = self._stage.next_host()
        for row in plan.rows:
            self._rows.load(row)
        num_drafts = self._num_drafts(plan)
        shape = shape_of(plan, num_drafts)
        if self.synthetic_acceptance is not None:
            force(shape, [self._draw(count) for count in num_drafts])
        num_drafting = sum(row.gamma > 0 for row in plan.rows)
        shape.write(host.header, host.fields, num_drafting)
        num_reports = self._rows.write(host, [row.slot for row in plan.rows])
        catch_up: list[Callable[[], None]] = []
        drafts: list[Callable[[], None]] = []
        if self.drafter is not None:
            catch_up, drafts = self.drafter.stage(plan, host)
        has_prompt = len(plan.rows) > plan.num_decode_rows
        num_dropped = max(0, sum(num_drafts) - plan.num_verified)  # by then, on the device
        size = self._buckets.token_bucket(shape.num_tokens - num_dropped, has_prompt=has_prompt)
        kept = size
        if has_prompt:
            kept = self._buckets.kept_bucket(shape.num_kept - num_dropped, size)
        height = self._buckets.height_bucket(shape.short_height, has_prompt=has_prompt)
        verify = self._graph(size, kept, height, has_prompt=has_prompt)

        begun = self._timer.mark()
        self._stage.send(host, len(plan.rows))
        for run in catch_up:
            run()
        caught_up = self._timer.mark() if catch_up else begun
        for run in drafts:
            run()
        verify()
        self._host_results.reverse()
        results, report_values = self._host_results[0]
        results.copy_(self._results, non_blocking=True)
        reports = None
        if num_reports:
            report_values[:num_reports].copy_(self._reports[:num_reports], non_blocking=True)
            reports = Reports.of(report_values[:num_reports], host, len(plan.rows))
        marks = Marks(begun, caught_up, self._timer.mark())
        previous, self._previous = self._previous, marks
        return DeviceFlight(plan, marks, previous, results, reports)

    def _num_drafts(self, plan: Plan) -> list[int]:
        """Drafts that each row may verify; those of n-grams are sent."""
        if self._ngram is None:
            return [min(row.gamma, plan.num_verified) for row in plan.rows]
        counts = [0] * len(plan.rows)
        decode = plan.rows[: plan.num_decode_rows]
        if any(row.gamma for row in decode):
            proposal = self._ngram.propose(decode, plan.num_verified)
            for index, (row, drafts) in enumerate(zip(decode, proposal.drafts, strict=True)):
                if drafts:
                    self._rows.write_drafts(row.slot, len(row.sequence.token_ids), drafts)
                    counts[index] = len(drafts)
        return counts

    def _graph(
        self, num_tokens: int, num_kept: int, height: int, *, has_prompt: bool
    ) -> Callable[[], None]:
        key = ("step", num_tokens, num_kept, height, has_prompt)
        return self.graphs.get(
            key, lambda: self._step(num_tokens, num_kept, height, has_prompt=has_prompt)
        )

    def _step(
        self, num_tokens: int, num_kept: int, height: int, *, has_prompt: bool
    ) -> Callable[[], None]:
        target, stage, choices = self._target, self._stage, self._choices
        buffers = target.buffers
        inputs = buffers.view(num_tokens, num_kept, short_height=height, has_long=has_prompt)
        sampling = stage.sample_inputs(choices, self._kernels.state, num_kept)
        kept_at = (stage.rows.fields[Field.KEEP], stage.rows.fields[Field.NUM_PROMPT])
        ids = choices.ids[:num_kept]
        capacity = min(num_tokens, buffers.max_rows)

        def run() -> None:
            self._kernels.prepare(stage.rows, inputs, buffers, choices)
            logits = target.logits(inputs)
            sample_rows(logits, sampling, self._scratch, ids, vocab_size=self._vocab_size)
            report_rows(
                logits,
                choices.owners,
                kept_at,
                sampling.processing,
                self._report_scratch,
                ids,
                self._reports,
                vocab_size=self._vocab_size,
            )
            self._kernels.accept(stage.rows, choices, self._results, capacity)

        return run

    def _draw(self, num_drafts: int) -> int:
        """Drafts accepted at the synthetic rate."""
        assert self.synthetic_acceptance is not None
        count = 0
        while count < num_drafts and self._random.random() < self.synthetic_acceptance:
            count += 1
        return count


def _result(row: PlannedRow, values: Sequence[int]) -> RowResult:
    if not row.samples:
        return RowResult([])
    num_accepted, num_drafts = values[0], values[RESULT_WIDTH - 2]
    result = RowResult(list(values[1 : num_accepted + 2]), num_drafts, num_accepted)
    if result.token_ids[-1] < 0:
        result.error = NOT_NUMBERS
    if row.is_decode:
        # Steps retire in order: a row that is still of this epoch is as it was at the start.
        if row.gamma:
            result.draft_end = len(row.sequence.token_ids) + row.gamma - 1
            result.draft_failed = bool(values[RESULT_WIDTH - 1])
        elif row.num_catch_up:
            result.draft_end = row.draft_start + row.num_catch_up
    return result
