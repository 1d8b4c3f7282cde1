"""The simulated worker: a queue, rows, and the step loop, against the true cost and acceptance.

A step is a decode step: it has decode rows, and may carry prompt chunks. When the KV pool runs
out the youngest is preempted and computed again later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from planner_service.context import Context
from planner_service.simulate.acceptance import Acceptance
from planner_service.simulate.arrivals import Request
from planner_service.simulate.cost import CostTable
from planner_service.simulate.link import Chooser, Ran
from planner_service.simulate.noise import Noise
from planner_service.simulate.rows import CatchUp, Rows
from planner_service.simulate.verify import verify, verify_likeliest

MAX_BATCHED_TOKENS = 2048  # of a step: decode rows, their drafts, prompt chunks
BLOCK_SIZE = 16  # of the pool, for the free blocks in a context
_NOTHING_CAUGHT_UP = CatchUp()
_NONE: list[int] = []


@dataclass(slots=True)
class Trace:
    """What every step did; columns of the same length."""

    batch_size: list[int] = field(default_factory=list)
    num_kv_tokens: list[int] = field(default_factory=list)
    gamma: list[int] = field(default_factory=list)
    explored: list[bool] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # clock at the end of the step
    num_emitted: list[int] = field(default_factory=list)
    # Expected microseconds of catching up, what was emitted at gamma 0 and prompts, and of the
    # drafts that were not verified.
    catch_up_us: list[float] = field(default_factory=list)
    draft_prefill_us: list[float] = field(default_factory=list)
    extra_draft_us: list[float] = field(default_factory=list)
    num_catch_up_tokens: list[int] = field(default_factory=list)
    sum_stale_tokens: list[int] = field(default_factory=list)
    # Expected tokens where not every row drafted the step's gamma; -1: every one did.
    expected_emitted: list[float] = field(default_factory=list)
    sums: list[NDArray[np.float64]] = field(default_factory=list)  # `Rows.expected_sums`


class Worker:
    """Runs steps until it is told to stop, or no request is left."""

    def __init__(
        self,
        *,
        truth: CostTable,
        acceptance: Acceptance,
        requests: Iterator[Request],
        chooser: Chooser,
        noise: Noise,
        closed_rows: int,
        max_rows: int,
        kv_pool_tokens: int,
        max_gamma: int,
        max_catchup_tokens: int,
    ) -> None:
        self.now = 0.0
        self.trace = Trace()
        self.finished: list[tuple[Request, float]] = []  # with its end
        self.num_refused = self.num_preempted = self.num_prefilled_tokens = 0
        self.queue: deque[Request] = deque()
        self.prefilling: deque[tuple[Request, int]] = deque()  # with the tokens left
        self.rows = Rows(max_rows)
        self._truth, self._acceptance, self._noise = truth, acceptance, noise
        self.chooser = chooser
        self._requests, self._is_closed = requests, closed_rows > 0
        self._max_rows, self._kv_pool_tokens = max_rows, kv_pool_tokens
        self._max_gamma, self._max_catchup_tokens = max_gamma, max_catchup_tokens
        self._num_prefilling_tokens = 0  # of the pool
        self._base = truth.by_batch_size.tolist()
        self._slopes = truth.kv_slopes.tolist()
        self._next = None if self._is_closed else next(requests, None)
        self._changes = deque(acceptance.changes)
        self._done_prefilling: list[Request] = []
        self._start(closed_rows)

    def _start(self, num_rows: int) -> None:
        """A closed loop begins amid its rows, of which the draft lacks nothing."""
        for _ in range(num_rows):
            request = next(self._requests)
            share = self._noise.uniform()
            self._classify(request, 0)
            request.num_emitted = max(1, int(share * request.num_output_tokens))
            if request.num_output_tokens >= 10**6:  # rows that never end begin at their prompt
                request.num_emitted = 1
            if request.num_emitted >= request.num_output_tokens:
                request.num_emitted = max(0, request.num_output_tokens - 1)
            request.first_token_at = 0.0
            self.rows.admit(request, self._chances(request), caught_up=True)

    # ---- requests come and go ----------------------------------------------------------

    def _classify(self, request: Request, step: int) -> None:
        request.request_class = self._acceptance.draw(step, request.uniform)

    def _chances(self, request: Request) -> NDArray[np.float64]:
        chances: NDArray[np.float64] = self._acceptance.prefixes[request.request_class]
        return chances

    @property
    def num_kv_used(self) -> int:
        """Tokens of the pool in use."""
        return self.rows.num_kv_tokens + self._num_prefilling_tokens

    def _receive(self) -> None:
        step = len(self.trace.gamma)
        while self._next is not None and self._next.arrived_at <= self.now:
            self._take(self._next, step)
            self._next = next(self._requests, None)

    def _take(self, request: Request, step: int) -> None:
        self._classify(request, step)
        if request.num_prompt_tokens + request.num_output_tokens > self._kv_pool_tokens:
            self.num_refused += 1
        else:
            self.queue.append(request)

    def _admit(self, budget: int) -> int:
        """Spend the tokens of a step on prompts; returns how many were spent."""
        left, reserve = budget, self._max_gamma + 1
        done: list[Request] = []
        while left > 0:
            if not self.prefilling and not self._admit_one(reserve, len(done)):
                break
            request, missing = self.prefilling.popleft()
            chunk = min(missing, left)
            left -= chunk
            if chunk < missing:
                self.prefilling.appendleft((request, missing - chunk))
            else:
                done.append(request)
        self._done_prefilling = done
        return budget - left

    def _admit_one(self, reserve: int, num_done: int) -> bool:
        num_rows = len(self.rows) + num_done
        if not self.queue or num_rows >= self._max_rows:
            return False
        request = self.queue[0]
        num_tokens = request.num_prompt_tokens + request.num_emitted
        needed = num_tokens + 1 + (num_rows + 1) * reserve
        if self.num_kv_used + needed > self._kv_pool_tokens and (num_rows or self.prefilling):
            return False
        self.queue.popleft()
        self.prefilling.append((request, num_tokens))
        self._num_prefilling_tokens += num_tokens
        return True

    def _join(self) -> None:
        """Requests whose prompt is done emit their first token and become rows."""
        for request in self._done_prefilling:
            num_tokens = request.num_prompt_tokens + request.num_emitted
            self._num_prefilling_tokens -= num_tokens
            self.num_prefilled_tokens += num_tokens
            request.num_emitted += 1
            if request.first_token_at < 0:
                request.first_token_at = self.now
            if request.num_emitted >= request.num_output_tokens:
                self._finish(request)
            else:
                self.rows.admit(request, self._chances(request))

    def _finish(self, request: Request) -> None:
        self.finished.append((request, self.now))
        if self._is_closed:
            following = next(self._requests)
            following.arrived_at = self.now
            self._take(following, len(self.trace.gamma))

    def _make_room(self) -> None:
        """Preempt the youngest until every row could emit as much as it may."""
        rows = self.rows
        while (
            self.num_kv_used + len(rows) * (self._max_gamma + 1) > self._kv_pool_tokens
            and len(rows) + len(self.prefilling) > 1
        ):
            self.num_preempted += 1
            if self.prefilling:
                request, _ = self.prefilling.pop()
                self._num_prefilling_tokens -= request.num_prompt_tokens + request.num_emitted
            else:
                (request,) = rows.remove([len(rows) - 1])
            self.queue.appendleft(request)

    def _change(self) -> None:
        """At an abrupt change the text of running requests changes too."""
        step = len(self.trace.gamma)
        while self._changes and self._changes[0] <= step:
            self._changes.popleft()
            waiting = [*self.queue, *(request for request, _ in self.prefilling)]
            for request in (*self.rows.requests, *waiting):
                request.uniform = self._noise.uniform()
                self._classify(request, step)
            if self.rows.requests:
                chances = [self._chances(request) for request in self.rows.requests]
                self.rows.redraw(np.array(chances).T)

    # ---- steps -------------------------------------------------------------------------

    def run(self, num_steps: int) -> None:
        """Run until so many decode steps ran, or nothing is left to do."""
        trace = self.trace
        while len(trace.gamma) < num_steps:
            if not self._is_closed:
                self._receive()
            if self._changes:
                self._change()
            if self.rows.requests:
                self._make_room()
                self._step()
            elif self.prefilling or self.queue:
                num_tokens = self._admit(MAX_BATCHED_TOKENS)
                self._pass(self._truth.prefill_us_per_token * num_tokens + self._base[1][0])
                self._join()
            elif self._next is not None:
                self.now = max(self.now, self._next.arrived_at)
            else:
                return

    def _pass(self, expected_us: float) -> float:
        us = expected_us * self._noise.jitter()
        self.now += us / 1e6
        return us

    def _step(self) -> None:
        rows, truth, trace = self.rows, self._truth, self.trace
        n, num_kv_tokens = len(rows.requests), rows.num_kv_tokens
        max_stale, sum_stale = rows.max_stale, rows.sum_stale
        word = self.chooser.choose(n, num_kv_tokens)
        room = (MAX_BATCHED_TOKENS - n) // n
        possible = max(0, min(self._max_gamma, rows.most_left - 1, room))
        gamma = wanted = min(word.gamma, possible)
        extra = min(word.num_extra_drafts, possible - gamma) if gamma else 0
        trace.sums.append(rows.expected_sums(self._max_gamma))
        caught, ready = _NOTHING_CAUGHT_UP, None
        if wanted and sum_stale:
            caught, ready = rows.catch_up(self._max_catchup_tokens)
            if ready is not None and not ready.any():
                gamma = extra = 0
        expected, reached, accepted = -1.0, _NONE, _NONE
        if gamma:
            if extra:
                done = verify_likeliest(rows, self._noise, gamma, extra, ready)
            else:
                done = verify(rows, self._noise, gamma, ready)
            by_row, reached, accepted, expected = done
            num_emitted = rows.emit(by_row, ready)
        elif ready is not None:  # caught up, and none was ready
            expected = float(n)
            num_emitted = rows.emit(np.zeros(n, np.int64), ready)
        else:
            rows.emit_one_each()
            num_emitted = n
        num_prefill = 0
        if self.queue or self.prefilling:
            num_prefill = self._admit(MAX_BATCHED_TOKENS - n * (gamma + 1))
        decode_us = self._base[n][gamma]
        decode_us += self._slopes[gamma] * (num_kv_tokens - truth.context * n)
        extra_us = 0.0
        if extra:
            per_draft = self._truth.draft_by_batch_size[n]
            extra_us = extra * float(per_draft)
        catch_up_us = draft_prefill_us = 0.0
        if caught.num_rows:
            num_tokens = caught.num_emitted + caught.num_prompt
            us = truth.catching_up_us(num_tokens, caught.num_rows)
            catch_up_us = us * caught.num_emitted / num_tokens
            draft_prefill_us = us - catch_up_us
        self._record(word.explored, n, num_kv_tokens, gamma, num_emitted, expected)
        trace.catch_up_us.append(catch_up_us)
        trace.draft_prefill_us.append(draft_prefill_us)
        trace.extra_draft_us.append(extra_us)
        trace.num_catch_up_tokens.append(caught.num_emitted)
        trace.sum_stale_tokens.append(sum_stale)
        step_us = max(1.0, decode_us) + extra_us + num_prefill * truth.prefill_us_per_token
        jitter = self._noise.jitter()
        self.now += (step_us + catch_up_us + draft_prefill_us) * jitter / 1e6
        trace.seconds.append(self.now)
        context = Context(
            n,
            num_kv_tokens,
            num_prefill,
            len(self.queue),
            max(0, self._kv_pool_tokens - self.num_kv_used) // BLOCK_SIZE,
            max_stale,
            sum_stale,
            True,
            0.0,
            possible if gamma or not wanted else 0,
            self._max_gamma,
            self._max_rows,
        )
        ended = rows.ended()
        if ended is not None:
            for request in rows.remove(ended):
                self._finish(request)
        if num_prefill:
            self._join()
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
                reached,
                accepted,
            )
        )

    def _record(
        self, explored: bool, n: int, kv: int, gamma: int, num_emitted: int, expected: float
    ) -> None:
        trace = self.trace
        trace.batch_size.append(n)
        trace.num_kv_tokens.append(kv)
        trace.gamma.append(gamma)
        trace.explored.append(explored)
        trace.num_emitted.append(num_emitted)
        trace.expected_emitted.append(expected)
