"""Measures, on this machine, what steps cost at each batch size and gamma, and what catch-up does.

The engine runs as it does in a worker, with a channel in the place of its front: what it reports
of real steps is what a planner learns from. Nothing is computed from other machines' figures.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import count

import msgspec

from nightjar.errors import EngineFailure
from worker.calibration.grid import CatchUp, Grid, Measured
from worker.engine.drafting import MAX_REGULAR_LAG
from worker.engine.engine import Engine
from worker.engine.reports import REPORT_S
from worker.messages import (
    Decision,
    Finished,
    PlannerLink,
    Progress,
    Reports,
    SamplingParams,
    StepOutput,
    StepSums,
    Submit,
    ToEngine,
    ToFront,
)

Say = Callable[[str], None]

_HELD = 2**20  # steps: longer than any phase
# Fields of a report that teach the time of a gamma.
_UNTIMED = {"num_timed_steps": 0, "step_us": 0, "num_timed_emitted": 0, "num_timed_rows": 0}


class Direct:
    """A channel without another end: messages are laid in, and what the engine reports is kept."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self.inbox: list[ToEngine] = []
        self.reports: list[StepSums] = []
        self.finished: list[Finished] = []

    def poll(self, timeout_s: float) -> list[ToEngine]:
        """All messages that were laid in; never waits."""
        messages, self.inbox = self.inbox, []
        return messages

    def send(self, message: ToFront) -> None:
        """Keep reports and ends of requests."""
        match message:
            case Reports():
                self.reports += message.reports
            case StepOutput():
                self.finished += message.finished
            case Progress():
                self._say(f"{message.stage} {message.detail}".rstrip())


class OutOfTime(Exception):
    """The budget is spent."""


class Calibration:
    """Runs a grid on one engine."""

    def __init__(
        self,
        engine: Engine,
        channel: Direct,
        prompt: Callable[[int, int], list[int]],
        say: Say,
        *,
        max_catchup_tokens: int,
        budget_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take an engine that was made with a planner in its configuration.

        Args:
            engine: Ready to run, without requests.
            channel: Its channel.
            prompt: Token ids of a prompt, by its number and its length.
            say: Shows a line of progress.
            max_catchup_tokens: Of a step, as configured; 0 where no draft keeps a cache.
            budget_s: Seconds after which the rest of the grid is left out.
            clock: Seconds, monotonic.
        """
        self._engine, self._channel, self._prompt, self._say = engine, channel, prompt, say
        self._max_catchup_tokens = max_catchup_tokens
        self._clock, self._began, self._budget_s = clock, clock(), budget_s
        self._ids, self._phases = count(), count()
        self._gammas = range(engine.scheduler.drafting.max_gamma + 1)
        self.measured = Measured()

    def run(self, grid: Grid) -> Measured:
        """Measure until the grid or the budget ends.

        Raises:
            EngineFailure: A step failed, or the draft never catches up.
        """
        self._channel.inbox.append(PlannerLink(connected=True))
        lengths = sorted(set(grid.context_lengths))
        places = [(length, batch) for length in lengths for batch in grid.batch_sizes]
        for index, (length, batch) in enumerate(places):
            catches_up = self._max_catchup_tokens > 0 and length == lengths[0]
            stale = grid.stale_tokens if catches_up else ()
            if reason := self._unfit(length, batch, self._growth(length, batch, stale, grid)):
                self._leave_out(f"batch {batch} at {length} tokens: {reason}")
                continue
            began = self._clock()
            try:
                self._measure(length, batch, stale, grid)
            except OutOfTime:
                for later, size in places[index:]:
                    rest = "the rest of " if (later, size) == (length, batch) else ""
                    self._leave_out(
                        f"{rest}batch {size} at {later} tokens: "
                        f"--budget-s={self._budget_s:g} is spent"
                    )
                break
            finally:
                self._clear()
            self._say(f"batch {batch} at {length} tokens: {self._clock() - began:.1f} s")
        return self.measured

    def _measure(self, length: int, batch: int, stale: Sequence[int], grid: Grid) -> None:
        """Prefill a batch, run everything once unheard, then what is kept."""
        self._start_rows(length, batch, grid.temperature)
        for gamma in self._gammas:
            self._run(batch, gamma, 1)
        self._take()
        for gamma in self._gammas:
            if gamma == 1:
                self._catch_up(batch)  # of the steps at gamma 0
            self._run(batch, gamma, grid.repeats)
            self._keep(length, batch, gamma)
        for tokens in stale:
            self._run(batch, 0, tokens)
            self._keep(length, batch, 0)
            self._catch_up(batch, tokens)

    # ---- phases ------------------------------------------------------------------------

    def _start_rows(self, length: int, batch: int, temperature: float) -> None:
        """Submit and prefill a batch, which then decodes together."""
        for _ in range(batch):
            number = next(self._ids)
            params = SamplingParams(
                temperature=temperature,
                seed=number,
                max_tokens=self._engine.max_model_len,
                ignore_eos=True,
            )
            prompt = self._prompt(number, length)
            self._channel.inbox.append(
                Submit(request_id=number, prompt_token_ids=prompt, sampling=params)
            )
        self._decide(batch, 0)
        self._turn()
        running = self._engine.scheduler.running
        while len(running) < batch or any(row.phase == "prefill" for row in running):
            self._turn()

    def _run(self, batch: int, gamma: int, num_steps: int) -> None:
        """Run steps at a gamma; of drafts that lack tokens, after they have caught up."""
        if gamma:
            self._until_caught_up(batch)
        self._decide(batch, gamma)
        for _ in range(num_steps):
            self._turn()

    def _until_caught_up(self, batch: int) -> None:
        """Run steps at gamma 1 until the draft lacks no more of any row than usual."""
        self._decide(batch, 1)
        stale = self._num_stale()
        left = 4 * self._num_catch_up_steps(sum(stale)) if stale else 0
        while max(stale, default=0) >= MAX_REGULAR_LAG:
            if left == 0:
                raise EngineFailure(
                    f"the draft of {batch} rows does not catch up, "
                    f"{self._max_catchup_tokens} tokens a step (--max-catchup-tokens)"
                )
            left -= 1
            self._turn()
            stale = self._num_stale()

    def _num_stale(self) -> list[int]:
        """Tokens of each row that the draft's cache lacks."""
        if not self._max_catchup_tokens:
            return []
        scheduler = self._engine.scheduler
        return [
            row.num_computed_tokens - scheduler.drafting.num_draft_computed(row)
            for row in scheduler.running
        ]

    def _num_catch_up_steps(self, num_tokens: int) -> int:
        return num_tokens // max(1, self._max_catchup_tokens) + 2

    def _keep(self, length: int, batch: int, gamma: int) -> None:
        """Keep the steps since the last phase, which ran at one gamma."""
        taken = self._take()
        self.measured.reports += taken
        timed = [t for t in taken if (t.gamma, t.context.batch_size) == (gamma, batch)]
        self.measured.cell(length, batch, gamma).add(
            sum(sums.num_timed_steps for sums in timed),
            sum(sums.step_us for sums in timed),
            sum(sums.num_timed_rows for sums in timed),
            sum(sums.num_timed_emitted for sums in timed),
        )

    def _catch_up(self, batch: int, stale_tokens: int = 0) -> None:
        """Let the draft catch up, and keep what that cost.

        Rows that draft before others are done make the steps unfit to teach a gamma's time.
        """
        self._until_caught_up(batch)
        taken = [msgspec.structs.replace(sums, **_UNTIMED) for sums in self._take()]
        self.measured.reports += taken
        steps = sum(sums.num_catch_up_steps for sums in taken)
        if stale_tokens and steps:
            us = sum(sums.catch_up_us for sums in taken)
            self.measured.catch_ups.append(CatchUp(batch, stale_tokens, steps, us / 1e3))

    # ---- the engine --------------------------------------------------------------------

    def _decide(self, batch: int, gamma: int) -> None:
        sizes = tuple(range(1, self._engine.scheduler.max_num_seqs + 1))
        self._channel.inbox.append(
            Decision(
                decision_id=f"calibration-{next(self._phases)}",
                policy_version="calibration",
                batch_size_edges=sizes,
                kv_token_edges=(),
                table=dict.fromkeys(sizes, (gamma, gamma)),
                bucket=batch,
                hold_steps=_HELD,
                explored=False,
                session=b"",
            )
        )

    def _turn(self) -> None:
        if self._clock() - self._began > self._budget_s:
            raise OutOfTime
        self._engine.turn()
        for finished in self._channel.finished:
            raise EngineFailure(f"a row ended while it was measured: {finished.error or 'length'}")

    def _take(self) -> list[StepSums]:
        """Reports of all steps since the last call; they name no decision of any planner."""
        time.sleep(REPORT_S)  # what is not as old the engine keeps to itself
        self._engine.planner.flush()
        taken, self._channel.reports = self._channel.reports, []
        return [msgspec.structs.replace(sums, decision_id="") for sums in taken]

    def _clear(self) -> None:
        """End all rows, and drop what they reported."""
        self._channel.inbox.clear()
        self._engine.scheduler.abort_all()
        self._take()
        self._channel.finished.clear()

    # ---- what fits ---------------------------------------------------------------------

    def _growth(self, length: int, batch: int, stale: Sequence[int], grid: Grid) -> int:
        """Most tokens that a row gains while it is measured."""
        chunk = max(1, self._engine.scheduler.max_num_batched_tokens - batch)
        prefill = -(-batch * length // chunk)  # steps, in which the first rows decode already
        drafted = sum(gamma + 1 for gamma in self._gammas)
        lacking = (length + prefill, grid.repeats, *stale)
        catch_ups = sum(2 * self._num_catch_up_steps(batch * tokens) for tokens in lacking)
        return prefill + (grid.repeats + 1) * drafted + sum(stale) + catch_ups

    def _unfit(self, length: int, batch: int, growth: int) -> str:
        """Why a batch cannot be measured, in words; empty if it can."""
        engine, blocks, total = self._engine, self._engine.scheduler.blocks, length + growth
        if batch > engine.scheduler.max_num_seqs:
            return f"--max-num-seqs is {engine.scheduler.max_num_seqs}"
        if total >= engine.max_model_len:
            return f"rows may grow to {total} tokens, --max-model-len is {engine.max_model_len}"
        needed = batch * (-(-total // blocks.block_size) + 1)  # admission leaves one a row
        if needed > blocks.num_free:
            return f"{needed} KV blocks are needed, {blocks.num_free} are free; see --kv-mb"
        return ""

    def _leave_out(self, words: str) -> None:
        self.measured.left_out.append(words)
        self._say(f"left out: {words}")
