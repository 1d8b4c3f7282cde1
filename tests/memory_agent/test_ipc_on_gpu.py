"""A GPU's pool between two processes: mapped, moved, reloaded, and let go by whoever dies."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conditions import until
from memory_worker import AttachRefused, MemoryWorker, wire
from processes import Command, alive

from memory_agent.arena import is_written_elsewhere
from memory_agent.layout import ArenaLayout
from nightjar.v1 import memory_pb2
from worker.memory_client import handshake_proto
from worker.messages import PoolInfo
from worker.model.pool import Arena

pytestmark = pytest.mark.gpu
LAYOUT = ArenaLayout(
    block_bytes=368_640,
    draft_block_bytes=40_960,
    image_bytes=(33 << 20) + 64,
    num_base_blocks=512,
)
TAIL = range(LAYOUT.num_base_blocks, LAYOUT.num_base_blocks + LAYOUT.num_extra_blocks)
_HOLDER = """
import pathlib, sys
sys.path[:0] = {path!r}
import test_ipc_on_gpu as own
arena, pool = own.shared_pool(sys.argv[1])
print("handshake", own.handshake(pool).SerializeToString().hex(), flush=True)
sys.stdin.read()
"""


def shared_pool(folder: str) -> tuple[Arena, PoolInfo]:
    """A pool as a worker makes it: random bytes, the image among them."""
    arena = Arena(LAYOUT, folder, torch.device("cuda"))
    generator = torch.Generator("cuda").manual_seed(5)
    arena.memory.random_(0, 256, generator=generator)
    path, digest = arena.write_image()
    pool = PoolInfo(
        arena_path=arena.path,
        arena_bytes=LAYOUT.num_bytes,
        block_bytes=LAYOUT.block_bytes,
        num_base_blocks=LAYOUT.num_base_blocks,
        num_extra_blocks=LAYOUT.num_extra_blocks,
        image_path=path,
        image_offset=LAYOUT.image_offset,
        image_bytes=LAYOUT.image_bytes,
        image_sha256=digest,
        cuda_ipc_handle=arena.handle,
        cuda_device_uuid=arena.device_uuid,
    )
    return arena, pool


def handshake(pool: PoolInfo, residency: str = "offloaded") -> memory_pb2.PoolHandshake:
    """What a worker announces."""
    return handshake_proto("worker-1", pool, residency)


def blocks_of(arena: Arena) -> torch.Tensor:
    """[blocks, block_bytes]."""
    return arena.memory.view(-1, LAYOUT.block_bytes)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in memory, as --shm-dir is by default: pages of a disk's file cannot be pinned."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as made:
        yield Path(made)


@pytest.fixture
def arena(folder: Path) -> Iterator[tuple[Arena, PoolInfo]]:
    """A pool of this process."""
    made = shared_pool(str(folder))
    yield made
    made[0].close()


def agent(folder: Path, failpoint: str = "") -> Command:
    """An agent for pools in `folder`."""
    command = Command(
        "-m", "nightjar", "memory-agent", f"--shm-dir={folder}", "--hold-s=0",
        environ={"NIGHTJAR_FAILPOINT": failpoint},
    )  # fmt: skip
    command.shows("listening on ", timeout_s=60)
    return command


def address_of(command: Command) -> str:
    """Where it listens."""
    found = re.search(r"^listening on (\S+)$", command.stdout, re.MULTILINE)
    assert found is not None
    return found.group(1)


async def test_copy_and_reload_over_ipc(arena: tuple[Arena, PoolInfo], folder: Path) -> None:
    """What the agent's process writes, this one reads: moves, then a verified image."""
    memory, pool = arena
    before = blocks_of(memory).clone()
    image = slice(LAYOUT.image_offset, LAYOUT.image_offset + LAYOUT.image_bytes)
    kept = memory.memory[image].clone()
    with agent(folder) as command:
        async with MemoryWorker(address_of(command)).attach(handshake(pool)) as stream:
            assert is_written_elsewhere(pool.arena_path)
            sources, destinations = list(TAIL), list(range(len(TAIL)))[::-1]
            answer = await stream.copy(sources, destinations)
            assert (answer.ok, answer.error) == (True, "")
            assert answer.num_bytes == len(TAIL) * LAYOUT.block_bytes
            expected = before.clone()
            expected[destinations] = before[sources]
            assert torch.equal(blocks_of(memory), expected)
            assert not (await stream.copy([0], [1])).ok
            memory.memory[image] = 0xA5
            answer = await stream.load()
            assert (answer.ok, answer.error) == (True, "")
            assert torch.equal(memory.memory[image], kept)
            head = LAYOUT.num_base_blocks
            assert torch.equal(blocks_of(memory)[:head], expected[:head])
        await until(lambda: not is_written_elsewhere(pool.arena_path), "the agent has unmapped")
        async with MemoryWorker(address_of(command)).attach(handshake(pool)) as stream:
            assert (await stream.copy([TAIL[0]], [3])).ok
        assert "not pinned" not in command.stderr
        command.signal(signal.SIGTERM)
        assert command.wait() == 0


@pytest.mark.parametrize("phase", ["agent.mid_copy", "agent.mid_load"])
async def test_a_killed_agent_leaves_the_pool_to_the_next(
    arena: tuple[Arena, PoolInfo], folder: Path, phase: str
) -> None:
    """Its death breaks nothing here, frees the lock, and another agent finishes the work."""
    memory, pool = arena
    before = blocks_of(memory).clone()
    with agent(folder, phase) as command:
        async with MemoryWorker(address_of(command)).attach(handshake(pool)) as stream:
            with pytest.raises(Exception, match=r"ended|UNAVAILABLE|closed|reset"):
                await (stream.load() if "load" in phase else stream.copy([TAIL[0]], [0]))
        assert command.wait() == -signal.SIGKILL
    assert not is_written_elsewhere(pool.arena_path)
    torch.cuda.synchronize()
    assert torch.equal(blocks_of(memory)[1 : TAIL[0]], before[1 : TAIL[0]])
    with agent(folder) as command:
        async with MemoryWorker(address_of(command)).attach(handshake(pool)) as stream:
            assert (await stream.copy([TAIL[-1]], [0])).ok
            assert (await stream.load()).ok


async def test_a_dead_workers_memory_comes_back(folder: Path) -> None:
    """The agent lets go of a killed worker's arena at once, and serves the next worker."""
    here = Path(__file__).parent
    script = folder / "holder.py"
    path = [str(here), str(here.parent / "support"), str(here.parents[1])]
    script.write_text(_HOLDER.format(path=path))
    with agent(folder) as command:
        worker = MemoryWorker(address_of(command))
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(script), str(folder), stdout=asyncio.subprocess.PIPE,
            stdin=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None
        line = (await process.stdout.readline()).split()
        assert line[0] == b"handshake"
        hello = memory_pb2.PoolHandshake.FromString(bytes.fromhex(line[1].decode()))
        async with worker.attach(hello) as stream:
            assert (await stream.copy([TAIL[0]], [0])).ok
            free_with_both = torch.cuda.mem_get_info()[0]
            os.kill(process.pid, signal.SIGKILL)
            await process.wait()
            await until(lambda: not alive(process.pid), "it is gone")
        await until(lambda: "detached" in command.stderr, "the agent let go")
        await until(
            lambda: torch.cuda.mem_get_info()[0] > free_with_both + LAYOUT.num_bytes // 2,
            "the device's memory is free again",
        )
        arena, pool = shared_pool(str(folder))
        async with worker.attach(handshake(pool, "reloading")) as stream:
            assert (await stream.load()).ok
            await stream.done(1, "RESIDENT")
        assert (await worker.status()).events[-1].state in (wire("RESIDENT"), wire("RELOADING"))
        arena.close()


async def test_handles_that_open_nothing_are_refused(
    arena: tuple[Arena, PoolInfo], folder: Path
) -> None:
    """Another GPU's UUID and bytes that are no handle give sentences, and map nothing."""
    pool = arena[1]
    with agent(folder) as command:
        worker = MemoryWorker(address_of(command))
        for field, value, words in [
            ("cuda_device_uuid", b"u" * 16, "has the UUID"),
            ("cuda_ipc_handle", b"\x01" * 64, "cuIpcOpenMemHandle"),
        ]:
            hello = handshake(pool)
            setattr(hello, field, value)
            with pytest.raises(AttachRefused, match=words):
                async with worker.attach(hello):
                    pass
            await until(lambda: not is_written_elsewhere(pool.arena_path), "nothing is mapped")
        async with worker.attach(handshake(pool)) as stream:
            assert (await stream.copy([TAIL[0]], [0])).ok
