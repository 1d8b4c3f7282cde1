"""A front's life: start, readiness, drain, and the end of its engine."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from calls import answer, asked, health, refusal
from conditions import until
from grpc_health.v1 import health_pb2

from nightjar.errors import ConfigError, EngineFailure, ModelRefused
from nightjar.v1 import worker_pb2

FrontMaker = Callable[..., Any]


async def test_drain_refuses_new_calls_and_lets_the_others_finish(front: FrontMaker) -> None:
    """While draining: UNAVAILABLE for new calls, NOT_SERVING, and the answer inside completes."""
    async with front("--tick-ms=20") as worker:
        await until(lambda: _health_is(worker, health_pb2.HealthCheckResponse.SERVING), "ready")
        running = asyncio.create_task(answer(worker, asked(max_tokens=60)))
        await until(lambda: len(worker.told("Submit")) == 1, "the request is inside")
        late = await worker.worker.Drain(worker_pb2.DrainRequest(timeout_ms=50))
        assert late.num_unfinished == 1
        error = await refusal(worker, asked())
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        assert "draining" in error.details()
        not_serving = health_pb2.HealthCheckResponse.NOT_SERVING
        await until(lambda: _health_is(worker, not_serving), "not ready")
        assert (await worker.worker.Drain(worker_pb2.DrainRequest())).num_unfinished == 0
        assert (await running)[-1].usage.num_completion_tokens == 60
        assert not worker.task.done()


async def _health_is(worker: Any, status: int) -> bool:
    return await health(worker) == status


async def test_before_the_engine_is_ready_calls_are_refused(front: FrontMaker) -> None:
    """A starting worker answers its status, is not ready, and refuses requests."""
    async with front("--start-s=1000", until_ready=False) as worker:
        await until(lambda: _says(worker, pid=True), "it answers")
        error = await refusal(worker, asked())
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        assert not await worker.accepting()
        assert await health(worker) == health_pb2.HealthCheckResponse.NOT_SERVING


async def _says(worker: Any, *, pid: bool) -> bool:
    return bool((await worker.status()).pid) == pid


async def test_an_engine_that_dies_fails_its_streams_and_the_front(front: FrontMaker) -> None:
    """Every stream ends with INTERNAL, and the front ends with status 1."""
    async with front("--tick-ms=20", "--die-at=10") as worker:
        errors = await asyncio.gather(*(refusal(worker, asked()) for _ in range(3)))
        assert {error.code() for error in errors} == {grpc.StatusCode.INTERNAL}
        assert "the engine" in errors[0].details()
        assert await asyncio.wait_for(worker.task, 20) == 1


async def test_a_wedged_engine_is_not_ready(front: FrontMaker) -> None:
    """Silence beyond the limit turns health to NOT_SERVING while the status goes on answering."""
    async with front("--wedge-at=3", progress_timeout_s=0.5) as worker:
        await until(lambda: _health_is(worker, health_pb2.HealthCheckResponse.SERVING), "ready")
        call = worker.generation.Generate(asked())
        await until(
            lambda: _health_is(worker, health_pb2.HealthCheckResponse.NOT_SERVING), "not ready"
        )
        status = await worker.status()
        assert status.progress_age_ms >= 500
        assert not status.accepting
        call.cancel()


@pytest.mark.parametrize(
    ("kind", "error"),
    [("ConfigError", ConfigError), ("ModelRefused", ModelRefused), ("object", EngineFailure)],
)
async def test_a_refused_start_is_raised_by_its_class(
    front: FrontMaker, kind: str, error: type[Exception]
) -> None:
    """The front ends with the error that the engine named, and its sentence."""
    async with front(f"--refuse={kind}", until_ready=False) as worker:
        with pytest.raises(error, match="no good"):
            await asyncio.wait_for(worker.task, 20)


def test_the_front_loads_no_torch() -> None:
    """Importing the worker's front leaves torch out."""
    code = "import sys, worker.main; print('torch' in sys.modules, 'transformers' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert run.stdout.split() == ["False", "False"]
