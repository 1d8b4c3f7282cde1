"""The draft model's loop on the device: catch-up, then one forward for each draft.

Where more is drafted than verified, drafts are scored as they are made, and the likeliest kept.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from worker.engine.plan import Plan
from worker.gpu.buckets import Buckets
from worker.gpu.device_rows import catch_up_of
from worker.gpu.forward import DeviceDraftForward
from worker.gpu.graphs import Graphs
from worker.gpu.staging import HostStage, Stage
from worker.kernels.draft_scores import DraftScores
from worker.kernels.draft_step import DraftKernels
from worker.kernels.inputs import ForwardInputs
from worker.kernels.row_state import NUM_VERIFIED, Choices
from worker.kernels.sampling import SampleScratch, sample_rows
from worker.kernels.selection import select
from worker.kernels.step import StepKernels


class Drafter:
    """Runs the draft; what it chooses lands in the rows' tokens, behind the last known one."""

    has_cache = True
    has_probabilities = True

    def __init__(
        self,
        draft: DeviceDraftForward,
        stage: Stage,
        kernels: StepKernels,
        graphs: Graphs,
        buckets: Buckets,
        *,
        vocab_size: int,
    ) -> None:
        """Take the draft, whose buffers are its own, and what it shares with the target."""
        self._draft, self._stage, self._graphs, self._buckets = draft, stage, graphs, buckets
        self._vocab_size = vocab_size
        device = stage.tensor.device
        most = max(buckets.rows[-1], buckets.catch_up[-1])
        self._choices = Choices.allocate(most, device)
        self._scratch = SampleScratch.allocate(buckets.rows[-1], vocab_size, device)
        self._step = kernels
        self._kernels = DraftKernels(kernels, draft.buffers, self._choices)
        self._scores = DraftScores(buckets.rows[-1], vocab_size, device)

    def max_row_gamma(self, num_tokens: int) -> int:
        """Drafts before the draft's own context ends: the last draft is no input of it."""
        return self._draft.max_model_len - num_tokens + 1

    def stage(self, plan: Plan, host: HostStage) -> tuple[list[Callable[[], None]], ...]:
        """Write the plan's drafting rows; returns what catches up and what drafts, to be run."""
        shape = catch_up_of(plan)
        shape.write(host.catch_header, host.catch_fields)
        catch_up = []
        if shape.num_tokens:
            size = self._buckets.catch_up_bucket(shape.num_tokens)
            catch_up.append(self._graphs.get(("catch up", size), lambda: self._catch_up(size)))
        decode = plan.rows[: plan.num_decode_rows]
        rows = [index for index, row in enumerate(decode) if row.gamma]
        if not rows:
            return catch_up, []
        host.draft_rows[: len(rows)] = rows
        host.draft_gammas[: len(rows)] = [decode[index].gamma for index in rows]
        host.header[NUM_VERIFIED] = plan.num_verified
        size = self._buckets.row_bucket(len(rows))
        chooses = sum(row.gamma for row in decode) > plan.num_verified
        drafts = [self._first_graph(size, scored=chooses)]
        most = max(row.gamma for row in decode)
        if most > 1:
            drafts += [self._next_graph(size, scored=chooses)] * (most - 1)
        if chooses:
            drafts.append(self._selection_graph())
        return catch_up, drafts

    def warm(self) -> None:
        """Capture every graph."""
        for size in reversed(self._buckets.catch_up):
            self._graphs.get(("catch up", size), lambda size=size: self._catch_up(size))  # type: ignore[misc]
        for size in reversed(self._buckets.rows):
            for scored in (False, True):
                self._first_graph(size, scored=scored)
                self._next_graph(size, scored=scored)
        self._selection_graph()

    def _first_graph(self, num_rows: int, *, scored: bool) -> Callable[[], None]:
        key = ("first draft", num_rows, scored)
        return self._graphs.get(key, lambda: self._first(num_rows, scored=scored))

    def _next_graph(self, num_rows: int, *, scored: bool) -> Callable[[], None]:
        key = ("next draft", num_rows, scored)
        return self._graphs.get(key, lambda: self._next(num_rows, scored=scored))

    def _selection_graph(self) -> Callable[[], None]:
        rows, scores = self._stage.rows, self._scores.scores
        return self._graphs.get("selection", lambda: lambda: select(rows, scores))

    def _catch_up(self, num_tokens: int) -> Callable[[], None]:
        draft, rows = self._draft, self._stage.catch_up
        inputs = draft.buffers.view(num_tokens, 2, short_height=2, has_long=True)

        def run() -> None:
            self._step.prepare(rows, inputs, draft.buffers, self._choices)
            draft.logits(inputs)

        return run

    def _first(self, num_rows: int, *, scored: bool) -> Callable[[], None]:
        draft, stage = self._draft, self._stage
        two, one = self._inputs(2 * num_rows, num_rows), self._inputs(num_rows, num_rows)

        def run() -> None:
            self._kernels.first(stage.rows, stage.draft, two)
            self._choose(draft.logits(two), scored=scored)
            self._kernels.next(stage.rows, stage.draft, one)

        return run

    def _next(self, num_rows: int, *, scored: bool) -> Callable[[], None]:
        draft, stage = self._draft, self._stage
        one = self._inputs(num_rows, num_rows)

        def run() -> None:
            self._choose(draft.logits(one), scored=scored)
            self._kernels.next(stage.rows, stage.draft, one)

        return run

    def _inputs(self, num_tokens: int, num_rows: int) -> ForwardInputs:
        return self._draft.buffers.view(
            num_tokens, num_rows, short_height=2, has_long=False, num_short=num_rows
        )

    def _choose(self, logits: torch.Tensor, *, scored: bool) -> None:
        stage, choices = self._stage, self._choices
        inputs = stage.sample_inputs(choices, self._step.state, len(logits))
        ids = choices.ids[: len(logits)]
        sample_rows(logits, inputs, self._scratch, ids, vocab_size=self._vocab_size)
        if scored:
            self._scores.add(logits, inputs, self._scratch, ids, self._step.state)
