"""The simulated worker's step loop, against the true cost and acceptance.

A step is a decode step: it has decode rows, and may carry prompt chunks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner_service.context import Context
from planner_service.simulate.cost import MIN_STEP_US, CostTable
from planner_service.simulate.intake import Intake
from planner_service.simulate.link import Chooser, Ran
from planner_service.simulate.noise import Noise
from planner_service.simulate.rows import CatchUp, Rows
from planner_service.simulate.verify import Verified, verify, verify_likeliest

MAX_BATCHED_TOKENS = 2048  # of a step: decode rows, their drafts, prompt chunks
BLOCK_SIZE = 16  # of the pool, for the free blocks in a context
_NOTHING_CAUGHT_UP = CatchUp()
_PLAIN = Verified(np.zeros(0, np.int64), [], [], -1.0)  # gamma 0: no draft to accept


class StepRecord(NamedTuple):
    """What a step did; microseconds are expected ones, without the noise on time."""

    batch_size: int
    num_kv_tokens: int
    gamma: int
    explored: bool
    seconds: float  # clock at its end
    num_emitted: int
    catch_up_us: float  # of tokens emitted at gamma 0
    draft_prefill_us: float
    fresh_prefill_us: float  # draft prefill of the rows that came since the last step
    extra_us: float  # beyond the table: drafts not verified, less what rows that drafted none spare
    num_catch_up_tokens: int
    sum_stale_tokens: int  # before the step
    # Tokens in the mean, where not every row drafted the step's gamma; -1: every row did.
    expected_emitted: float
    sums: NDArray[np.float64]  # [max_gamma]: expected accepted drafts by position


class Worker:
    """Runs steps until it is told to stop, or no request is left."""

    def __init__(
        self,
        *,
        truth: CostTable,
        noise: Noise,
        rows: Rows,
        intake: Intake,
        chooser: Chooser,
        max_gamma: int,
        max_catchup_tokens: int,
    ) -> None:
        self.now = 0.0
        self.steps: list[StepRecord] = []
        self.rows, self.intake, self.chooser = rows, intake, chooser
        self.truth, self._noise = truth, noise
        self.max_gamma, self._max_catchup_tokens = max_gamma, max_catchup_tokens
        # Plain lists: one number at a time is dear to read from an array.
        self._base: list[list[float]] = truth.by_batch_size.tolist()
        self._slopes: list[float] = truth.kv_slopes.tolist()
        self._draft: list[float] = truth.draft_by_batch_size.tolist()

    def run(self, num_steps: int) -> None:
        """Run until so many decode steps ran, or nothing is left to do."""
        intake = self.intake
        while len(self.steps) < num_steps:
            intake.receive(self.now)
            intake.change()
            if self.rows.requests:
                intake.make_room()
                self._step()
                intake.num_steps += 1
            elif intake.has_work:
                num_tokens = intake.compute(MAX_BATCHED_TOKENS)
                us = self._base[1][0] + self.truth.prefill_us_per_token * num_tokens
                self.now += us * self._noise.jitter() / 1e6
                intake.join(self.now)
            elif intake.next_at is not None:
                self.now = max(self.now, intake.next_at)
            else:
                return

    def _step(self) -> None:
        rows, intake = self.rows, self.intake
        n, num_kv_tokens = len(rows.requests), rows.num_kv_tokens
        max_stale, sum_stale = rows.max_stale, rows.sum_stale
        word = self.chooser.choose(n, num_kv_tokens)
        sums = rows.expected_sums(self.max_gamma)
        room = max(0, MAX_BATCHED_TOKENS // n - 1)
        possible = min(self.max_gamma, rows.most_left - 1, room)
        wanted = min(word.gamma, possible)
        # With nobody to choose between, a row's own first drafts are verified.
        extra = min(word.num_extra_drafts, possible - wanted) if wanted and n > 1 else 0
        fresh_us = self.truth.catching_up_us(rows.num_fresh_tokens, rows.num_fresh_rows)
        rows.num_fresh_rows = rows.num_fresh_tokens = 0
        gamma, caught, done, num_drafting = self._emit(wanted, extra)
        num_prefill = 0
        if intake.has_work:
            num_prefill = intake.compute(MAX_BATCHED_TOKENS - n * (gamma + 1))
        extra_us = self._draft[n] * extra if gamma else 0.0
        if gamma and num_drafting < n:
            extra_us -= self._spared_us(n, num_kv_tokens, gamma, num_drafting)
        step_us = self._step_us(n, num_kv_tokens, gamma) + extra_us
        step_us += self.truth.prefill_us_per_token * num_prefill
        catch_up_us, draft_prefill_us = self._catch_up_us(caught)
        jitter = self._noise.jitter()
        self.now += (step_us + catch_up_us + draft_prefill_us) * jitter / 1e6
        num_emitted = n + sum(done.accepted)
        self.steps.append(
            StepRecord(
                n,
                num_kv_tokens,
                gamma,
                word.explored,
                self.now,
                num_emitted,
                catch_up_us,
                draft_prefill_us,
                fresh_us,
                extra_us,
                caught.num_emitted,
                sum_stale,
                done.expected,
                sums,
            )
        )
        context = Context(
            n,
            num_kv_tokens,
            num_prefill,
            len(intake.waiting),
            intake.num_kv_free // BLOCK_SIZE,
            max_stale,
            sum_stale,
            True,
            0.0,
            possible if gamma or not wanted else 0,
            self.max_gamma,
            len(self._base) - 1,
        )
        intake.end_rows(self.now)
        intake.join(self.now)
        self.chooser.ran(
            Ran(
                word,
                context,
                possible,
                gamma,
                round(step_us * jitter),
                round(catch_up_us * jitter),
                caught.num_emitted,
                round(draft_prefill_us * jitter),
                num_emitted,
                done.reached,
                done.accepted,
            )
        )

    def _emit(self, wanted: int, extra: int) -> tuple[int, CatchUp, Verified, int]:
        """Let the rows emit; returns the gamma that ran, 0 where every draft was behind.

        Also what was caught up, what was verified, and how many rows drafted.
        """
        rows = self.rows
        num_rows = len(rows.requests)
        if not wanted:
            rows.emit_one_each()
            return 0, _NOTHING_CAUGHT_UP, _PLAIN, 0
        caught, ready = _NOTHING_CAUGHT_UP, None
        if rows.sum_stale:
            caught, ready = rows.catch_up(self._max_catchup_tokens)
        if ready is not None and not ready.any():
            rows.emit(np.zeros(num_rows, np.int64), ready)
            return 0, caught, _PLAIN._replace(expected=float(num_rows)), 0
        if extra:
            done = verify_likeliest(rows, self._noise, wanted, extra, ready)
        else:
            done = verify(rows, self._noise, wanted, ready)
        rows.emit(done.by_row, ready)
        return wanted, caught, done, num_rows if ready is None else int(np.count_nonzero(ready))

    def _spared_us(self, num_rows: int, num_kv_tokens: int, gamma: int, num_drafting: int) -> float:
        """What a step costs less because only some of its rows draft: a ragged step pays tokens.

        Verification falls with the drafts; each draft step is that of a smaller batch.
        """
        drafts_us = gamma * self._draft[num_rows]
        plain_us = self._step_us(num_rows, num_kv_tokens, 0)
        verify_us = self._step_us(num_rows, num_kv_tokens, gamma) - plain_us - drafts_us
        spared_us = max(0.0, verify_us) * (1 - num_drafting / num_rows)
        return spared_us + gamma * max(0.0, self._draft[num_rows] - self._draft[num_drafting])

    def _step_us(self, num_rows: int, num_kv_tokens: int, gamma: int) -> float:
        """One number of `CostTable.steps_us`."""
        beyond = num_kv_tokens - self.truth.context * num_rows
        return max(MIN_STEP_US, self._base[num_rows][gamma] + self._slopes[gamma] * beyond)

    def _catch_up_us(self, caught: CatchUp) -> tuple[float, float]:
        """Microseconds of catching up: for what was emitted at gamma 0, and for prompts."""
        if not caught.num_rows:
            return 0.0, 0.0
        num_tokens = caught.num_emitted + caught.num_prompt
        us = self.truth.catching_up_us(num_tokens, caught.num_rows)
        emitted_us = us * caught.num_emitted / num_tokens
        return emitted_us, us - emitted_us
