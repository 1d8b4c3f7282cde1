"""The servicer: maps the attached worker's pool, feeds the state machine, works off grants."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from memory_agent import failpoint
from memory_agent.agent import Agent, Pressure, Request, Residency, Thresholds
from memory_agent.layout import ArenaLayout
from memory_agent.pool import Pool, PoolFiles
from memory_agent.reload import ChecksumMismatch
from memory_agent.remap import Aborted, MoveRefused
from nightjar import log
from nightjar.errors import InvalidRequest, NotPossibleNow, NotServed
from nightjar.v1 import memory_pb2, memory_pb2_grpc, worker_pb2

_RESIDENCIES = {
    worker_pb2.DRAFT_RESIDENCY_RESIDENT: Residency.RESIDENT,
    worker_pb2.DRAFT_RESIDENCY_OFFLOADING: Residency.OFFLOADING,
    worker_pb2.DRAFT_RESIDENCY_OFFLOADED: Residency.OFFLOADED,
    worker_pb2.DRAFT_RESIDENCY_RELOADING: Residency.RELOADING,
}
_WIRE_RESIDENCIES = {residency: wire for wire, residency in _RESIDENCIES.items()}
_KINDS = {
    "expand": memory_pb2.TRANSITION_KIND_EXPAND,
    "contract": memory_pb2.TRANSITION_KIND_CONTRACT,
}


class Attachment:
    """One worker's stream: its pool, its state machine and the grant that is open."""

    def __init__(self, worker_id: str, pool: Pool, agent: Agent) -> None:
        self.worker_id = worker_id
        self.agent = agent
        self.pressure: memory_pb2.PressureReport | None = None
        self.num_bytes_copied = 0
        self.grant: memory_pb2.Grant | None = None
        # None ends the stream.
        self.outbox: asyncio.Queue[memory_pb2.AttachResponse | None] = asyncio.Queue()
        self._pool = pool
        self._aborted = threading.Event()
        self._work: asyncio.Task[None] | None = None

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
            log.get().info("worker refused", reason=message.refused.reason)
            self.agent.on_refused(message.refused.request_id, time.monotonic())
        elif kind == "done":
            done = message.done
            self.agent.on_done(done.request_id, _residency("done.residency", done.residency))
            log.get().info("transition done", draft=self.agent.state.value)
        else:
            raise InvalidRequest("message", f"{kind or 'nothing'} is not expected here")

    def _on_pressure(self, report: memory_pb2.PressureReport) -> None:
        pressure = Pressure(
            num_free_blocks=report.num_free_blocks,
            num_total_blocks=report.num_total_blocks,
            num_waiting=report.num_waiting,
            exploit_gamma=report.exploit_gamma,
            residency=_residency("pressure.residency", report.residency),
        )
        if not 0 <= pressure.num_free_blocks <= pressure.num_total_blocks:
            raise InvalidRequest("pressure.num_free_blocks", "must lie in [0, num_total_blocks]")
        self.pressure = report
        request = self.agent.on_pressure(pressure, time.monotonic())
        if request is not None:
            log.get().info(f"asking to {request.kind}", free_blocks=report.num_free_blocks)
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
        if grant.WhichOneof("work") == "load":
            self.agent.on_load_answered(answer.ok)
        self.num_bytes_copied += answer.num_bytes
        self.grant = None
        note = log.get().info if answer.ok else log.get().warning
        note("grant answered", grant_id=answer.grant_id, ok=answer.ok, error=answer.error,
             num_bytes=answer.num_bytes, elapsed_us=answer.elapsed_us)  # fmt: skip
        self._send(answer)

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
        except Exception as error:  # an unanswered grant would stay open for ever
            log.get().error("unexpected error in a grant", exc_info=error)
            answer.error = "internal error; see the agent's log"
        failpoint.reached("agent.before_answer")
        answer.elapsed_us = int((time.perf_counter() - started) * 1e6)
        return answer

    def _send(self, answer: memory_pb2.GrantAnswer) -> None:
        self.outbox.put_nowait(memory_pb2.AttachResponse(answer=answer))

    async def stop(self) -> None:
        """Call off the running grant between two pieces, answer it, and end the stream."""
        self._aborted.set()
        if self._work is not None:
            await asyncio.wait([self._work])
        self.outbox.put_nowait(None)

    async def close(self) -> None:
        """Stop, then unmap: afterwards this worker's memory is out of reach."""
        await self.stop()
        self._pool.close()


class MemoryServicer(memory_pb2_grpc.MemoryServiceServicer):
    """One worker at a time."""

    def __init__(self, thresholds: Thresholds, shm_dir: str) -> None:
        self.agent_id = f"agent-{uuid.uuid4().hex[:12]}"
        self._thresholds = thresholds
        self._shm_dir = shm_dir
        self._attachment: Attachment | None = None
        self._detaching: asyncio.Task[None] | None = None
        self._stopping = False
        self._past = memory_pb2.GetMemoryStatusResponse()  # sums of ended attachments

    async def Attach(
        self, request_iterator: AsyncIterator[memory_pb2.AttachRequest], context: Any
    ) -> AsyncIterator[memory_pb2.AttachResponse]:
        """Serve a worker's stream until it ends or the agent stops."""
        first = await anext(aiter(request_iterator), None)
        if first is None or first.WhichOneof("message") != "handshake":
            raise InvalidRequest("message", "the first message must be the handshake")
        attachment = self._attach(first.handshake)
        reading = asyncio.create_task(self._read(request_iterator, attachment))
        try:
            yield memory_pb2.AttachResponse(attached=memory_pb2.Attached(agent_id=self.agent_id))
            while (response := await attachment.outbox.get()) is not None:
                yield response
            if reading.done():
                reading.result()  # raises what the worker did wrong
        finally:
            reading.cancel()
            self._detaching = asyncio.create_task(self._detach(attachment, reading))
            await asyncio.shield(self._detaching)

    def _attach(self, handshake: memory_pb2.PoolHandshake) -> Attachment:
        if self._stopping:
            raise NotPossibleNow("the agent stops")
        if self._attachment is not None:
            raise NotPossibleNow(f"worker {self._attachment.worker_id!r} is attached")
        if not handshake.worker_id:
            raise InvalidRequest("handshake.worker_id", "is empty")
        agent = Agent(
            self._thresholds,
            num_extra_blocks=handshake.num_extra_blocks,
            residency=_residency("handshake.residency", handshake.residency),
        )
        self._attachment = Attachment(handshake.worker_id, _map(handshake, self._shm_dir), agent)
        log.get().info("attached", worker_id=handshake.worker_id, draft=agent.state.value)
        return self._attachment

    async def _read(
        self, requests: AsyncIterator[memory_pb2.AttachRequest], attachment: Attachment
    ) -> None:
        try:
            async for message in requests:
                attachment.on_message(message)
        finally:
            attachment.outbox.put_nowait(None)

    async def _detach(self, attachment: Attachment, reading: asyncio.Task[None]) -> None:
        await asyncio.gather(reading, return_exceptions=True)
        await attachment.close()
        self._past.num_expansions += attachment.agent.num_expansions
        self._past.num_contractions += attachment.agent.num_contractions
        self._past.num_bytes_copied += attachment.num_bytes_copied
        self._attachment = None
        log.get().info("detached", worker_id=attachment.worker_id)

    async def GetMemoryStatus(
        self, request: memory_pb2.GetMemoryStatusRequest, context: Any
    ) -> memory_pb2.GetMemoryStatusResponse:
        """Show the state; counts are since the agent's start."""
        status = memory_pb2.GetMemoryStatusResponse(agent_id=self.agent_id)
        status.MergeFrom(self._past)
        attached = self._attachment
        if attached is None:
            return status
        status.worker_id = attached.worker_id
        status.state = _WIRE_RESIDENCIES[attached.agent.state]
        status.num_expansions += attached.agent.num_expansions
        status.num_contractions += attached.agent.num_contractions
        status.num_bytes_copied += attached.num_bytes_copied
        if attached.pressure is not None:
            status.pressure.CopyFrom(attached.pressure)
            status.tau_low = self._thresholds.num_blocks(attached.pressure.num_total_blocks)
        if attached.grant is not None:
            status.open_grant_ids.append(attached.grant.grant_id)
        return status

    async def stop(self) -> None:
        """Accept no worker any more; call off and answer the running grant, end the stream."""
        self._stopping = True
        if self._attachment is not None:
            await self._attachment.stop()


def _map(handshake: memory_pb2.PoolHandshake, shm_dir: str) -> Pool:
    if handshake.cuda_ipc_handle:
        raise NotServed("handshake.cuda_ipc_handle", "pools on a GPU are not served yet")
    files = PoolFiles(
        arena_path=handshake.arena_path,
        image_path=handshake.image_path,
        image_sha256=handshake.image_sha256,
    )
    try:
        layout = ArenaLayout.of_pool(
            arena_bytes=handshake.arena_bytes,
            block_bytes=handshake.block_bytes,
            num_base_blocks=handshake.num_base_blocks,
            num_extra_blocks=handshake.num_extra_blocks,
            image_offset=handshake.image_offset,
            image_bytes=handshake.image_bytes,
        )
        return Pool(layout, files, shm_dir)
    except (OSError, ValueError) as error:
        raise NotPossibleNow(f"the pool cannot be mapped: {error}") from error


def _residency(field: str, wire: int) -> Residency:
    if wire not in _RESIDENCIES:
        raise InvalidRequest(field, "must say where the draft is")
    return _RESIDENCIES[worker_pb2.DraftResidency.ValueType(wire)]


def _request(request: Request) -> memory_pb2.AttachResponse:
    wire = memory_pb2.TransitionRequest(request_id=request.request_id, kind=_KINDS[request.kind])
    return memory_pb2.AttachResponse(request=wire)
