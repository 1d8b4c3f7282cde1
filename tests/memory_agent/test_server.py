"""The agent as a process, against a worker's end with a real arena: cycles, refusals, deaths."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from memory_worker import IMAGE_BYTES, AttachRefused, MemoryWorker, PoolStub, wire
from processes import Command, alive

from memory_agent.arena import is_written_elsewhere
from nightjar.v1 import memory_pb2


def start_agent(folder: Path, failpoint: str = "", *flags: str) -> tuple[Command, str]:
    """An agent that accepts pools in `folder`, and its address."""
    command = Command(
        "-m", "nightjar", "memory-agent", f"--shm-dir={folder}", "--hold-s=0", *flags,
        environ={"NIGHTJAR_FAILPOINT": failpoint},
    )  # fmt: skip
    command.shows("listening on ")
    found = re.search(r"^listening on (\S+)$", command.stdout, re.MULTILINE)
    assert found is not None
    return command, found.group(1)


@pytest.fixture(scope="module")
def shm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of this module's pools."""
    return tmp_path_factory.mktemp("shm")


@pytest.fixture(scope="module")
def agent(shm: Path) -> Iterator[str]:
    """The address of an agent that several tests use in turn."""
    command, address = start_agent(shm)
    with command:
        yield address


@pytest.fixture
def pool(shm: Path) -> Iterator[PoolStub]:
    """A fresh pool."""
    stub = PoolStub(shm)
    yield stub
    stub.close()


async def until(
    worker: MemoryWorker, holds: Callable[[memory_pb2.GetMemoryStatusResponse], bool]
) -> memory_pb2.GetMemoryStatusResponse:
    """Wait for a status; what is sent on the stream is not ordered with calls beside it."""
    deadline = time.monotonic() + 30
    while not holds(status := await worker.status()):
        assert time.monotonic() < deadline, status
        await asyncio.sleep(0.005)
    return status


async def is_detached(worker: MemoryWorker) -> None:
    """Wait until the agent has let go of its worker."""
    await until(worker, lambda status: not status.worker_id)


async def test_a_whole_cycle(agent: str, pool: PoolStub) -> None:
    """Expand, contract with a copy, reload with checksum; every byte is where it must be."""
    worker = MemoryWorker(agent)
    base, extra = pool.layout.num_base_blocks, pool.layout.num_extra_blocks
    async with worker.attach(pool.handshake()) as stream:
        request = await stream.request(2, base, "RESIDENT")
        assert request.kind == memory_pb2.TRANSITION_KIND_EXPAND
        assert (await worker.status()).state == wire("OFFLOADING")
        await stream.done(request.request_id, "OFFLOADED")

        request = await stream.request(base + extra, base + extra, "OFFLOADED")
        assert request.kind == memory_pb2.TRANSITION_KIND_CONTRACT
        before = pool.digests()
        moves = {pool.tail[0]: 3, pool.tail[7]: 0, pool.tail[-1]: base - 1}
        answer = await stream.copy(list(moves), list(moves.values()))
        assert (answer.ok, answer.error) == (True, "")
        assert answer.num_bytes == 3 * pool.layout.block_bytes
        expected = list(before)
        for source, destination in moves.items():
            expected[destination] = before[source]
        assert pool.digests() == expected

        answer = await stream.load()
        assert (answer.ok, answer.num_bytes) == (True, IMAGE_BYTES)
        assert pool.loaded()
        assert pool.digests()[:base] == expected[:base]
        await stream.done(request.request_id, "RESIDENT")
        await stream.press(base, base, "RESIDENT")
        status = await until(worker, lambda status: status.pressure.num_free_blocks == base)
        assert status.state == wire("RESIDENT")
        assert (status.num_expansions, status.num_contractions) == (1, 1)
        assert status.num_bytes_copied == 3 * pool.layout.block_bytes + IMAGE_BYTES
        assert (status.worker_id, status.agent_id) == ("worker-1", stream.agent_id)
        assert status.tau_low == 7
        assert not status.open_grant_ids
    await is_detached(worker)


async def test_events_and_owners_are_shown(agent: str, pool: PoolStub) -> None:
    """What happened stands in the status in order, and the worker says who owns which block."""
    worker = MemoryWorker(agent)
    kind = memory_pb2.MemoryEventKind
    async with worker.attach(pool.handshake()) as stream:
        request = await stream.request(2, 64, "RESIDENT")
        refused = memory_pb2.RequestRefused(request_id=request.request_id, reason="not now")
        await stream.send(refused=refused)
        assert (await stream.copy([pool.tail[0]], [5])).ok
        assert not (await stream.copy([0], [5])).ok
        asking = asyncio.create_task(worker.status(pool_map=True))
        assert (await stream.receive()).HasField("map_request")
        row, draft = memory_pb2.BLOCK_OWNER_ROW, memory_pb2.BLOCK_OWNER_DRAFT
        ranges = [
            memory_pb2.BlockRange(first_block=0, num_blocks=64, owner=row),
            memory_pb2.BlockRange(first_block=64, num_blocks=9, owner=draft),
        ]
        answer = memory_pb2.PoolMap(ranges=ranges, num_base_blocks=64, num_extra_blocks=9)
        await stream.send(pool_map=answer)
        status = await asking
        assert status.pool_map == answer
        names = [
            kind.Name(event.kind).removeprefix("MEMORY_EVENT_KIND_") for event in status.events
        ]
        assert names[-5:] == ["ATTACHED", "ASKED_TO_EXPAND", "REFUSED", "COPIED", "COPIED"]
        events = status.events[-5:]
        assert {event.worker_id for event in events} == {"worker-1"}
        assert events[2].reason == "not now"
        assert events[3].num_bytes == pool.layout.block_bytes
        assert "outside the tail" in events[4].reason
        assert all(a.unix_ms <= b.unix_ms for a, b in itertools.pairwise(status.events))
        silent = await worker.status(pool_map=True)  # this worker does not answer
        assert not silent.HasField("pool_map")
    await is_detached(worker)
    status = await worker.status(pool_map=True)
    assert kind.Name(status.events[-1].kind).endswith("DETACHED")
    assert not status.HasField("pool_map")
    with Command("-m", "nightjar", "memory", agent) as command:
        assert command.wait() == 0
        assert "worker   none" in command.stdout
        assert "worker-1 refused: not now" in command.stdout


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


async def test_grants_out_of_range_change_no_byte(agent: str, pool: PoolStub) -> None:
    """The agent refuses moves that lead out of tail or head, and goes on serving."""
    base, tail = pool.layout.num_base_blocks, pool.tail
    bad = [
        ([0], [1]),
        ([tail[0]], [tail[1]]),
        ([tail[-1] + 1], [0]),
        ([tail[0]], [-1]),
        ([tail[0], tail[0]], [0, 1]),
        ([tail[0], tail[1]], [0, 0]),
        ([tail[0]], [0, 1]),
        ([2**31 - 1], [base - 1]),
    ]
    worker = MemoryWorker(agent)
    before = pool.digests()
    async with worker.attach(pool.handshake("OFFLOADED")) as stream:
        for sources, destinations in bad:
            answer = await stream.copy(sources, destinations)
            assert not answer.ok
            assert answer.error
            assert answer.num_bytes == 0
        assert pool.digests() == before
        assert (await stream.copy([tail[0]], [0])).ok
    await is_detached(worker)


async def test_a_corrupted_image_never_becomes_resident(agent: str, pool: PoolStub) -> None:
    """A wrong checksum is answered not ok; RESIDENT is not believed until a load succeeds."""
    worker = MemoryWorker(agent)
    good = bytes(pool.image.memory[77:78])
    async with worker.attach(pool.handshake("OFFLOADED")) as stream:
        pool.image.memory[77:78] = bytes([good[0] ^ 0x40])
        answer = await stream.load()
        assert not answer.ok
        assert "SHA-256" in answer.error
        for _ in range(4):
            await stream.press(50, 64, "RESIDENT")
        await stream.done(1, "RESIDENT")
        await stream.press(51, 64, "RESIDENT")
        status = await until(worker, lambda status: status.pressure.num_free_blocks == 51)
        assert status.state == wire("RELOADING")
        pool.image.memory[77:78] = good
        assert (await stream.load()).ok
        await stream.done(1, "RESIDENT")
        await stream.press(50, 64, "RESIDENT")
        await until(worker, lambda status: status.state == wire("RESIDENT"))
    await is_detached(worker)


async def test_a_refused_request_is_asked_again_later(shm: Path, pool: PoolStub) -> None:
    """A refusal is followed by silence for the back-off, then by a new request."""
    command, address = start_agent(shm, "", "--backoff-s=0.2", "--t-persist=1", "--tau-low=8")
    with command:
        async with MemoryWorker(address).attach(pool.handshake()) as stream:
            await stream.press(7, 64, "RESIDENT")
            first = (await stream.receive()).request
            refused_at = time.monotonic()
            refused = memory_pb2.RequestRefused(request_id=first.request_id, reason="not now")
            await stream.send(refused=refused)
            receiving = asyncio.create_task(stream.receive())
            while not receiving.done():
                await stream.press(7, 64, "RESIDENT")
                await asyncio.sleep(0.01)
            assert time.monotonic() - refused_at >= 0.2
            assert receiving.result().request.request_id == first.request_id + 1


@pytest.mark.parametrize("phase", ["agent.before_work", "agent.mid_copy", "agent.before_answer"])
async def test_killed_while_copying(shm: Path, pool: PoolStub, phase: str) -> None:
    """Sources and all other blocks are intact; each destination is old or new as a whole."""
    command, address = start_agent(shm, phase)
    sources, destinations = list(pool.tail[:4]), [9, 8, 7, 6]
    before = pool.digests()
    with command:
        async with MemoryWorker(address).attach(pool.handshake("OFFLOADED")) as stream:
            with pytest.raises((EOFError, grpc.aio.AioRpcError)):
                await stream.copy(sources, destinations)
        assert command.wait() == -signal.SIGKILL
    after = pool.digests()
    for block, digest in enumerate(after):
        if block in destinations:
            source = sources[destinations.index(block)]
            assert digest in (before[block], before[source])
        else:
            assert digest == before[block]
    num_moved = sum(after[d] == before[s] for s, d in zip(sources, destinations, strict=True))
    assert num_moved == {"agent.before_work": 0, "agent.mid_copy": 1}.get(phase, 4)
    assert not is_written_elsewhere(pool.arena.path)


@pytest.mark.parametrize("phase", ["agent.before_work", "agent.mid_load", "agent.before_answer"])
async def test_killed_while_loading_and_a_new_agent_finishes(
    shm: Path, pool: PoolStub, phase: str
) -> None:
    """The head is untouched, and another agent brings the draft back from the same image."""
    head = pool.digests()[: pool.layout.num_base_blocks]
    command, address = start_agent(shm, phase)
    with command:
        async with MemoryWorker(address).attach(pool.handshake("RELOADING")) as stream:
            with pytest.raises((EOFError, grpc.aio.AioRpcError)):
                await stream.load()
        assert command.wait() == -signal.SIGKILL
    assert pool.loaded() == (phase == "agent.before_answer")
    command, address = start_agent(shm)
    with command:
        worker = MemoryWorker(address)
        async with worker.attach(pool.handshake("RELOADING")) as stream:
            assert (await stream.load()).ok
            assert pool.loaded()
            await stream.done(1, "RESIDENT")
            await until(worker, lambda status: status.state == wire("RESIDENT"))
    assert pool.digests()[: pool.layout.num_base_blocks] == head


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


async def test_only_one_grant_is_open(shm: Path, pool: PoolStub) -> None:
    """A grant sent before the answer to the one before is answered not ok, and not done."""
    command, address = start_agent(shm)
    with command:
        async with MemoryWorker(address).attach(pool.handshake("OFFLOADED")) as stream:
            load = memory_pb2.Grant(grant_id=1, load=memory_pb2.LoadImage())
            copy = memory_pb2.CopyBlocks(source_ids=[pool.tail[0]], destination_ids=[0])
            before = pool.digests()[0]
            await stream.send(grant=load)
            await stream.send(grant=memory_pb2.Grant(grant_id=2, copy=copy))
            answers = [(await stream.receive()).answer for _ in range(2)]
            by_id = {answer.grant_id: answer for answer in answers}
            assert by_id[1].ok
            if not by_id[2].ok:  # unless the load was faster than the second message
                assert "grant 1 is still open" in by_id[2].error
                assert pool.digests()[0] == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_it_with_exit_0(shm: Path, pool: PoolStub, number: int) -> None:
    """Told to stop, it answers what it was granted, ends the stream, unmaps and exits with 0."""
    command, address = start_agent(shm)
    with command:
        async with MemoryWorker(address).attach(pool.handshake("OFFLOADED")) as stream:
            load = memory_pb2.Grant(grant_id=9, load=memory_pb2.LoadImage())
            await stream.send(grant=load)
            await stream.press(1, 64, "OFFLOADED")
            await until(MemoryWorker(address), lambda s: s.pressure.sequence == 1)
            command.signal(number)
            assert (await stream.receive()).answer.grant_id == 9
            with pytest.raises(EOFError):
                await stream.receive()
            assert await stream.call.code() is grpc.StatusCode.OK
        assert command.wait() == 0
        assert not is_written_elsewhere(pool.arena.path)
        assert "Traceback" not in command.stderr
        assert command.stdout.count("\n") == 1


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


def test_help_names_the_thresholds() -> None:
    """`--help` says what both thresholds mean, and a bad value stops the process by name."""
    with Command("-m", "nightjar", "memory-agent", "--help") as command:
        assert command.wait() == 0
        for words in ("--tau-low", "a share of the blocks", "--t-persist", "in a row"):
            assert words in " ".join(command.stdout.split())
    for flag, sentence in [
        ("--tau-low=1.5", "whole number of blocks"),
        ("--tau-low=-1", "--tau-low='-1'"),
        ("--tau-low=nan", "--tau-low='nan'"),
        ("--t-persist=0", "must be 1 to 1000"),
        ("--shm-dir=/nowhere", "not a folder"),
        ("--listen=nowhere", "--listen"),
    ]:
        with Command("-m", "nightjar", "memory-agent", flag) as command:
            assert command.wait() == 2
            assert sentence in command.stderr


def test_the_agent_needs_no_torch() -> None:
    """Its module graph holds neither torch nor numpy."""
    code = "import sys, memory_agent.main; print({'torch', 'numpy'} & set(sys.modules))"
    with Command("-c", code) as command:
        assert command.wait() == 0
        assert command.stdout.strip() == "set()"
