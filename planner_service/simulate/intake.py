"""Requests before and after they are decode rows: queue, prompt chunks, preemption, ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from planner_service.simulate.acceptance import Acceptance
from planner_service.simulate.arrivals import ENDLESS, Request
from planner_service.simulate.noise import Noise
from planner_service.simulate.rows import Rows


class Intake:
    """First come, first served, into rows and a KV pool of limited size.

    Every request is in one place: waiting, being prefilled, a row, or finished; those that could
    never fit are refused.
    """

    def __init__(
        self,
        *,
        requests: Iterator[Request],
        acceptance: Acceptance,
        noise: Noise,
        rows: Rows,
        closed_rows: int,
        max_rows: int,
        kv_pool_tokens: int,
        max_row_tokens: int,
    ) -> None:
        """Start empty, or, in a closed loop, amid its rows, of which the draft lacks nothing.

        Args:
            requests: In order of time.
            acceptance: Classes of requests.
            noise: Randomness of the run.
            rows: Where requests decode.
            closed_rows: Requests of a closed loop; 0: they come by their times.
            max_rows: Most that decode or are prefilled at once.
            kv_pool_tokens: Tokens of prompts and outputs that have room at once.
            max_row_tokens: Most that a row emits in a step.
        """
        self.waiting: deque[Request] = deque()
        self.prefilling: deque[tuple[Request, int]] = deque()  # with the tokens left
        self.finished: list[tuple[Request, float]] = []  # with its end
        self.num_refused = self.num_preempted = self.num_first_tokens = 0
        self.num_steps = 0  # that ran: the clock of the acceptance process
        self._requests, self._is_closed = requests, closed_rows > 0
        self._acceptance, self._noise, self._rows = acceptance, noise, rows
        self._max_rows, self._kv_pool_tokens = max_rows, kv_pool_tokens
        self._reserve = max_row_tokens
        self._num_prefilling_tokens = 0  # whole prompts of `prefilling` and `_prefilled`
        self._prefilled: list[Request] = []  # prompts that this step completes
        self._changes = deque(acceptance.changes)
        self._next: Request | None = None
        for _ in range(closed_rows):
            self._begin(next(requests))
        rows.settle()
        if not self._is_closed:
            self._next = next(requests, None)

    def _begin(self, request: Request) -> None:
        most = request.num_output_tokens
        if most < 2:  # no row: its one token comes from prefill
            self._take(request)
            return
        self._classify(request)
        share = self._noise.uniform()
        request.num_emitted = 1 if most >= ENDLESS else max(1, int(share * most))
        request.first_token_at = 0.0
        self._rows.admit(request, self._chances(request), caught_up=True)

    def _classify(self, request: Request) -> None:
        request.request_class = self._acceptance.draw(self.num_steps, request.uniform)

    def _chances(self, request: Request) -> NDArray[np.float64]:
        chances: NDArray[np.float64] = self._acceptance.prefixes[request.request_class]
        return chances

    @property
    def num_kv_used(self) -> int:
        """Tokens of the pool in use."""
        return self._rows.num_kv_tokens + self._num_prefilling_tokens

    @property
    def num_kv_free(self) -> int:
        """Tokens of the pool that are free."""
        return max(0, self._kv_pool_tokens - self.num_kv_used)

    @property
    def has_work(self) -> bool:
        """Whether a prompt waits to be computed."""
        return bool(self.waiting or self.prefilling)

    @property
    def next_at(self) -> float | None:
        """When the next request comes; None if none does by itself."""
        return None if self._next is None else self._next.arrived_at

    def receive(self, now: float) -> None:
        """Take what has come by now."""
        while self._next is not None and self._next.arrived_at <= now:
            self._take(self._next)
            self._next = next(self._requests, None)

    def _take(self, request: Request) -> None:
        self._classify(request)
        most = request.num_prompt_tokens + request.num_output_tokens + self._reserve
        if most > self._kv_pool_tokens and request.num_output_tokens < ENDLESS:
            assert not self._is_closed  # the next would be refused too, and so for ever
            self.num_refused += 1
        else:
            self.waiting.append(request)

    def compute(self, budget: int) -> int:
        """Spend tokens of a step on prompts, admitting as rows allow; returns those spent."""
        left = budget
        while left > 0 and (self.prefilling or self._admit()):
            request, missing = self.prefilling.popleft()
            chunk = min(missing, left)
            left -= chunk
            if chunk < missing:
                self.prefilling.appendleft((request, missing - chunk))
            else:
                self._prefilled.append(request)
        return budget - left

    def _admit(self) -> bool:
        num_rows = len(self._rows) + len(self._prefilled)
        if not self.waiting or num_rows >= self._max_rows:
            return False
        num_tokens = _num_tokens(self.waiting[0])
        if num_rows and self.num_kv_free < num_tokens + (num_rows + 1) * self._reserve:
            return False
        self.prefilling.append((self.waiting.popleft(), num_tokens))
        self._num_prefilling_tokens += num_tokens
        return True

    def join(self, now: float) -> None:
        """Requests whose prompt is done emit their first token, or their next, and are rows."""
        for request in self._prefilled:
            self._num_prefilling_tokens -= _num_tokens(request)
            request.num_emitted += 1
            self.num_first_tokens += 1
            if request.first_token_at < 0:
                request.first_token_at = now
            if request.num_emitted >= request.num_output_tokens:
                self._finish(request, now)
            else:
                self._rows.admit(request, self._chances(request))
        self._prefilled.clear()
        self._rows.settle()

    def end_rows(self, now: float) -> None:
        """Take away the rows that have emitted all of their tokens; `join` follows."""
        ended = self._rows.ended()
        if ended is not None:
            for request in self._rows.remove(ended):
                self._finish(request, now)

    def _finish(self, request: Request, now: float) -> None:
        self.finished.append((request, now))
        if self._is_closed:
            following = next(self._requests)
            following.arrived_at = now
            self._take(following)

    def make_room(self) -> None:
        """Preempt the youngest until every row has room for all that it may emit."""
        rows = self._rows
        while self.num_kv_free < len(rows) * self._reserve and len(rows) + len(self.prefilling) > 1:
            self.num_preempted += 1
            if self.prefilling:
                request, _ = self.prefilling.pop()
                self._num_prefilling_tokens -= _num_tokens(request)
            else:
                (request,) = rows.remove(np.array([len(rows) - 1]))
            self.waiting.appendleft(request)
        rows.settle()

    def change(self) -> None:
        """At an abrupt change the text of requests that are there changes, too."""
        while self._changes and self._changes[0] <= self.num_steps:
            self._changes.popleft()
            rows = self._rows.requests
            for request in (*rows, *self.waiting, *(request for request, _ in self.prefilling)):
                request.uniform = self._noise.uniform()
                self._classify(request)
            if rows:
                self._rows.redraw(np.array([self._chances(request) for request in rows]).T)


def _num_tokens(request: Request) -> int:
    """Tokens to prefill: the prompt, and what was emitted before a preemption."""
    return request.num_prompt_tokens + request.num_emitted
