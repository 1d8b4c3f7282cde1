"""The servicer: maps the attached worker's pool, and shows what happens to it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

from memory_agent.agent import Agent, Residency, Thresholds
from memory_agent.attachment import WIRE_RESIDENCIES, Attachment, residency_of
from memory_agent.cuda_memory import HANDLE_BYTES, UUID_BYTES
from memory_agent.layout import ArenaLayout
from memory_agent.pool import AgentPool, open_pool
from memory_agent.pool_files import PoolFiles
from nightjar import log
from nightjar.errors import InvalidRequest, NightjarError, NotPossibleNow
from nightjar.v1 import memory_pb2, memory_pb2_grpc

NUM_EVENTS = 64  # that the status shows
LET_GO_S = 10.0  # that a worker which gives way has to read the end of its stream
PAUSE_S = 30.0  # after a pool could not be mapped: its worker must not drive others out for nothing
ONE_EACH = "an agent serves one worker: start an agent for each, and name it by --memory-agent"


class MemoryServicer(memory_pb2_grpc.MemoryServiceServicer):
    """One worker at a time, so that what a worker lost with its stream is out of others' reach.

    A second one is refused. Only a worker whose draft is away, which therefore was attached
    before the agent or the stream was lost, takes the place of one whose draft is at home: the
    one could not draft without an agent, the other can.

    Args:
        thresholds: When the draft leaves and returns.
        shm_dir: Folder of the pools that may be mapped.
        reload_share: Part of the time in which a reload on a GPU copies.
    """

    def __init__(self, thresholds: Thresholds, shm_dir: str, reload_share: float) -> None:
        self.agent_id = f"agent-{uuid.uuid4().hex[:12]}"
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._thresholds = thresholds
        self._shm_dir, self._reload_share = shm_dir, reload_share
        self._holder = ""  # id of the worker whose pool is mapped, or about to be
        self._place_taken_from_s = -math.inf  # from then on a worker may take another's place
        self._objection = ""  # of the thresholds to a pool, the last one
        self._attachment: Attachment | None = None
        self._detaching: asyncio.Task[None] | None = None
        self._stopping = False
        self._past = memory_pb2.GetMemoryStatusResponse()  # sums of ended attachments
        self._events: deque[memory_pb2.MemoryEvent] = deque(maxlen=NUM_EVENTS)

    async def Attach(
        self, request_iterator: AsyncIterator[memory_pb2.AttachRequest], context: Any
    ) -> AsyncIterator[memory_pb2.AttachResponse]:
        """Serve a worker's stream until it ends or the agent stops."""
        first = await anext(aiter(request_iterator), None)
        if first is None or first.WhichOneof("message") != "handshake":
            raise InvalidRequest("message", "the first message must be the handshake")
        attachment = await self._attach(first.handshake)
        reading = asyncio.create_task(self._read(request_iterator, attachment))
        try:
            yield memory_pb2.AttachResponse(attached=memory_pb2.Attached(agent_id=self.agent_id))
            while (response := await attachment.outbox.get()) is not None:
                yield response
            if attachment.dropped:
                raise NotPossibleNow(attachment.dropped)
            if reading.done():
                reading.result()  # raises what the worker did wrong
        finally:
            reading.cancel()
            self._detaching = asyncio.create_task(self._detach(attachment, reading))
            await asyncio.shield(self._detaching)

    async def _attach(self, handshake: memory_pb2.PoolHandshake) -> Attachment:
        worker_id = handshake.worker_id
        if not worker_id:
            raise InvalidRequest("handshake.worker_id", "is empty")
        residency = residency_of("handshake.residency", handshake.residency)
        objection = self._thresholds.objection(handshake.num_base_blocks)
        if objection and handshake.num_base_blocks > 0:  # else no pool at all, as is told below
            if objection != self._objection:  # it asks again and again
                log.get().warning("declined", worker_id=worker_id, reason=objection)
            self._objection = objection
            raise NotPossibleNow(objection)
        agent = Agent(
            self._thresholds,
            num_base_blocks=handshake.num_base_blocks,
            num_extra_blocks=handshake.num_extra_blocks,
            residency=residency,
        )
        await self._make_room(worker_id, residency)
        self._check_running()
        self._holder = worker_id
        try:
            pool = await self._map(handshake)
        except BaseException:
            self._holder = ""
            self._place_taken_from_s = time.monotonic() + PAUSE_S
            raise

        def note(event: memory_pb2.MemoryEvent) -> None:
            event.unix_ms, event.worker_id = int(time.time() * 1000), worker_id
            self._events.append(event)

        self._attachment = Attachment(worker_id, pool, agent, note)
        state = WIRE_RESIDENCIES[agent.state]
        kind = memory_pb2.MEMORY_EVENT_KIND_ATTACHED
        note(memory_pb2.MemoryEvent(kind=kind, state=state))
        log.get().info("attached", worker_id=worker_id, draft=agent.state.value)
        return self._attachment

    async def _make_room(self, worker_id: str, residency: Residency) -> None:
        """Return once no worker is attached; one that is gives way as the class says."""
        self._check_running()
        while self._holder:
            held = self._attachment
            away = residency is not Residency.RESIDENT
            allowed = away and time.monotonic() >= self._place_taken_from_s
            if not allowed or held is None or not held.spare:
                raise NotPossibleNow(f"worker {self._holder!r} is attached; {ONE_EACH}")
            if not held.dropped:
                log.get().warning("a worker gives way", worker_id=held.worker_id, to=worker_id)
                held.drop(f"worker {worker_id!r} needs its draft back from this agent; {ONE_EACH}")
            try:
                await asyncio.wait_for(held.closed.wait(), LET_GO_S)
            except TimeoutError:
                raise NotPossibleNow(f"worker {held.worker_id!r} does not let go yet") from None

    async def _map(self, handshake: memory_pb2.PoolHandshake) -> AgentPool:
        """Map in a thread, since a GPU's pool takes seconds; nothing stays of it if cancelled."""
        mapping = asyncio.create_task(
            asyncio.to_thread(_open, handshake, self._shm_dir, self._reload_share)
        )
        try:
            pool = await asyncio.shield(mapping)
        except asyncio.CancelledError:
            with contextlib.suppress(NightjarError):
                (await mapping).close()
            raise
        try:
            self._check_running()
        except NotPossibleNow:
            pool.close()
            raise
        return pool

    def _check_running(self) -> None:
        if self._stopping:
            raise NotPossibleNow("the agent stops")

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
        agent = attachment.agent
        self._past.num_expansions += agent.num_expansions
        self._past.num_contractions += agent.num_contractions
        self._past.num_bytes_copied += attachment.num_bytes_copied
        self._events.append(
            memory_pb2.MemoryEvent(
                unix_ms=int(time.time() * 1000),
                kind=memory_pb2.MEMORY_EVENT_KIND_DETACHED,
                worker_id=attachment.worker_id,
                state=WIRE_RESIDENCIES[agent.state],
            )
        )
        self._attachment, self._holder = None, ""
        attachment.closed.set()
        log.get().info("detached", worker_id=attachment.worker_id)
        if attachment.device_lost and not self.failed.done():
            self.failed.set_result(attachment.device_lost)

    async def GetMemoryStatus(
        self, request: memory_pb2.GetMemoryStatusRequest, context: Any
    ) -> memory_pb2.GetMemoryStatusResponse:
        """Show the state; counts are since the agent's start."""
        attached = self._attachment
        pool_map = None
        if attached is not None and request.include_pool_map:
            pool_map = await attached.pool_map()
            if attached is not self._attachment:  # gone meanwhile, and its counts are in the past's
                attached, pool_map = self._attachment, None
        status = memory_pb2.GetMemoryStatusResponse(agent_id=self.agent_id, pool_map=pool_map)
        status.MergeFrom(self._past)
        status.events.extend(self._events)
        if attached is None:
            return status
        status.worker_id = attached.worker_id
        status.state = WIRE_RESIDENCIES[attached.agent.state]
        status.tau_low = attached.agent.leaves_below
        status.tau_high = attached.agent.returns_above
        status.num_expansions += attached.agent.num_expansions
        status.num_contractions += attached.agent.num_contractions
        status.num_bytes_copied += attached.num_bytes_copied
        if attached.pressure is not None:
            status.pressure.CopyFrom(attached.pressure)
        if attached.grant is not None:
            status.open_grant_ids.append(attached.grant.grant_id)
        return status

    async def stop(self) -> None:
        """Accept no worker any more; call off and answer the running grant, end the stream."""
        self._stopping = True
        if self._attachment is not None:
            await self._attachment.stop()


def _open(handshake: memory_pb2.PoolHandshake, shm_dir: str, reload_share: float) -> AgentPool:
    for name, size in (("cuda_ipc_handle", HANDLE_BYTES), ("cuda_device_uuid", UUID_BYTES)):
        if handshake.cuda_ipc_handle and len(getattr(handshake, name)) != size:
            raise InvalidRequest(f"handshake.{name}", f"must have {size} bytes")
    files = PoolFiles(
        arena_path=handshake.arena_path,
        image_path=handshake.image_path,
        image_sha256=handshake.image_sha256,
        cuda_ipc_handle=handshake.cuda_ipc_handle,
        cuda_device_uuid=handshake.cuda_device_uuid,
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
        return open_pool(layout, files, shm_dir, reload_share)
    except (OSError, ValueError) as error:
        raise NotPossibleNow(f"the pool cannot be mapped: {error}") from error
