"""A worker's front in this process, on a unix socket, with a fake engine process behind it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import fake_engine
import pytest
from conditions import until
from worker_process import Worker, worker_of

from nightjar import rpc
from nightjar.v1 import generation_pb2_grpc, worker_pb2, worker_pb2_grpc
from worker import main
from worker.config import WorkerConfig


class Front:
    """Handles on a running front."""

    def __init__(self, address: str, log: Path, task: asyncio.Task[int]) -> None:
        self.address, self.task, self._log = address, task, log
        self.channel = rpc.dial(address)
        self.generation = generation_pb2_grpc.GenerationServiceStub(self.channel)
        self.worker = worker_pb2_grpc.WorkerServiceStub(self.channel)

    def told(self, kind: str) -> list[str]:
        """What the engine was told, of one kind."""
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        return [line for line in lines if line.split()[0] == kind]

    async def status(self) -> worker_pb2.GetWorkerStatusResponse:
        """The worker's status."""
        return await self.worker.GetWorkerStatus(worker_pb2.GetWorkerStatusRequest())

    async def accepting(self) -> bool:
        """Whether it admits requests."""
        return (await self.status()).accepting


FrontMaker = Callable[..., AbstractAsyncContextManager[Front]]


@pytest.fixture
def front(tmp_path: Path, tiny: object) -> FrontMaker:
    """Make a front: `front("--tick-ms=5", max_waiting=1)` is an async context manager."""

    @asynccontextmanager
    async def make(
        *engine_flags: str, until_ready: bool = True, **fields: object
    ) -> AsyncIterator[Front]:
        config = WorkerConfig(
            **{  # type: ignore[arg-type]
                "listen": f"unix:{tmp_path}/worker.sock",
                "model": str(tiny.target),  # type: ignore[attr-defined]
                "served_model_name": "tiny",
                "proposer": "none",
                **fields,
            }
        )
        log = tmp_path / "engine.log"
        command = [sys.executable, fake_engine.__file__, f"--log={log}", *engine_flags]
        task = asyncio.create_task(main.serve(config, command))
        handle = Front(config.listen, log, task)
        try:
            if until_ready:
                await until(handle.accepting, "the front admits requests", task)
            yield handle
        finally:
            await handle.channel.close()
            if not task.done():
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    return make


@pytest.fixture(scope="package")
def worker(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """One real worker for the tests that leave it as it was."""
    with worker_of(tiny, tmp_path_factory.mktemp("worker")) as made:
        yield made
