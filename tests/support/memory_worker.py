"""A worker's end of the `Attach` stream, with a real arena and image, for tests of the agent."""

from __future__ import annotations

import asyncio
import hashlib
import random
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from memory_agent.arena import SharedFile
from memory_agent.checksum import image_digest
from memory_agent.layout import ArenaLayout
from nightjar.rpc import dial
from nightjar.v1 import memory_pb2, memory_pb2_grpc, worker_pb2

IMAGE_BYTES = (5 << 20) + 123  # two pieces of a load


class PoolStub:
    """An arena in which no two blocks are equal, and an image of seeded bytes."""

    def __init__(self, folder: Path, num_base_blocks: int = 64) -> None:
        self.layout = ArenaLayout(
            block_bytes=65_536,
            draft_block_bytes=4_096,
            image_bytes=IMAGE_BYTES,
            num_base_blocks=num_base_blocks,
        )
        name = uuid.uuid4().hex
        layout = self.layout
        self.arena = SharedFile(str(folder / f"arena-{name}"), layout.num_bytes, create=True)
        self.image = SharedFile(str(folder / f"image-{name}"), layout.image_bytes, create=True)
        self.image.memory[:] = random.Random(1).randbytes(layout.image_bytes)
        self.sha256 = image_digest(memoryview(self.image.memory))
        rng = random.Random(2)
        for block in range(layout.num_base_blocks + layout.num_extra_blocks):
            self.write(block, rng.randbytes(layout.block_bytes))

    @property
    def tail(self) -> range:
        """Ids of the tail's blocks."""
        base = self.layout.num_base_blocks
        return range(base, base + self.layout.num_extra_blocks)

    def write(self, block: int, content: bytes) -> None:
        """Fill a block."""
        start = self.layout.block_offset(block)
        self.arena.memory[start : start + len(content)] = content

    def digests(self) -> list[bytes]:
        """SHA-256 of every block, head and tail."""
        size, memory = self.layout.block_bytes, self.arena.memory
        return [
            hashlib.sha256(memory[start : start + size]).digest()
            for start in range(0, self.layout.num_bytes, size)
        ]

    def loaded(self) -> bool:
        """Whether the tail holds the image."""
        start = self.layout.image_offset
        held = self.arena.memory[start : start + self.layout.image_bytes]
        return image_digest(memoryview(held)) == self.sha256

    def handshake(
        self, residency: str | int = "RESIDENT", **changes: Any
    ) -> memory_pb2.PoolHandshake:
        """What a worker announces."""
        fields = {
            "worker_id": "worker-1",
            "arena_path": self.arena.path,
            "arena_bytes": self.layout.num_bytes,
            "block_bytes": self.layout.block_bytes,
            "num_base_blocks": self.layout.num_base_blocks,
            "num_extra_blocks": self.layout.num_extra_blocks,
            "image_path": self.image.path,
            "image_offset": self.layout.image_offset,
            "image_bytes": self.layout.image_bytes,
            "image_sha256": self.sha256,
            "residency": wire(residency) if isinstance(residency, str) else residency,
        }
        return memory_pb2.PoolHandshake(**{**fields, **changes})

    def close(self) -> None:
        """Unmap and unlink."""
        self.arena.close()
        self.image.close()


def wire(residency: str) -> worker_pb2.DraftResidency:
    """A residency's number by its short name."""
    return worker_pb2.DraftResidency.Value(f"DRAFT_RESIDENCY_{residency}")


class AttachRefused(Exception):
    """The agent's code and sentence."""


class Attached:
    """An open stream."""

    def __init__(self, call: Any, agent_id: str) -> None:
        self.call, self.agent_id = call, agent_id
        self._num_reports = 0
        self._num_grants = 0

    async def send(self, **message: Any) -> None:
        """Send one message."""
        await self.call.write(memory_pb2.AttachRequest(**message))

    async def receive(self) -> memory_pb2.AttachResponse:
        """The next message of the agent; EOFError if the stream ends instead."""
        response = await asyncio.wait_for(self.call.read(), 30)
        if not isinstance(response, memory_pb2.AttachResponse):
            raise EOFError("the stream ended")
        return response

    async def press(self, free: int, total: int, residency: str, **more: int) -> None:
        """Send a pressure report."""
        self._num_reports += 1
        report = memory_pb2.PressureReport(
            sequence=self._num_reports,
            num_free_blocks=free,
            num_total_blocks=total,
            residency=wire(residency),
            **more,
        )
        await self.send(pressure=report)

    async def request(self, free: int, total: int, residency: str) -> memory_pb2.TransitionRequest:
        """Report three times, then take what the agent asks for."""
        for _ in range(3):
            await self.press(free, total, residency)
        response = await self.receive()
        assert response.HasField("request"), response
        return response.request

    async def grant(self, **work: Any) -> memory_pb2.GrantAnswer:
        """Grant work and wait for its answer."""
        self._num_grants += 1
        await self.send(grant=memory_pb2.Grant(grant_id=self._num_grants, **work))
        response = await self.receive()
        assert response.answer.grant_id == self._num_grants, response
        return response.answer

    async def copy(self, sources: list[int], destinations: list[int]) -> memory_pb2.GrantAnswer:
        """Grant a copy of blocks."""
        copy = memory_pb2.CopyBlocks(source_ids=sources, destination_ids=destinations)
        return await self.grant(copy=copy)

    async def load(self) -> memory_pb2.GrantAnswer:
        """Grant the load of the image."""
        return await self.grant(load=memory_pb2.LoadImage())

    async def done(self, request_id: int, residency: str) -> None:
        """Say that a transition is through."""
        done = memory_pb2.TransitionDone(request_id=request_id, residency=wire(residency))
        await self.send(done=done)


class MemoryWorker:
    """A channel to an agent."""

    def __init__(self, address: str) -> None:
        self.channel = dial(address)
        self.stub = memory_pb2_grpc.MemoryServiceStub(self.channel)

    async def status(self, *, pool_map: bool = False) -> memory_pb2.GetMemoryStatusResponse:
        """The agent's own status."""
        request = memory_pb2.GetMemoryStatusRequest(include_pool_map=pool_map)
        response = await self.stub.GetMemoryStatus(request, wait_for_ready=True, timeout=30)
        assert isinstance(response, memory_pb2.GetMemoryStatusResponse)
        return response

    @asynccontextmanager
    async def attach(self, handshake: memory_pb2.PoolHandshake) -> AsyncIterator[Attached]:
        """Open the stream; leaving the block cancels it. Raises AttachRefused."""
        call: Any = self.stub.Attach(wait_for_ready=True)
        try:
            await call.write(memory_pb2.AttachRequest(handshake=handshake))
            try:
                response = await asyncio.wait_for(call.read(), 30)
            except grpc.aio.AioRpcError as error:
                raise AttachRefused(f"{error.code().name}: {error.details()}") from None
            yield Attached(call, response.attached.agent_id)
        finally:
            call.cancel()
