"""A store in trouble, under a real planner that is asked all the time.

No answer waits for the store, and once it is well again it holds all that was taught, once:
`Chatter` asserts the first, `whole` the second.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
from planner_harness import (
    Chatter,
    Worker,
    comes_true,
    dialled,
    in_store,
    planner,
    report,
    state,
    stored,
)
from processes import Command
from store_proxy import StoreProxy
from store_server import StoreServer

from nightjar.v1 import planner_pb2 as pb
from planner_service.context import MAX_BATCH_SIZE

AWAY = "the store is away; decisions go on from memory"


@contextlib.asynccontextmanager
async def whole(
    store: StoreServer, url: str = "", lost_steps: int = 0
) -> AsyncIterator[tuple[Command, Any, Chatter]]:
    """A planner that is asked all the time; at the end the store holds what it was taught."""
    with planner(url or store.url) as (command, address):
        async with dialled(address) as stub:
            async with Chatter(stub).chatting() as chatter:
                await _caught_up(chatter, store)
                yield command, stub, chatter
                await _caught_up(chatter, store)
            await stored(stub, chatter.num_taught)
            assert not (await state(stub)).num_dropped_updates
        assert command.process.poll() is None
    assert in_store(store.url) == chatter.num_taught - lost_steps


async def _caught_up(chatter: Chatter, store: StoreServer) -> None:
    """Wait until the store holds what was taught by now."""
    await comes_true(lambda: _taught(chatter, 1))
    taught = chatter.num_taught
    await comes_true(lambda: asyncio.to_thread(lambda: in_store(store.url) >= taught))


async def _taught(chatter: Chatter, steps: int) -> bool:
    return chatter.num_taught >= steps


async def _connected(stub: Any, value: bool) -> None:
    async def holds() -> bool:
        return (await state(stub)).store_connected is value

    await comes_true(holds)


async def _activated(stub: Any, name: str) -> str:
    answer = await stub.ActivatePolicy(pb.ActivatePolicyRequest(name=name))
    version: str = answer.version.version
    return version


async def _follows(stub: Any, version: str, timeout_s: float) -> None:
    async def holds() -> bool:
        return (await state(stub)).version.version == version

    await comes_true(holds, timeout_s)


async def _listeners(store: StoreServer) -> int:
    with redis.Redis.from_url(store.url) as raw:
        ((_, number),) = raw.pubsub_numsub("nightjar:policy:changed")
    return int(number)


async def test_a_restarted_store_is_listened_to_again(store_server: StoreServer) -> None:
    """Both replicas subscribe anew, and follow a version made at one of them."""
    async with whole(store_server) as (_, stub, _):
        with planner(store_server.url) as (_, other):
            async with dialled(other) as second:
                store_server.kill()
                await _connected(stub, False)
                store_server.start()
                await comes_true(lambda: _equals(_listeners(store_server), 2))
                version = await _activated(second, "off")
                await _follows(stub, version, 5)


async def _equals(asked: Any, value: object) -> bool:
    return bool(await asked == value)


async def test_half_open_connections_are_found_out(store_server: StoreServer) -> None:
    """A path that goes silent without a word is left; versions and sums get through."""
    async with (
        StoreProxy(store_server.path).serving() as proxy,
        whole(store_server, proxy.url) as (_, stub, _),
    ):
        with planner(store_server.url) as (_, other):
            async with dialled(other) as second:
                before = await _clients(store_server)
                proxy.go_silent()
                version = await _activated(second, "off")
                await _follows(stub, version, 6)
                # The subscription finds out too, though nothing was sent on it.
                await comes_true(lambda: _new_listener(store_server, before))


async def _clients(store: StoreServer) -> set[str]:
    """Connections that listen."""
    with redis.Redis.from_url(store.url, decode_responses=True) as raw:
        return {client["id"] for client in raw.client_list(_type="pubsub")}


async def _new_listener(store: StoreServer, before: set[str]) -> bool:
    return bool(await _clients(store) - before)


async def test_versions_spread_without_any_hint(store_server: StoreServer) -> None:
    """Pub/sub that is refused altogether: the poll finds a new version all the same."""
    with redis.Redis.from_url(store_server.url) as raw:
        raw.acl_setuser("default", enabled=True, nopass=True, keys="*", commands=["+@all"])
        raw.execute_command("ACL", "SETUSER", "default", "resetchannels")
    async with whole(store_server) as (command, stub, _):
        with planner(store_server.url) as (_, other):
            async with dialled(other) as second:
                version = await _activated(second, "off")
                assert await _listeners(store_server) == 0
                await _follows(stub, version, 5)
        assert AWAY not in command.stderr


async def test_a_demoted_store_is_left_alone_until_it_is_master_again(
    store_server: StoreServer,
) -> None:
    """READONLY is an outage like any other."""
    with redis.Redis.from_url(store_server.url) as raw:
        async with whole(store_server) as (command, stub, chatter):
            raw.replicaof("127.0.0.1", 1)
            await _connected(stub, False)
            command.shows("ReadOnlyError")
            taught = chatter.num_taught
            await comes_true(lambda: _taught(chatter, taught + 60))
            raw.replicaof("NO", "ONE")


@pytest.mark.parametrize(
    "seconds", [1.5, pytest.param(10, marks=pytest.mark.slow, id="ten seconds")]
)
async def test_a_store_that_is_busy_with_a_script_is_survived(
    store_server: StoreServer, seconds: float
) -> None:
    """It answers nothing at first and BUSY later; then it is used again, unaided."""
    loop = """
    local function now()
      local t = redis.call('TIME')
      return t[1] + t[2] / 1e6
    end
    local start = now()
    while now() - start < tonumber(ARGV[1]) do end
    return 1"""
    with redis.Redis.from_url(store_server.url, socket_timeout=60) as raw:
        raw.config_set("busy-reply-threshold", 400)
        async with whole(store_server) as (command, stub, _):
            busy = asyncio.create_task(asyncio.to_thread(raw.eval, loop, 0, seconds))
            await _connected(stub, False)
            assert await busy == 1
            await _connected(stub, True)
            command.shows(AWAY, times=1)


async def test_a_store_that_forgot_its_scripts_gets_them_again(store_server: StoreServer) -> None:
    """SCRIPT FLUSH in the middle of it costs nothing, not even a warning."""
    with redis.Redis.from_url(store_server.url) as raw:
        async with whole(store_server) as (command, stub, chatter):
            for _ in range(3):
                raw.script_flush()
                await _caught_up(chatter, store_server)
            assert await _activated(stub, "off")
            assert AWAY not in command.stderr


async def test_a_store_that_loads_for_long_is_waited_for(store_server: StoreServer) -> None:
    """LOADING is an outage; what was taught meanwhile arrives."""
    with redis.Redis.from_url(store_server.url) as raw:
        pipeline = raw.pipeline(transaction=False)
        for i in range(20_000):
            pipeline.set(f"ballast:{i}", i)
        pipeline.execute()
    async with whole(store_server) as (command, stub, _):
        store_server.kill()
        await _connected(stub, False)
        store_server.start(wait=False, key_load_delay="80")
        await comes_true(lambda: asyncio.to_thread(_loads, store_server))
        await _connected(stub, True)
        command.shows(AWAY, times=1)


def _loads(store: StoreServer) -> bool:
    try:
        with redis.Redis.from_url(store.url) as raw:
            raw.get("x")
    except redis.BusyLoadingError:
        return True
    except redis.ConnectionError:
        pass
    return False


def _log(store: StoreServer) -> Path:
    """The part of the append-only file that grows."""
    (path,) = (store.folder / "appendonlydir").glob("*.incr.aof")
    return path


async def _written(store: StoreServer, words: bytes, times: int) -> bool:
    return _log(store).read_bytes().count(words) >= times


async def test_a_truncated_log_loses_nothing_that_a_planner_keeps(
    store_server: StoreServer,
) -> None:
    """A store that lost its last writes gets them again, and says how many those were."""
    async with whole(store_server) as (command, stub, chatter):
        # The second but last write is cut: one must stand before it.
        await comes_true(lambda: _written(store_server, b"total:steps", 4))
        store_server.kill()
        await _connected(stub, False)
        path = _log(store_server)
        content = path.read_bytes()
        last = content.rindex(b"total:steps")
        path.write_bytes(content[: content.rindex(b"total:steps", 0, last)])  # cuts a write in two
        store_server.start()
        held = in_store(store_server.url)
        assert 0 < held < chatter.num_taught
        command.shows("the store lost what it had confirmed")


async def test_a_planner_runs_on_when_the_log_is_corrupt(store_server: StoreServer) -> None:
    """The store refuses to start; old and new planners decide, and say what is wrong."""
    async with whole(store_server) as (_, _, chatter):
        pass
    with planner(store_server.url) as (command, address):
        async with dialled(address) as stub, Chatter(stub).chatting():
            store_server.kill()
            path = _log(store_server)
            content = bytearray(path.read_bytes())
            middle = content.index(b"*", len(content) // 2)
            content[middle] ^= 0xFF
            path.write_bytes(content)
            with pytest.raises(RuntimeError, match=r"Bad file format|fix the AOF"):
                store_server.start()
            store_server.kill()
            await _connected(stub, False)
            command.shows(AWAY)
            (known,) = (await state(stub)).profiles
            assert known.num_steps >= chatter.num_taught
            with planner(store_server.url) as (new, other):
                new.shows(AWAY)
                async with dialled(other) as fresh, Chatter(fresh).chatting() as more:
                    await comes_true(lambda: _taught(more, 60))
                    assert (await state(fresh)).version.version == "1-nightjar"


@pytest.mark.slow
async def test_a_long_outage_takes_no_more_memory(store_server: StoreServer) -> None:
    """What waits for the store is bounded: beyond it, updates are dropped and counted.

    When the store is back, it gets what waited while decisions go on.
    """
    profiles = [pb.Profile(target=f"t{i}", proposer="none", tensor_parallel_size=1) for i in "ab"]
    with planner(store_server.url) as (command, address):
        async with dialled(address) as stub:
            store_server.kill()
            memory = psutil.Process(command.process.pid).memory_info
            sizes = []
            for profile in 3 * profiles:
                worker = Worker(stub, "w", MAX_BATCH_SIZE, profile)
                await worker.ask(hello=True)
                for size in range(1, MAX_BATCH_SIZE + 1):
                    await worker.send(reports=[report(gamma, size) for gamma in range(9)])
                await worker.ask()
                sizes.append(memory().rss)
            dropped = (await state(stub)).num_dropped_updates
            assert dropped > 5_000
            command.shows("too much waits for the store")
            assert sizes[5] < 1.03 * sizes[3], sizes
            async with Chatter(stub).chatting():
                store_server.start()
                await comes_true(lambda: _nearly_all_stored(stub), timeout_s=90)


async def _nearly_all_stored(stub: Any) -> bool:
    answer = await state(stub)
    return answer.store_connected and answer.store_lag_ms < 1000
