"""Sends a workload, open or closed loop, and keeps what came of each request."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from planner_service.load.endpoint import Answer, Endpoint, RequestFailed, Wish
from planner_service.load.workload import Ask

PROGRESS_S = 2.0
_LAG_EVERY_S = 0.01


@dataclass(slots=True, kw_only=True)
class Record:
    """A request and its answer; times in seconds since the start of the run."""

    ask: Ask
    answer: Answer
    sent_s: float
    ended_s: float = math.nan
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When a run sends no more; requests that run then are waited for."""

    num_requests: int  # 0: without limit
    seconds: float  # 0: without limit
    num_clients: int  # requests at any time; 0: an open loop, which sends when they are due
    timeout_s: float  # of one request


@dataclass(slots=True, kw_only=True)
class Run:
    """All that a run gave."""

    records: list[Record] = field(default_factory=list)
    num_cut: int = 0  # still running when the run was stopped
    steady_end_s: float = 0.0  # of a closed loop over so many seconds: before clients ran out
    total_s: float = 0.0
    lags_s: list[float] = field(default_factory=list)  # of this client's own event loop
    interrupted: bool = False


class Load:
    """One run against one endpoint."""

    def __init__(
        self, endpoint: Endpoint, wish: Wish, limits: Limits, say: Callable[[str], None]
    ) -> None:
        self._endpoint, self._wish, self._limits, self._say = endpoint, wish, limits, say
        self._run = Run()
        self._running: set[asyncio.Task[None]] = set()
        self._begin = 0.0
        self._stop = asyncio.Event()

    def stop(self) -> None:
        """Send no more, wait for nothing."""
        self._run.interrupted = True
        self._stop.set()

    async def run(self, asks: Iterator[Ask]) -> Run:
        """Send until a limit or `stop`, then wait for what runs, unless it was `stop`."""
        self._begin, steady_s = time.perf_counter(), 0.0
        watchers = [asyncio.create_task(self._progress()), asyncio.create_task(self._lag())]
        try:
            if self._limits.num_clients:
                await self._closed(asks)
            else:
                await self._open(asks)
            steady_s = self._now()
            while self._running and not self._stop.is_set():
                await self._first_of(*self._running)
        finally:
            self._run.total_s = self._run.steady_end_s = self._now()
            if self._limits.num_clients and self._limits.seconds and not self._stop.is_set():
                self._run.steady_end_s = steady_s
            self._run.num_cut = len(self._running)
            for task in (*watchers, *self._running):
                task.cancel()
            await asyncio.gather(*watchers, *self._running, return_exceptions=True)
        return self._run

    async def _closed(self, asks: Iterator[Ask]) -> None:
        """A request for each client, and the next one when it has ended."""
        while not self._done():
            ask = next(asks, None)
            if ask is None:
                return
            self._send(ask)
            while len(self._running) >= self._limits.num_clients and not self._done():
                await self._first_of(*self._running, until=self._limits.seconds)

    async def _open(self, asks: Iterator[Ask]) -> None:
        """Each request when it is due, however many run."""
        for ask in asks:
            if self._done() or (self._limits.seconds and ask.due_s >= self._limits.seconds):
                return
            while (wait := ask.due_s - self._now()) > 0 and not self._stop.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), wait)
            if self._stop.is_set():
                return
            self._send(ask)

    def _done(self) -> bool:
        """Whether nothing more is to be sent."""
        limits, sent = self._limits, len(self._run.records)
        return (
            self._stop.is_set()
            or (limits.num_requests > 0 and sent >= limits.num_requests)
            or (limits.seconds > 0 and self._now() >= limits.seconds)
        )

    def _send(self, ask: Ask) -> None:
        record = Record(ask=ask, answer=Answer(), sent_s=self._now())
        self._run.records.append(record)
        task = asyncio.create_task(self._one(record))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _one(self, record: Record) -> None:
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                await self._endpoint.ask(record.ask, self._wish, record.answer)
        except RequestFailed as error:
            record.error = str(error)
        except TimeoutError:
            record.error = f"no complete answer within {self._limits.timeout_s:g} s"
        record.ended_s = self._now()
        pieces = record.answer.piece_times
        pieces[:] = [at - self._begin for at in pieces]

    async def _first_of(self, *tasks: asyncio.Task[None], until: float = 0.0) -> None:
        """Wait until a task ends, the run is stopped, or `until` seconds after the start."""
        stopped = asyncio.create_task(self._stop.wait())
        left = max(0.0, until - self._now()) if until else None
        try:
            await asyncio.wait((*tasks, stopped), timeout=left, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()

    def _now(self) -> float:
        return time.perf_counter() - self._begin

    async def _progress(self) -> None:
        before = 0
        while True:
            await asyncio.sleep(PROGRESS_S)
            records = self._run.records
            ended = [r for r in records if not math.isnan(r.ended_s)]
            tokens = sum(r.answer.num_tokens for r in ended)
            failed = sum(bool(r.error) for r in ended)
            rate = (tokens - before) / PROGRESS_S
            before = tokens
            self._say(
                f"{self._now():6.1f} s: {len(ended) - failed} done, {len(self._running)} running, "
                f"{failed} failed; {rate:.0f} tokens/s in answers that ended"
            )

    async def _lag(self) -> None:
        """How late this process wakes: what it adds to latencies by being busy itself."""
        while True:
            begin = time.perf_counter()
            await asyncio.sleep(_LAG_EVERY_S)
            self._run.lags_s.append(time.perf_counter() - begin - _LAG_EVERY_S)
