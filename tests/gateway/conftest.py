"""Fixtures of the gateway's tests: scripted workers, and a gateway in the test's own loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import httpx
import openai
import pytest
from fake_worker import FakeWorker, until

from gateway.config import GatewayConfig
from gateway.main import Gateway
from nightjar import rpc
from nightjar.v1 import generation_pb2_grpc


class Served:
    """A running gateway with clients for both of its protocols."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.url = f"http://{gateway.http_address}"
        self.http = httpx.AsyncClient(base_url=self.url, timeout=20)
        self.openai = openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)
        self.channel: grpc.aio.Channel = rpc.dial(gateway.grpc_address)
        self.grpc = generation_pb2_grpc.GenerationServiceStub(self.channel)

    async def close(self) -> None:
        """Close the clients, then the gateway."""
        await self.http.aclose()
        await self.openai.close()
        await self.channel.close()
        await self.gateway.stop()


@pytest.fixture
async def make_worker() -> AsyncIterator[Callable[..., Awaitable[FakeWorker]]]:
    """Start scripted workers; they end with the test."""
    workers: list[FakeWorker] = []

    async def make(**script: object) -> FakeWorker:
        workers.append(FakeWorker(**script))  # type: ignore[arg-type]
        return await workers[-1].start()

    yield make
    for worker in workers:
        worker.resume.set()
        await worker.kill()


@pytest.fixture
async def make_gateway(
    make_worker: Callable[..., Awaitable[FakeWorker]],
) -> AsyncIterator[Callable[..., Awaitable[Served]]]:
    """Start gateways over workers; each is ready, unless told otherwise, when it is returned."""
    started: list[Served] = []

    async def make(*workers: FakeWorker, ready: bool = True, **flags: object) -> Served:
        values = {"probe_interval_ms": 20, "drain_timeout_s": 2.0, **flags}
        config = GatewayConfig(
            grpc_listen="127.0.0.1:0",
            http_listen="127.0.0.1:0",
            workers=tuple(worker.address for worker in workers),
            **values,  # type: ignore[arg-type]
        )
        gateway = Gateway(config)
        await gateway.start()
        started.append(Served(gateway))
        if ready:
            await until(lambda: not any(w.not_ready for w in gateway.registry.workers.values()))
        return started[-1]

    yield make
    for served in started:
        await served.close()


@pytest.fixture
async def worker(make_worker: Callable[..., Awaitable[FakeWorker]]) -> FakeWorker:
    """One scripted worker."""
    return await make_worker()


@pytest.fixture
async def served(
    worker: FakeWorker, make_gateway: Callable[..., Awaitable[Served]]
) -> Served:
    """A gateway over that worker."""
    return await make_gateway(worker)
