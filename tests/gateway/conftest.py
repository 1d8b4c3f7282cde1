"""Fixtures of the gateway's tests: scripted workers, and a gateway in the test's own loop."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import grpc
import httpx
import openai
import pytest
import pytest_asyncio
from conditions import until
from fake_worker import FakeWorker

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


async def start_gateway(*workers: FakeWorker, ready: bool = True, **flags: object) -> Served:
    """Start a gateway over workers; unless told otherwise, all are ready when it returns."""
    values = {"probe_interval_ms": 20, "drain_timeout_s": 2.0, **flags}
    config = GatewayConfig(
        grpc_listen="127.0.0.1:0",
        http_listen="127.0.0.1:0",
        workers=tuple(worker.address for worker in workers),
        **values,  # type: ignore[arg-type]
    )
    gateway = Gateway(config)
    await gateway.start()
    if ready:
        found = gateway.registry.workers.values()
        await until(lambda: not any(worker.not_ready for worker in found), "all workers ready")
    return Served(gateway)


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
    """Start gateways over workers; they end with the test, before the workers."""
    started: list[Served] = []

    async def make(*workers: FakeWorker, **flags: object) -> Served:
        started.append(await start_gateway(*workers, **flags))  # type: ignore[arg-type]
        return started[-1]

    yield make
    for served in started:
        await served.close()


@pytest.fixture(autouse=True)
def no_broken_exchange(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No test may leave the HTTP server with an exception of the application."""
    yield
    records = [record for record in caplog.get_records("call") if record.name == "uvicorn.error"]
    assert [record for record in records if record.levelno >= logging.ERROR] == []


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[tuple[Served, FakeWorker]]:
    """A gateway over one scripted worker, for a module of tests that leave it as it was."""
    worker = await FakeWorker().start()
    served = await start_gateway(worker)
    yield served, worker
    await served.close()
    await worker.kill()


@pytest.fixture
async def worker(make_worker: Callable[..., Awaitable[FakeWorker]]) -> FakeWorker:
    """One scripted worker."""
    return await make_worker()


@pytest.fixture
async def served(worker: FakeWorker, make_gateway: Callable[..., Awaitable[Served]]) -> Served:
    """A gateway over that worker."""
    return await make_gateway(worker)
