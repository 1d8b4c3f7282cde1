"""The engine client against a fake engine process, without gRPC."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import fake_engine
import pytest
from conditions import until

from nightjar.errors import ConfigError, EngineFailure, Overloaded, Unavailable
from worker.front.admission import Admission
from worker.front.engine_client import EngineClient
from worker.front.engine_process import remove_left_files
from worker.messages import SamplingParams

Maker = Callable[..., AbstractAsyncContextManager[EngineClient]]


@pytest.fixture
def started(tmp_path: Path) -> Maker:
    """Make a client whose engine is ready."""

    @asynccontextmanager
    async def make(
        *flags: str, max_unread_bytes: int = 4000, progress_timeout_s: float = 5
    ) -> AsyncIterator[EngineClient]:
        command = [sys.executable, fake_engine.__file__, f"--log={tmp_path}/log", *flags]
        client = EngineClient(
            command,
            stream_interval_ms=20,
            progress_timeout_s=progress_timeout_s,
            max_unread_bytes=max_unread_bytes,
        )
        try:
            await client.start()
            yield client
        finally:
            await client.stop(5)

    return make


def sampling(max_tokens: int) -> SamplingParams:
    """Greedy parameters."""
    return SamplingParams(temperature=0, seed=1, max_tokens=max_tokens)


async def test_a_slow_reader_ends_its_own_stream_alone(started: Maker, tmp_path: Path) -> None:
    """Beyond its bound a stream fails, its request is aborted, and the neighbour is complete."""
    async with started("--tick-ms=1", max_unread_bytes=200) as client:
        slow, neighbour = (client.submit([5, 6], sampling(200)) for _ in range(2))
        got: list[int] = []
        finished = None
        while finished is None:
            batch = await asyncio.wait_for(neighbour.read(), 20)
            finished = batch.finished
            got += batch.token_ids
        assert len(got) == 200
        with pytest.raises(Overloaded, match="slow reader"):
            await slow.read()
        log = tmp_path / "log"
        await until(lambda: f"Abort {slow.request_id}" in log.read_text(), "the abort arrived")
        assert f"Abort {neighbour.request_id}" not in log.read_text()
        assert client.num_requests == 0


async def test_closing_a_stream_twice_aborts_once(started: Maker, tmp_path: Path) -> None:
    """A finished request is not aborted, and an abort is sent once."""
    async with started() as client:
        with client.submit([5], sampling(1)) as stream:
            await stream.read()
        with client.submit([5], sampling(500)) as other:
            await other.read()
            other.close()
        log = tmp_path / "log"
        await until(lambda: "Abort" in log.read_text(), "the abort arrived")
        assert log.read_text().count("Abort(") == 1
        with pytest.raises(Unavailable, match="cancelled"):
            await other.read()


async def test_stop_ends_a_deaf_engine_too(started: Maker) -> None:
    """An engine that hears nothing is killed; its streams end, and nothing can be submitted."""
    async with started("--wedge-at=1", progress_timeout_s=0.5) as client:
        stream = client.submit([5], sampling(5))
        await until(lambda: client.progress_age_s > 0.5, "silent")
        assert not client.responsive
        begin = time.monotonic()
        await client.stop(60)
        assert time.monotonic() - begin < 20
        with pytest.raises(EngineFailure):
            await stream.read()
        with pytest.raises(Unavailable):
            client.submit([5], sampling(5))


async def test_a_killed_engine_is_told_as_killed(started: Maker) -> None:
    """Its streams say which signal it was, although its socket ends first and by a reset."""
    async with started("--wedge-at=1", progress_timeout_s=0.5) as client:
        stream = client.submit([5], sampling(5))
        await until(lambda: not client.responsive, "silent")
        client.submit([6], sampling(5))  # unread: the kernel resets the connection
        os.kill(client.pid, signal.SIGKILL)
        with pytest.raises(EngineFailure, match=r"^the engine was killed by signal 9; the answer"):
            await stream.read()
        assert not client.serving


async def test_an_engine_that_cannot_serve_leaves_by_itself(tmp_path: Path) -> None:
    """After its refusal it gets the time that it takes to end, and no signal."""
    flags = [f"--log={tmp_path}/log", "--refuse=ConfigError", "--leave-s=0.7"]
    client = EngineClient(
        [sys.executable, fake_engine.__file__, *flags], stream_interval_ms=0, progress_timeout_s=5
    )
    with pytest.raises(ConfigError, match="no good"):
        await client.start()
    await client.stop(20)
    assert await client.wait_gone() == "the engine ended with status 1"


async def test_an_engine_that_never_connects_is_a_failed_start() -> None:
    """A process that ends before it is ready is an error with its status; the socket is gone."""
    client = EngineClient(
        [sys.executable, "-c", "raise SystemExit(3)"], stream_interval_ms=0, progress_timeout_s=5
    )
    with pytest.raises(EngineFailure, match="status 3 before it was ready"):
        await client.start()
    await client.stop(5)


def test_files_of_a_killed_engine_are_removed(tmp_path: Path) -> None:
    """Files with the engine's pid in their name go; those of another stay."""
    for name in ("nightjar-41-arena-a", "nightjar-41-image-b", "nightjar-412-arena-c", "other"):
        (tmp_path / name).touch()
    remove_left_files(str(tmp_path), 41)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["nightjar-412-arena-c", "other"]


async def test_admission_counts_each_call_once() -> None:
    """Completing and leaving may be told in any order, any number of times."""
    admission = Admission(1, 0, 10)
    ticket = admission.enter()
    with pytest.raises(Overloaded) as caught:
        admission.enter()
    assert 0.1 <= caught.value.retry_after_s <= 30
    (place,) = ticket.places
    place.complete()
    place.complete()
    other = admission.enter()  # the answer is complete, though its client still reads
    assert (admission.num_live, admission.num_open) == (1, 2)
    for _ in range(2):
        other.leave()
        ticket.leave()
    assert (admission.num_live, admission.num_open) == (0, 0)
    assert await admission.wait_idle(0.1) == 0
    admission.draining = True
    with pytest.raises(Unavailable):
        admission.enter()
