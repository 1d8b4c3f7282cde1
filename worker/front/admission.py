"""Which calls are let in: a bounded queue, a drain that ends it, and the hint when to retry."""

from __future__ import annotations

import asyncio
import time

from nightjar.errors import Overloaded, Unavailable

# Calls whose answer is complete but unread stay open; they cost kilobytes each, not blocks.
MAX_OPEN_CALLS = 4096
_SMOOTHING = 0.2


class Admission:
    """Counts the calls inside: the engine never holds more than `max_running + max_waiting`."""

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self.draining = False
        self.num_open = 0  # calls inside, read to the end or not
        self.num_live = 0  # of these, calls whose answer is not complete
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._mean_seconds = 1.0  # of an answer, smoothed
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self) -> Ticket:
        """Take a place, to be given back by `Ticket.leave`.

        Raises:
            Unavailable: The worker drains.
            Overloaded: The queue is full.
        """
        if self.draining:
            raise Unavailable("the worker is draining; send the request elsewhere")
        most = self._max_running + self._max_waiting
        if self.num_live >= most:
            raise Overloaded(
                f"{self.num_live} requests are running or waiting; at most {most} are admitted",
                self.retry_after_s(),
            )
        if self.num_open >= MAX_OPEN_CALLS:
            raise Overloaded(f"{self.num_open} answers are left unread", self.retry_after_s())
        self.num_open += 1
        self.num_live += 1
        self._idle.clear()
        return Ticket(self)

    def retry_after_s(self) -> float:
        """Expected time until a place is free: an answer's mean time over the rows that run."""
        return min(30.0, max(0.1, self._mean_seconds / self._max_running))

    def completed(self, seconds: float | None) -> None:
        """An answer is complete, that long after its admission; None if it was given up."""
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


class Ticket:
    """One call's place; both its ends may be told more than once."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._since = time.monotonic()
        self._live = self._open = True

    def complete(self, *, given_up: bool = False) -> None:
        """The answer is complete or given up: the place in the engine's queue is free."""
        if self._live:
            self._live = False
            self._admission.completed(None if given_up else time.monotonic() - self._since)

    def leave(self) -> None:
        """The call has ended."""
        self.complete(given_up=True)
        if self._open:
            self._open = False
            self._admission.left()
