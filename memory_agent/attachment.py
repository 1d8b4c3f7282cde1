"""One worker's stream: feeds the state machine, and works off grants in a thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

from memory_agent import failpoint
from memory_agent.agent import Agent, Pressure, Request, Residency
from memory_agent.checksum import ChecksumMismatch
from memory_agent.pool import AgentPool
from memory_agent.pool_files import DeviceLost
from memory_agent.remap import Aborted, MoveRefused
from nightjar import log
from nightjar.errors import InvalidRequest
from nightjar.v1 import memory_pb2, worker_pb2

_RESIDENCIES = {
    worker_pb2.DRAFT_RESIDENCY_RESIDENT: Residency.RESIDENT,
    worker_pb2.DRAFT_RESIDENCY_OFFLOADING: Residency.OFFLOADING,
    worker_pb2.DRAFT_RESIDENCY_OFFLOADED: Residency.OFFLOADED,
    worker_pb2.DRAFT_RESIDENCY_RELOADING: Residency.RELOADING,
}
WIRE_RESIDENCIES = {residency: wire for wire, residency in _RESIDENCIES.items()}
_KINDS = {
    "expand": memory_pb2.TRANSITION_KIND_EXPAND,
    "contract": memory_pb2.TRANSITION_KIND_CONTRACT,
}
_ASKED = {
    "expand": memory_pb2.MEMORY_EVENT_KIND_ASKED_TO_EXPAND,
    "contract": memory_pb2.MEMORY_EVENT_KIND_ASKED_TO_CONTRACT,
}
MAP_TIMEOUT_S = 1.0


class Attachment:
    """Its pool, its state machine and the grant that is open.

    Args:
        worker_id: Of the worker.
        pool: Mapped.
        agent: Of this worker alone.
        note: Takes an event, without time and worker.
    """

    def __init__(
        self,
        worker_id: str,
        pool: AgentPool,
        agent: Agent,
        note: Callable[[memory_pb2.MemoryEvent], None],
    ) -> None:
        self.worker_id = worker_id
        self.agent = agent
        self.pressure: memory_pb2.PressureReport | None = None
        self.num_bytes_copied = 0
        self.grant: memory_pb2.Grant | None = None
        self.device_lost = ""  # why the process must end
        self.dropped = ""  # why the stream ends although the worker did nothing wrong
        self.closed = asyncio.Event()
        # None ends the stream.
        self.outbox: asyncio.Queue[memory_pb2.AttachResponse | None] = asyncio.Queue()
        self._pool = pool
        self._note = note
        self._aborted = threading.Event()
        self._work: asyncio.Task[None] | None = None
        self._map: asyncio.Future[memory_pb2.PoolMap] | None = None  # that was asked for

    @property
    def spare(self) -> bool:
        """Whether this worker needs nothing of the agent now: its draft is at home, and stays."""
        at_home = self.agent.state is Residency.RESIDENT and self.agent.open_request is None
        return at_home and self.grant is None

    def drop(self, reason: str) -> None:
        """End the stream with a sentence; `closed` is set once the pool is unmapped."""
        self.dropped = reason
        self.outbox.put_nowait(None)

    def on_message(self, message: memory_pb2.AttachRequest) -> None:
        """Take one message of the worker.

        Raises:
            InvalidRequest: The message makes no sense here.
        """
        kind = message.WhichOneof("message")
        if kind == "pressure":
            self._on_pressure(message.pressure)
        elif kind == "grant":
            self._on_grant(message.grant)
        elif kind == "refused":
            refused = message.refused
            log.get().info("worker refused", reason=refused.reason)
            self.agent.on_refused(refused.request_id, time.monotonic())
            self._add(memory_pb2.MEMORY_EVENT_KIND_REFUSED, refused.request_id, refused.reason)
        elif kind == "done":
            done = message.done
            reached = residency_of("done.residency", done.residency)
            self.agent.on_done(done.request_id, reached, time.monotonic())
            log.get().info("transition done", draft=self.agent.state.value)
            self._add(memory_pb2.MEMORY_EVENT_KIND_DONE, done.request_id)
        elif kind == "pool_map":
            if self._map is not None and not self._map.done():
                self._map.set_result(message.pool_map)
        else:
            raise InvalidRequest("message", f"{kind or 'nothing'} is not expected here")

    async def pool_map(self) -> memory_pb2.PoolMap | None:
        """Ask the worker who owns which block; None if it does not say so in time."""
        if self._map is None or self._map.done():
            self._map = asyncio.get_running_loop().create_future()
            request = memory_pb2.PoolMapRequest()
            self.outbox.put_nowait(memory_pb2.AttachResponse(map_request=request))
        await asyncio.wait([self._map], timeout=MAP_TIMEOUT_S)
        return self._map.result() if self._map.done() else None

    def _on_pressure(self, report: memory_pb2.PressureReport) -> None:
        pressure = Pressure(
            num_free_blocks=report.num_free_blocks,
            num_total_blocks=report.num_total_blocks,
            num_waiting=report.num_waiting,
            exploit_gamma=report.exploit_gamma,
            residency=residency_of("pressure.residency", report.residency),
        )
        if not 0 <= pressure.num_free_blocks <= pressure.num_total_blocks:
            raise InvalidRequest("pressure.num_free_blocks", "must lie in [0, num_total_blocks]")
        self.pressure = report
        request = self.agent.on_pressure(pressure, time.monotonic())
        if request is not None:
            log.get().info(f"asking to {request.kind}", free_blocks=report.num_free_blocks)
            self._add(_ASKED[request.kind], request.request_id)
            failpoint.reached("agent.before_request")
            self.outbox.put_nowait(_request(request))

    def _on_grant(self, grant: memory_pb2.Grant) -> None:
        if grant.WhichOneof("work") is None:
            raise InvalidRequest("grant.work", "is missing")
        if self.grant is not None:
            error = f"grant {self.grant.grant_id} is still open"
            self._send(memory_pb2.GrantAnswer(grant_id=grant.grant_id, error=error))
            return
        self.grant = grant
        if grant.WhichOneof("work") == "load":
            self.agent.on_load_granted()
        self._work = asyncio.create_task(self._perform(grant))

    async def _perform(self, grant: memory_pb2.Grant) -> None:
        answer = await asyncio.to_thread(self._work_off, grant)
        kind = memory_pb2.MEMORY_EVENT_KIND_COPIED
        if grant.WhichOneof("work") == "load":
            kind = memory_pb2.MEMORY_EVENT_KIND_LOADED
            self.agent.on_load_answered(answer.ok)
        self.num_bytes_copied += answer.num_bytes
        self.grant = None
        self._send(answer)
        tell = log.get().info if answer.ok else log.get().warning
        tell("grant answered", grant_id=answer.grant_id, ok=answer.ok, error=answer.error,
             num_bytes=answer.num_bytes, elapsed_us=answer.elapsed_us)  # fmt: skip
        self._add(kind, answer.grant_id, answer.error, answer)
        if self.device_lost:
            self.outbox.put_nowait(None)

    def _work_off(self, grant: memory_pb2.Grant) -> memory_pb2.GrantAnswer:
        """Do what the grant allows and nothing else, in a thread; any failure is an answer."""
        started = time.perf_counter()
        answer = memory_pb2.GrantAnswer(grant_id=grant.grant_id)
        failpoint.reached("agent.before_work")
        try:
            if grant.WhichOneof("work") == "copy":
                sources, destinations = (
                    list(grant.copy.source_ids),
                    list(grant.copy.destination_ids),
                )
                answer.num_bytes = self._pool.copy(sources, destinations, self._aborted.is_set)
            else:
                answer.num_bytes = self._pool.load(self._aborted.is_set)
            answer.ok = True
        except Aborted:
            answer.error = "the agent stops"
        except (MoveRefused, ChecksumMismatch) as error:
            answer.error = str(error)
        except DeviceLost as error:
            self.device_lost = answer.error = f"the GPU failed: {error}"
        except Exception as error:  # an unanswered grant would stay open for ever
            log.get().error("unexpected error in a grant", exc_info=error)
            answer.error = "internal error; see the agent's log"
        failpoint.reached("agent.before_answer")
        answer.elapsed_us = int((time.perf_counter() - started) * 1e6)
        return answer

    def _send(self, answer: memory_pb2.GrantAnswer) -> None:
        self.outbox.put_nowait(memory_pb2.AttachResponse(answer=answer))

    def _add(
        self,
        kind: memory_pb2.MemoryEventKind.ValueType,
        number: int,
        reason: str = "",
        answer: memory_pb2.GrantAnswer | None = None,
    ) -> None:
        event = memory_pb2.MemoryEvent(kind=kind, id=number, reason=reason)
        event.state = WIRE_RESIDENCIES[self.agent.state]
        if answer is not None:
            event.num_bytes, event.elapsed_us = answer.num_bytes, answer.elapsed_us
        self._note(event)

    async def stop(self) -> None:
        """Call off the running grant between two pieces, answer it, and end the stream."""
        self._aborted.set()
        if self._work is not None:
            await asyncio.wait([self._work])
        self.outbox.put_nowait(None)

    async def close(self) -> None:
        """Stop, then unmap: afterwards this worker's memory is out of reach."""
        await self.stop()
        try:
            await asyncio.to_thread(self._pool.close)
        except DeviceLost as error:
            self.device_lost = str(error)


def residency_of(field: str, wire: int) -> Residency:
    """A residency from the wire; InvalidRequest if it is none."""
    if wire not in _RESIDENCIES:
        raise InvalidRequest(field, "must say where the draft is")
    return _RESIDENCIES[worker_pb2.DraftResidency.ValueType(wire)]


def _request(request: Request) -> memory_pb2.AttachResponse:
    wire = memory_pb2.TransitionRequest(request_id=request.request_id, kind=_KINDS[request.kind])
    return memory_pb2.AttachResponse(request=wire)
