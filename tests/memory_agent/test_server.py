"""The agent as a process, against a worker's end with a real arena: cycles, refusals, deaths."""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from pathlib import Path

import grpc
import pytest
from agent_process import is_detached, start_agent, until
from memory_worker import IMAGE_BYTES, AttachRefused, MemoryWorker, PoolStub, wire
from processes import Command

from memory_agent.arena import is_written_elsewhere
from nightjar.v1 import memory_pb2


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


async def test_the_status_shows_the_bound_that_decides(agent: str, pool: PoolStub) -> None:
    """While the draft is away, too: at the shown bound it stays, one block above it returns."""
    worker = MemoryWorker(agent)
    total = pool.layout.num_base_blocks + pool.layout.num_extra_blocks
    async with worker.attach(pool.handshake("OFFLOADED")) as stream:
        await stream.press(0, total, "OFFLOADED")
        status = await until(worker, lambda status: status.pressure.sequence == 1)
        assert (status.tau_low, status.tau_high) == (7, 20)
        bound = status.tau_high + pool.layout.num_extra_blocks
        for _ in range(6):
            await stream.press(bound, total, "OFFLOADED")
        await until(worker, lambda status: status.pressure.sequence == 7)
        assert (await worker.status()).state == wire("OFFLOADED")
        request = await stream.request(bound + 1, total, "OFFLOADED")
        assert request.kind == memory_pb2.TRANSITION_KIND_CONTRACT
    await is_detached(worker)


async def test_a_pool_that_thresholds_do_not_fit_is_declined(shm: Path, pool: PoolStub) -> None:
    """The worker hears flag and sizes, the agent's log has them once, and nothing is mapped."""
    command, address = start_agent(shm, "", "--tau-high=64")
    with command:
        for _ in range(2):
            with pytest.raises(AttachRefused, match=r"--tau-high=64: more than 64 .* has 64: "):
                async with MemoryWorker(address).attach(pool.handshake()):
                    pass
        assert not (await MemoryWorker(address).status()).worker_id
        command.signal(signal.SIGTERM)
        assert command.wait() == 0
        assert command.stderr.count("could never return") == 1


async def test_a_worker_that_leaves_while_asked_is_counted_once(shm: Path, pool: PoolStub) -> None:
    """A status that waited for the map of a worker now gone shows it gone."""
    command, address = start_agent(shm)
    worker = MemoryWorker(address)
    with command:
        async with worker.attach(pool.handshake()) as stream:
            await stream.request(2, 64, "RESIDENT")
            asking = asyncio.create_task(worker.status(pool_map=True))
            assert (await stream.receive()).HasField("map_request")
        status = await asking
        assert (status.worker_id, status.num_expansions) == ("", 1)


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
