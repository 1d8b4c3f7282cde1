"""One `Attach` stream to the memory agent, for ever: its and the engine's messages, one to one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

import grpc

from nightjar import log
from nightjar.v1 import memory_pb2, memory_pb2_grpc, worker_pb2
from worker.front.reconnect import CONNECTING, first_of, keep_open
from worker.messages import (
    AgentLink,
    Grant,
    GrantAnswer,
    PoolInfo,
    PoolMap,
    PoolMapRequest,
    Pressure,
    RequestRefused,
    TransitionDone,
    TransitionRequest,
)

KINDS = {
    memory_pb2.TRANSITION_KIND_EXPAND: "expand",
    memory_pb2.TRANSITION_KIND_CONTRACT: "contract",
}
RESIDENCIES = {
    "none": worker_pb2.DRAFT_RESIDENCY_UNSPECIFIED,
    "resident": worker_pb2.DRAFT_RESIDENCY_RESIDENT,
    "offloading": worker_pb2.DRAFT_RESIDENCY_OFFLOADING,
    "offloaded": worker_pb2.DRAFT_RESIDENCY_OFFLOADED,
    "reloading": worker_pb2.DRAFT_RESIDENCY_RELOADING,
}

OWNERS = {
    "free": memory_pb2.BLOCK_OWNER_FREE,
    "row": memory_pb2.BLOCK_OWNER_ROW,
    "cached": memory_pb2.BLOCK_OWNER_CACHED,
    "granted": memory_pb2.BLOCK_OWNER_GRANTED,
    "draft": memory_pb2.BLOCK_OWNER_DRAFT,
}

FromEngine = Pressure | Grant | RequestRefused | TransitionDone | PoolMap
ToEngine = AgentLink | TransitionRequest | GrantAnswer | PoolMapRequest


class MemoryClient:
    """Keeps the stream open. Messages of a stream that is lost are void, since its grants are.

    Messages keep their order. Of pressure reports only the newest waits, and the others are as
    few as the agent's own requests.
    """

    def __init__(
        self, address: str, worker_id: str, pool: PoolInfo, to_engine: Callable[[ToEngine], None]
    ) -> None:
        self._address = address
        self._worker_id = worker_id
        self._pool = pool
        self._to_engine = to_engine
        self._stream = 0  # streams on which the agent has attached so far
        self._residency = "resident"
        self._waiting: deque[FromEngine] = deque()
        self._pressure: Pressure | None = None  # the newest, if it is in `_waiting`
        self._pending = asyncio.Event()
        self._attached = asyncio.Event()
        self._reason = CONNECTING

    @property
    def attached(self) -> bool:
        """Whether the agent has mapped the pool."""
        return self._attached.is_set()

    @property
    def reason(self) -> str:
        """Why no agent is attached; empty while one is."""
        return "" if self.attached else self._reason

    def _tell(self, reason: str) -> None:
        self._reason = reason

    def forward(self, message: FromEngine) -> None:
        """Take over a message for the agent; never waits."""
        if isinstance(message, Pressure):
            self._residency = message.residency
            if self._pressure is not None:
                self._waiting.remove(self._pressure)
            self._pressure = message
        elif not self.attached or (isinstance(message, Grant) and message.stream != self._stream):
            # To the engine such a grant ended with its stream; an agent must not act on it.
            return
        self._waiting.append(message)
        self._pending.set()

    async def run(self) -> None:
        """Keep the stream open until cancelled."""
        await keep_open("memory agent", self._address, self._serve, self._tell)

    async def _serve(self, channel: grpc.aio.Channel) -> bool:
        """One stream, from handshake to its end; whether the agent attached."""
        call: Any = memory_pb2_grpc.MemoryServiceStub(channel).Attach()
        was_attached = False
        try:
            handshake = handshake_proto(self._worker_id, self._pool, self._residency)
            await call.write(memory_pb2.AttachRequest(handshake=handshake))
            await first_of(self._read(call), self._write(call))
        finally:
            call.cancel()
            was_attached = self.attached
            self._waiting = deque([self._pressure] if self._pressure is not None else [])
            self._link(False)
        return was_attached

    async def _read(self, call: Any) -> None:
        while (response := await call.read()) is not grpc.aio.EOF:
            if response.WhichOneof("message") == "attached":
                self._link(True)
            elif self.attached:
                self._receive(response)

    async def _write(self, call: Any) -> None:
        await self._attached.wait()
        while True:
            while self._waiting:
                message = self._waiting.popleft()
                if message is self._pressure:
                    self._pressure = None
                await call.write(request_proto(message))
            self._pending.clear()
            await self._pending.wait()

    def _receive(self, response: memory_pb2.AttachResponse) -> None:
        if response.WhichOneof("message") == "answer":
            answer = response.answer
            self._to_engine(GrantAnswer(grant_id=answer.grant_id, ok=answer.ok, error=answer.error))
        elif response.WhichOneof("message") == "map_request":
            self._to_engine(PoolMapRequest())
        elif response.request.kind in KINDS:
            request = response.request
            self._to_engine(
                TransitionRequest(request_id=request.request_id, kind=KINDS[request.kind])
            )
        else:
            log.get().warning("ignored a message of the memory agent", message=str(response))

    def _link(self, attached: bool) -> None:
        if attached != self.attached:
            if attached:
                self._stream += 1
                self._attached.set()
            else:
                self._attached.clear()
            self._to_engine(AgentLink(connected=attached, stream=self._stream))
            log.get().info("memory agent", address=self._address, attached=attached)


def handshake_proto(worker_id: str, pool: PoolInfo, residency: str) -> memory_pb2.PoolHandshake:
    """Where the pool lies, for the agent's first message."""
    return memory_pb2.PoolHandshake(
        worker_id=worker_id,
        arena_path=pool.arena_path,
        arena_bytes=pool.arena_bytes,
        block_bytes=pool.block_bytes,
        num_base_blocks=pool.num_base_blocks,
        num_extra_blocks=pool.num_extra_blocks,
        image_path=pool.image_path,
        image_offset=pool.image_offset,
        image_bytes=pool.image_bytes,
        image_sha256=pool.image_sha256,
        residency=RESIDENCIES[residency],
        cuda_ipc_handle=pool.cuda_ipc_handle,
        cuda_device_uuid=pool.cuda_device_uuid,
    )


def request_proto(message: FromEngine) -> memory_pb2.AttachRequest:
    """One message of the engine, as it travels."""
    match message:
        case Pressure():
            fields = {n: getattr(message, n) for n in message.__struct_fields__ if n != "residency"}
            report = memory_pb2.PressureReport(residency=RESIDENCIES[message.residency], **fields)
            return memory_pb2.AttachRequest(pressure=report)
        case Grant():
            grant = memory_pb2.Grant(grant_id=message.grant_id)
            if message.kind == "copy":
                grant.copy.source_ids.extend(message.source_ids)
                grant.copy.destination_ids.extend(message.destination_ids)
            else:
                grant.load.SetInParent()
            return memory_pb2.AttachRequest(grant=grant)
        case RequestRefused():
            refused = memory_pb2.RequestRefused(
                request_id=message.request_id, reason=message.reason
            )
            return memory_pb2.AttachRequest(refused=refused)
        case TransitionDone():
            done = memory_pb2.TransitionDone(
                request_id=message.request_id, residency=RESIDENCIES[message.residency]
            )
            return memory_pb2.AttachRequest(done=done)
        case PoolMap():
            wire = memory_pb2.PoolMap(
                num_base_blocks=message.num_base_blocks, num_extra_blocks=message.num_extra_blocks
            )
            for first, count, owner in message.ranges:
                wire.ranges.add(first_block=first, num_blocks=count, owner=OWNERS[owner])
            return memory_pb2.AttachRequest(pool_map=wire)
