"""One answer's way through the workers: call after call, until the client has all of it.

A worker that is lost, stands still or leaves is replaced. Until the client has something, any
worker will do; from then on only one whose arithmetic has the same fingerprint, which goes on
where the answer broke off, bit for bit.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import grpc

from gateway.continuity import Answer, Call, NotTheSame
from gateway.merging import merged
from gateway.registry import Registry, Worker
from gateway.worker_client import Stream, WorkerFailed, lost
from nightjar import log
from nightjar.errors import Unavailable
from nightjar.v1 import generation_pb2 as pb

LEAST_RETRY_S, MOST_RETRY_S = 0.05, 1.0  # between two questions to workers that are full
# Codes by which a worker declines to go on with an answer; another one may take it.
_DECLINES = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.FAILED_PRECONDITION,  # its arithmetic is another one by now
    grpc.StatusCode.INVALID_ARGUMENT,  # its context is smaller
    grpc.StatusCode.UNIMPLEMENTED,
)


@dataclass
class Notes:
    """What happened to an answer on its way."""

    num_resumptions: int = 0
    best_effort: bool = False  # resumed where bits depend on the batch: near-ties may differ


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """How long and how often an answer may look for workers."""

    max_attempts: int  # calls that a choice may need, the first included
    resume_timeout_s: float  # for a worker that is full, once an answer has begun


class Attempts:
    """The calls of one answer.

    Args:
        answer: What the client has of it.
        choose: The worker for a fingerprint, without those excluded; None if there is none.
        registry: Told of workers that are lost.
        bounds: See there.
        deadline: When the client stops waiting, by the loop's clock; None: never.
        notes: Filled in.
    """

    def __init__(
        self,
        answer: Answer,
        *,
        choose: Callable[[str, set[str]], Worker | None],
        registry: Registry,
        bounds: Bounds,
        deadline: float | None,
        notes: Notes,
    ) -> None:
        self._answer = answer
        self._choose = choose
        self._registry = registry
        self._bounds = bounds
        self._deadline = deadline
        self._notes = notes
        self._time = asyncio.get_running_loop().time

    async def run(self) -> AsyncGenerator[pb.GenerateResponse]:
        """Stream the answer.

        Raises:
            WorkerFailed: A worker's error that no other worker would mend, or the last one's
                where none has begun the answer.
            Unavailable: The answer broke off and no worker can go on with it.
        """
        async with aclosing(self._carry(_Way())) as responses:
            async for response in responses:
                yield response
        if not self._answer.complete:
            yield pb.GenerateResponse(usage=self._answer.usage())

    async def _carry(self, way: _Way) -> AsyncGenerator[pb.GenerateResponse]:
        """Messages of one choice, or of all, until there are no more."""
        answer = self._answer
        while unfinished := answer.unfinished(way.choice):
            if answer.begun and way.choice is None:
                # What each choice still lacks is a request of its own.
                rests = [self._carry(way.of_choice(choice)) for choice in unfinished]
                async with aclosing(merged(rests)) as responses:
                    async for response in responses:
                        yield response
                return
            worker = await self._next_worker(way)
            stream, call = self._begin(worker, way)
            try:
                with worker.answering(stream, answer.num_choices if way.choice is None else 1):
                    async with aclosing(stream.responses()) as responses:
                        async for response in responses:
                            taken = answer.take(call, response)
                            if taken is not None:
                                way.brought = True
                                yield taken
                failure = lost("the worker ended the answer before it was complete")
            except NotTheSame as error:
                failure = lost(str(error))
            except WorkerFailed as error:
                failure = error
                if error.lost:
                    await self._registry.suspect(worker)
            if answer.unfinished(way.choice):
                self._turn_from(worker, failure, way)

    async def _next_worker(self, way: _Way) -> Worker:
        """The worker to ask; waits a while where all that could go on are full.

        Raises:
            WorkerFailed, Unavailable: There is none.
        """
        answer, failure = self._answer, way.failure
        if way.num_calls < self._bounds.max_attempts:
            while True:
                worker = self._choose(answer.fingerprint, way.excluded)
                if worker is not None:
                    return worker
                if not way.full or self._time() >= way.waits_until:
                    break
                await asyncio.sleep(way.retry_after_s)
                way.excluded -= way.full
                way.full.clear()
        if failure is None:
            raise Unavailable("no worker is ready; try again in a moment")
        if not answer.begun or failure.broke:
            raise failure
        if way.num_calls < self._bounds.max_attempts:
            reason = "no other worker with the same arithmetic can go on with the answer now"
        else:
            reason = f"the answer broke off at {way.num_calls} workers, and no more are asked"
        raise Unavailable(f"{failure}; {reason}")

    def _begin(self, worker: Worker, way: _Way) -> tuple[Stream, Call]:
        """Call a worker for the answer, or for the rest of it."""
        answer = self._answer
        way.brought = False
        way.num_calls += 1
        if answer.begun:
            assert way.choice is not None
            way.num_resumptions += 1
            call = answer.rest(way.choice, way.num_resumptions)
            self._note_resumption(worker, way)
        else:
            call = answer.whole(worker.limits.max_model_len)
        remaining = None if self._deadline is None else self._deadline - self._time()

        def replaceable() -> bool:
            if answer.begun and not answer.resumable:
                return False
            excluded = way.excluded_after(worker)
            asked = way.num_calls < self._bounds.max_attempts
            return asked and self._choose(answer.fingerprint, excluded) is not None

        return worker.client.generate(call.request, remaining, replaceable), call

    def _note_resumption(self, worker: Worker, way: _Way) -> None:
        free = worker.status.arithmetic.mode == "free"
        self._notes.num_resumptions += 1
        self._notes.best_effort |= free
        assert way.choice is not None
        log.get().warning(
            "an answer goes on at another worker",
            worker=worker.address,
            choice=way.choice,
            num_tokens=self._answer.num_tokens(way.choice),
            exact=not free,
            error=str(way.failure),
        )

    def _turn_from(self, worker: Worker, failure: WorkerFailed, way: _Way) -> None:
        """Note what a call ended with, for the next one.

        Raises:
            WorkerFailed: No other worker would do better.
        """
        answer = self._answer
        if not answer.begun:
            elsewhere = failure.gone or failure.full
        elif way.brought:
            # Of all that ran on an engine that broke, one may be to blame: that one breaks the
            # next too, and no third.
            elsewhere = answer.resumable and (failure.gone or (failure.broke and not way.broke))
            way.broke |= failure.broke
        else:
            elsewhere = failure.code in _DECLINES
        if not elsewhere:
            raise failure
        way.failure = failure
        way.excluded = way.excluded_after(worker)
        if not answer.begun:
            log.get().warning("trying another worker", lost=worker.address, error=str(failure))
        elif failure.full:
            # An answer that has begun does not fail because others came first: it waits.
            way.num_calls -= 1
            way.num_resumptions -= 1
            way.full.add(worker.address)
            way.retry_after_s = min(MOST_RETRY_S, max(LEAST_RETRY_S, failure.retry_after_s))
            way.waits_until = way.waits_until or self._time() + self._bounds.resume_timeout_s
        else:
            way.waits_until = 0.0


@dataclass
class _Way:
    """Where a choice, or an answer with all its choices, stands."""

    choice: int | None = None
    num_calls: int = 0
    num_resumptions: int = 0
    brought: bool = False  # the last call brought something
    broke: bool = False  # an engine broke under it
    failure: WorkerFailed | None = None  # of the last call
    excluded: set[str] = field(default_factory=set)  # addresses not to ask
    full: set[str] = field(default_factory=set)  # of these, those to ask again in a while
    retry_after_s: float = 0.0
    waits_until: float = 0.0  # 0: nobody was full

    def of_choice(self, choice: int) -> _Way:
        """The same, for one of all choices."""
        return replace(self, choice=choice, excluded=set(self.excluded), full=set())

    def excluded_after(self, worker: Worker) -> set[str]:
        """Addresses not to ask after a call to `worker`: what failed before it may be back."""
        return {worker.address} if self.brought else self.excluded | {worker.address}
