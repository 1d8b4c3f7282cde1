"""Which calls are let in: a bounded queue, a drain that ends it, and the hint when to retry."""

from __future__ import annotations

import asyncio
import time

from nightjar.errors import InvalidRequest, Overloaded, Unavailable

# Calls whose answer is complete but unread stay open; they cost kilobytes each, not blocks.
MAX_OPEN_CALLS = 4096
_SMOOTHING = 0.2


class Admission:
    """Counts what is inside, every choice of a call as a request of its own.

    The engine never holds more than `max_running + max_waiting` requests, nor many more than
    `max_waiting_tokens` tokens of prompts whose answer has not begun.
    """

    def __init__(self, max_running: int, max_waiting: int, max_waiting_tokens: int) -> None:
        self.draining = False
        self.num_open = 0  # calls inside, read to the end or not
        self.num_live = 0  # choices that are not complete
        self.num_waiting_tokens = 0  # of prompts, for each choice without a token
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._max_waiting_tokens = max_waiting_tokens
        self._mean_seconds = 1.0  # of an answer, smoothed
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self, n: int = 1) -> Ticket:
        """Take a place for each of `n` choices, to be given back by `Ticket.leave`.

        Raises:
            InvalidRequest: There will never be so many places.
            Unavailable: The worker drains.
            Overloaded: The queue is full.
        """
        if self.draining:
            raise Unavailable("the worker is draining; send the request elsewhere")
        most = self._max_running + self._max_waiting
        if n > most:
            raise InvalidRequest("sampling.n", f"{n}; this worker admits at most {most} answers")
        if self.num_live + n > most:
            raise Overloaded(
                f"{self.num_live} requests are running or waiting; at most {most} are admitted",
                self.retry_after_s(),
            )
        if self.num_open >= MAX_OPEN_CALLS:
            raise Overloaded(f"{self.num_open} answers are left unread", self.retry_after_s())
        self.num_open += 1
        self.num_live += n
        self._idle.clear()
        return Ticket(self, n)

    def check_tokens(self, num_tokens: int) -> None:
        """Whether so many more tokens may wait; whatever finds nothing waiting may.

        Raises:
            Overloaded: Too many wait already.
        """
        waiting = self.num_waiting_tokens
        if waiting and waiting + num_tokens > self._max_waiting_tokens:
            raise Overloaded(
                f"prompts of {waiting} tokens are waiting; {num_tokens} more would exceed "
                f"{self._max_waiting_tokens}",
                self.retry_after_s(),
            )

    def retry_after_s(self) -> float:
        """Expected time until a place is free: an answer's mean time over the rows that run."""
        return min(30.0, max(0.1, self._mean_seconds / self._max_running))

    def completed(self, seconds: float | None) -> None:
        """A choice is complete, that long after its admission; None if it was given up."""
        self.num_live -= 1
        if seconds is not None:
            self._mean_seconds += _SMOOTHING * (seconds - self._mean_seconds)

    def left(self) -> None:
        """A call has ended."""
        self.num_open -= 1
        if self.num_open == 0:
            self._idle.set()

    async def wait_idle(self, timeout_s: float | None) -> int:
        """Wait until no call is inside, or for that long; returns how many still are."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return self.num_open
        return 0


class Place:
    """One choice's place; every end of it may be told more than once."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._since = time.monotonic()
        self._live = True
        self._num_waiting_tokens = 0

    def wait(self, num_tokens: int) -> None:
        """The prompt has so many tokens, and waits."""
        if self._live:
            self._num_waiting_tokens = num_tokens
            self._admission.num_waiting_tokens += num_tokens

    def started(self) -> None:
        """A token is there: the prompt waits no more."""
        self._admission.num_waiting_tokens -= self._num_waiting_tokens
        self._num_waiting_tokens = 0

    def complete(self, *, given_up: bool = False) -> None:
        """The choice is complete or given up: its place in the engine's queue is free."""
        self.started()
        if self._live:
            self._live = False
            self._admission.completed(None if given_up else time.monotonic() - self._since)


class Ticket:
    """One call's places; it may leave more than once."""

    def __init__(self, admission: Admission, n: int) -> None:
        self._admission = admission
        self._open = True
        self.places = [Place(admission) for _ in range(n)]

    def wait(self, num_prompt_tokens: int) -> None:
        """The prompt is known: it waits, once for each choice.

        Raises:
            Overloaded: Too many tokens wait already.
        """
        self._admission.check_tokens(num_prompt_tokens * len(self.places))
        for place in self.places:
            place.wait(num_prompt_tokens)

    def leave(self) -> None:
        """The call has ended."""
        for place in self.places:
            place.complete(given_up=True)
        if self._open:
            self._open = False
            self._admission.left()
