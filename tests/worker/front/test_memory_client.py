"""The memory client against an in-process agent, over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from conditions import until

from nightjar import rpc
from nightjar.v1 import memory_pb2 as pb
from nightjar.v1 import memory_pb2_grpc, worker_pb2
from worker.memory_client import MemoryClient
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

POOL = PoolInfo(
    arena_path="/dev/shm/arena",
    arena_bytes=1000,
    block_bytes=10,
    num_base_blocks=70,
    num_extra_blocks=30,
    image_path="/dev/shm/image",
    image_offset=700,
    image_bytes=300,
    image_sha256=b"x" * 32,
    cuda_ipc_handle=b"h" * 64,
    cuda_device_uuid=b"u" * 16,
)


def pressure(sequence: int, residency: str = "resident") -> Pressure:
    """A pressure report."""
    return Pressure(
        sequence=sequence,
        num_free_blocks=1,
        num_total_blocks=2,
        num_waiting=3,
        num_running=4,
        exploit_gamma=5,
        residency=residency,
    )


class Agent(memory_pb2_grpc.MemoryServiceServicer):
    """Keeps what it is sent, and sends what a test puts into `answers`; None hangs up."""

    def __init__(self) -> None:
        self.received: list[pb.AttachRequest] = []
        self.answers: asyncio.Queue[pb.AttachResponse | None] = asyncio.Queue()

    async def Attach(self, stream: Any, context: Any) -> AsyncIterator[pb.AttachResponse]:
        """Attach at once, then speak as the test says."""
        self.received.append(await anext(aiter(stream)))
        reader = asyncio.create_task(self._read(stream))
        try:
            yield pb.AttachResponse(attached=pb.Attached(agent_id="a1"))
            while (answer := await self.answers.get()) is not None:
                yield answer
        finally:
            reader.cancel()

    async def _read(self, stream: Any) -> None:
        async for request in stream:
            self.received.append(request)

    def kinds(self) -> list[str | None]:
        """Which messages came, in order."""
        return [request.WhichOneof("message") for request in self.received]


@asynccontextmanager
async def agent_at(address: str, agent: Agent) -> AsyncIterator[None]:
    """Serve an agent there."""
    server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
    memory_pb2_grpc.add_MemoryServiceServicer_to_server(agent, server)
    server.add_insecure_port(address)
    await server.start()
    try:
        yield
    finally:
        await server.stop(0)


@asynccontextmanager
async def client_of(address: str) -> AsyncIterator[tuple[MemoryClient, list[Any]]]:
    """A running client, and what it tells the engine."""
    told: list[Any] = []
    client = MemoryClient(address, "w1", POOL, told.append)
    task = asyncio.create_task(client.run())
    try:
        yield client, told
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_every_message_is_translated_one_to_one(tmp_path: Path) -> None:
    """The handshake describes the pool; each message of either side arrives as its counterpart."""
    agent = Agent()
    address = f"unix:{tmp_path}/agent.sock"
    async with agent_at(address, agent), client_of(address) as (client, told):
        await until(lambda: client.attached, "attached")
        assert told == [AgentLink(connected=True, stream=1)]
        client.forward(pressure(1))
        copy_blocks = Grant(
            grant_id=5, kind="copy", source_ids=[80, 81], destination_ids=[1, 2], stream=1
        )
        client.forward(copy_blocks)
        client.forward(Grant(grant_id=6, kind="load", stream=1))
        client.forward(RequestRefused(request_id=7, reason="busy"))
        client.forward(TransitionDone(request_id=8, residency="offloaded"))
        ranges = [(0, 60, "row"), (60, 5, "cached"), (65, 5, "free"), (70, 30, "draft")]
        client.forward(PoolMap(ranges=ranges, num_base_blocks=70, num_extra_blocks=30))
        await until(lambda: len(agent.received) == 7, "all came")
        kinds = ["handshake", "pressure", "grant", "grant", "refused", "done", "pool_map"]
        assert agent.kinds() == kinds
        hello, report, copy, load, refused, done, owners = agent.received
        assert hello.handshake.cuda_ipc_handle == b"h" * 64
        assert hello.handshake.cuda_device_uuid == b"u" * 16
        names = [pb.BlockOwner.Name(part.owner) for part in owners.pool_map.ranges]
        assert names == [f"BLOCK_OWNER_{name}" for name in ("ROW", "CACHED", "FREE", "DRAFT")]
        assert [p.first_block for p in owners.pool_map.ranges] == [0, 60, 65, 70]
        assert [p.num_blocks for p in owners.pool_map.ranges] == [60, 5, 5, 30]
        assert hello.handshake.worker_id == "w1"
        assert hello.handshake.image_sha256 == b"x" * 32
        assert hello.handshake.num_extra_blocks == 30
        assert hello.handshake.residency == worker_pb2.DRAFT_RESIDENCY_RESIDENT
        assert (report.pressure.sequence, report.pressure.exploit_gamma) == (1, 5)
        assert list(copy.grant.copy.source_ids) == [80, 81]
        assert list(copy.grant.copy.destination_ids) == [1, 2]
        assert load.grant.WhichOneof("work") == "load"
        assert refused.refused.reason == "busy"
        assert done.done.residency == worker_pb2.DRAFT_RESIDENCY_OFFLOADED
        for answer in (
            pb.AttachResponse(request=pb.TransitionRequest(request_id=9, kind=1)),
            pb.AttachResponse(request=pb.TransitionRequest(request_id=10, kind=2)),
            pb.AttachResponse(answer=pb.GrantAnswer(grant_id=5, ok=True)),
            pb.AttachResponse(answer=pb.GrantAnswer(grant_id=6, error="checksum")),
            pb.AttachResponse(request=pb.TransitionRequest(request_id=11, kind=0)),
            pb.AttachResponse(map_request=pb.PoolMapRequest()),
        ):
            await agent.answers.put(answer)
        await until(lambda: len(told) == 6, "all went to the engine")
        assert told[1:] == [
            TransitionRequest(request_id=9, kind="expand"),
            TransitionRequest(request_id=10, kind="contract"),
            GrantAnswer(grant_id=5, ok=True),
            GrantAnswer(grant_id=6, ok=False, error="checksum"),
            PoolMapRequest(),
        ]


async def test_a_lost_agent_is_told_and_attached_to_again(tmp_path: Path) -> None:
    """The loss reaches the engine; what belonged to the old stream is not sent on the new one."""
    agent = Agent()
    address = f"unix:{tmp_path}/agent.sock"
    async with client_of(address) as (client, told):
        client.forward(Grant(grant_id=1, kind="load"))  # no stream: void
        for sequence in range(50):
            client.forward(pressure(sequence, "offloaded"))
        async with agent_at(address, agent):
            await until(lambda: len(agent.received) == 2, "handshake and pressure")
            assert agent.received[0].handshake.residency == worker_pb2.DRAFT_RESIDENCY_OFFLOADED
            assert agent.received[1].pressure.sequence == 49
            await agent.answers.put(None)
            await until(lambda: len(told) == 3, "lost and attached again")
            # Made before the engine knew of the loss, delivered after the new stream opened.
            client.forward(Grant(grant_id=2, kind="load", stream=1))
            client.forward(Grant(grant_id=3, kind="load", stream=2))
            await until(lambda: len(agent.received) == 4, "the newer grant came")
            assert agent.received[3].grant.grant_id == 3
        await until(lambda: not client.attached, "the loss was seen")
        links = [message.connected for message in told]
        assert links == [True, False, True, False]
        assert agent.kinds() == ["handshake", "pressure", "handshake", "grant"]


async def test_a_newer_pressure_report_takes_the_place_of_one_that_waits(tmp_path: Path) -> None:
    """Order is kept: a report made after a grant is not sent before it, and old ones go."""
    agent = Agent()
    address = f"unix:{tmp_path}/agent.sock"
    async with agent_at(address, agent), client_of(address) as (client, _):
        await until(lambda: client.attached, "attached")
        client.forward(pressure(1))
        client.forward(TransitionDone(request_id=3, residency="offloaded"))
        client.forward(pressure(2, "offloaded"))
        await until(lambda: len(agent.received) == 3, "both came")
        assert agent.kinds() == ["handshake", "done", "pressure"]
        assert agent.received[2].pressure.sequence == 2
