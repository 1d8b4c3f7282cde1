"""Who may attach to the agent, with which handshake, and what becomes of the one before."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import grpc
import pytest
from agent_process import is_detached, start_agent, until
from memory_worker import IMAGE_BYTES, AttachRefused, MemoryWorker, PoolStub
from processes import Command, alive

from memory_agent.arena import is_written_elsewhere
from nightjar.v1 import memory_pb2


async def test_a_second_worker_is_refused(agent: str, pool: PoolStub) -> None:
    """One worker at a time; the next may attach once the pool of the first is unmapped."""
    worker = MemoryWorker(agent)
    sentence = r"FAILED_PRECONDITION.*'worker-1' is attached; an agent serves one worker"
    async with worker.attach(pool.handshake()) as stream:
        assert is_written_elsewhere(pool.arena.path)
        with pytest.raises(AttachRefused, match=sentence):
            async with worker.attach(pool.handshake(worker_id="worker-2")):
                pass
        request = await stream.request(2, 64, "RESIDENT")  # the first is as it was
        with pytest.raises(AttachRefused, match=sentence):  # its draft leaves just now
            async with worker.attach(pool.handshake("RELOADING", worker_id="worker-2")):
                pass
        await stream.done(request.request_id, "OFFLOADED")
    await is_detached(worker)
    assert not is_written_elsewhere(pool.arena.path)
    async with worker.attach(pool.handshake(worker_id="worker-2")):
        pass
    await is_detached(worker)


async def test_a_worker_without_its_draft_goes_first(shm: Path) -> None:
    """Left in a reload by an agent that died, it is not kept from the next by one in no need."""
    first, second = PoolStub(shm), PoolStub(shm)
    command, address = start_agent(shm, "agent.mid_load")
    with command:
        async with MemoryWorker(address).attach(first.handshake("RELOADING")) as stream:
            with pytest.raises((EOFError, grpc.aio.AioRpcError)):
                await stream.load()
    command, address = start_agent(shm)
    worker = MemoryWorker(address)
    with command:
        async with (
            worker.attach(second.handshake(worker_id="worker-2")) as idle,
            worker.attach(first.handshake("RELOADING")) as stream,
        ):
            assert await idle.call.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert "'worker-1' needs its draft back" in await idle.call.details()
            assert not is_written_elsewhere(second.arena.path)
            assert (await stream.load()).ok
            assert first.loaded()
    first.close()
    second.close()


async def test_a_bad_pool_drives_nobody_out_for_long(shm: Path, pool: PoolStub) -> None:
    """A place given up to a worker whose pool cannot be mapped is not given up again."""
    command, address = start_agent(shm)
    worker = MemoryWorker(address)
    bad = pool.handshake("OFFLOADED", worker_id="worker-2", arena_path="/etc/passwd")
    with command:
        async with worker.attach(pool.handshake()) as stream:
            with pytest.raises(AttachRefused, match="cannot be mapped"):
                async with worker.attach(bad):
                    pass
            assert await stream.call.code() is grpc.StatusCode.FAILED_PRECONDITION
        async with worker.attach(pool.handshake()) as stream:
            with pytest.raises(AttachRefused, match="'worker-1' is attached"):
                async with worker.attach(bad):
                    pass
            await stream.press(50, 64, "RESIDENT")
            await until(worker, lambda status: status.pressure.num_free_blocks == 50)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"arena_bytes": 4096}, "FAILED_PRECONDITION.*arena_bytes is 4096"),
        ({"num_extra_blocks": 1}, "FAILED_PRECONDITION.*num_extra_blocks is 1"),
        ({"image_offset": 12345}, "FAILED_PRECONDITION.*image_offset is 12345"),
        ({"num_base_blocks": 0}, "FAILED_PRECONDITION.*must be positive"),
        ({"block_bytes": -1}, "FAILED_PRECONDITION.*must be positive"),
        ({"image_sha256": b"short"}, "FAILED_PRECONDITION.*image_sha256"),
        ({"arena_path": "/etc/passwd"}, "FAILED_PRECONDITION.*--shm-dir"),
        ({"arena_path": "../arena"}, "FAILED_PRECONDITION.*--shm-dir"),
        ({"arena_path": ""}, "FAILED_PRECONDITION.*--shm-dir"),
        ({"arena_path": "/\0"}, "FAILED_PRECONDITION.*"),
        ({"image_path": "/dev/null"}, "FAILED_PRECONDITION.*--shm-dir"),
        ({"cuda_ipc_handle": b"x"}, "INVALID_ARGUMENT.*cuda_ipc_handle: must have 64 bytes"),
        ({"cuda_ipc_handle": b"x" * 64}, "INVALID_ARGUMENT.*cuda_device_uuid: must have 16 bytes"),
        (
            {"cuda_ipc_handle": b"x" * 64, "cuda_device_uuid": b"u" * 16},
            "FAILED_PRECONDITION.*pools on a GPU cannot be mapped here",
        ),
        ({"worker_id": ""}, "INVALID_ARGUMENT.*worker_id"),
        ({"residency": 0}, "INVALID_ARGUMENT.*residency"),
        ({"residency": 77}, "INVALID_ARGUMENT.*residency"),
    ],
)
async def test_bad_handshakes(
    agent: str, pool: PoolStub, changes: dict[str, Any], sentence: str
) -> None:
    """A wrong handshake is refused with a sentence, maps nothing, and harms nobody after it."""
    worker = MemoryWorker(agent)
    with pytest.raises(AttachRefused, match=sentence):
        async with worker.attach(pool.handshake(**changes)):
            pass
    assert not is_written_elsewhere(pool.arena.path)
    async with worker.attach(pool.handshake()):
        pass
    await is_detached(worker)


async def test_files_of_another_size_are_refused(agent: str, pool: PoolStub) -> None:
    """The files themselves must have the announced sizes, the image's too."""
    worker = MemoryWorker(agent)
    os.truncate(pool.image.path, IMAGE_BYTES - 1)
    with pytest.raises(AttachRefused, match=r"FAILED_PRECONDITION.*holds"):
        async with worker.attach(pool.handshake()):
            pass
    assert not is_written_elsewhere(pool.arena.path)


@pytest.mark.parametrize("message", [{}, {"done": {}}, {"grant": {}}])
async def test_the_first_message_must_be_the_handshake(agent: str, message: dict[str, Any]) -> None:
    """Anything else ends the stream with a sentence."""
    call: Any = MemoryWorker(agent).stub.Attach()
    await call.write(memory_pb2.AttachRequest(**message))
    assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "first message must be the handshake" in await call.details()


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"handshake": {"worker_id": "again"}},
        {"grant": {"grant_id": 5}},
        {"pressure": {"num_free_blocks": 1, "num_total_blocks": 2}},
        {"pressure": {"num_free_blocks": -1, "num_total_blocks": 2, "residency": 1}},
        {"pressure": {"num_free_blocks": 3, "num_total_blocks": 2, "residency": 1}},
        {"done": {"request_id": 1}},
    ],
)
async def test_messages_that_make_no_sense(
    agent: str, pool: PoolStub, message: dict[str, Any]
) -> None:
    """They end the stream with INVALID_ARGUMENT, and the pool is unmapped."""
    worker = MemoryWorker(agent)
    async with worker.attach(pool.handshake()) as stream:
        await stream.send(**message)
        assert await stream.call.code() is grpc.StatusCode.INVALID_ARGUMENT
    await is_detached(worker)
    assert not is_written_elsewhere(pool.arena.path)


async def test_a_stopped_agent_keeps_the_pool(shm: Path, pool: PoolStub, agent: str) -> None:
    """While a silent agent lives no other maps the pool; after its death another may."""
    command, address = start_agent(shm)
    with command:
        async with MemoryWorker(address).attach(pool.handshake()):
            command.signal(signal.SIGSTOP)
        assert is_written_elsewhere(pool.arena.path)
        with pytest.raises(AttachRefused, match=r"FAILED_PRECONDITION.*another agent"):
            async with MemoryWorker(agent).attach(pool.handshake()):
                pass
        command.signal(signal.SIGKILL)
        command.wait()
    async with MemoryWorker(agent).attach(pool.handshake()):
        pass
    await is_detached(MemoryWorker(agent))


async def test_a_worker_that_dies_is_let_go(shm: Path, agent: str, tmp_path: Path) -> None:
    """A worker killed in the middle leaves an agent that has unmapped and serves the next."""
    script = tmp_path / "dying.py"
    script.write_text(
        "import asyncio, pathlib, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[1] / 'support')!r})\n"
        "from memory_worker import MemoryWorker, PoolStub\n"
        "async def main():\n"
        f"    pool = PoolStub(pathlib.Path({str(shm)!r}))\n"
        f"    async with MemoryWorker({agent!r}).attach(pool.handshake()):\n"
        "        print('attached', pool.arena.path, flush=True)\n"
        "        await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    worker = MemoryWorker(agent)
    with Command(str(script)) as command:
        command.shows("attached")
        path = command.stdout.split()[1]
        command.signal(signal.SIGKILL)
        command.wait()
        assert not alive(command.process.pid)
    await is_detached(worker)
    assert not is_written_elsewhere(path)
