"""The store against a real server: exactly once, whatever happens to scripts and connections."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator

import pytest
import redis
from store_server import StoreServer

from nightjar.errors import ConfigError
from planner_service.own_sums import OwnSums
from planner_service.store import HINT_WAIT_S, RedisStore, Refused, StoreError, connect
from planner_service.sums import NOTHING, Stats, from_fields


@pytest.fixture
async def client(store: str) -> AsyncIterator[RedisStore]:
    """A store as one planner process sees it."""
    opened = RedisStore(connect(store), "me")
    yield opened
    await opened.close()


async def test_a_replayed_flush_counts_once(client: RedisStore, store: str) -> None:
    """The same number of the same process adds nothing; of another process it does."""
    assert await client.flush("g", 1, 0, {"x": "2", "y": "0.5"}) == 1
    assert await client.flush("g", 1, 0, {"x": "2", "y": "0.5"}) == 1
    assert await client.read("g") == ({"x": "2", "y": "0.5"}, 1, 1)
    other = RedisStore(connect(store), "other")
    assert await other.flush("g", 7, 0, {"x": "40"}) == 7
    await other.close()
    assert await client.flush("g", 2, 1, {"x": "1000000000000000"}) == 2
    assert await client.read("g") == ({"x": "1000000000000042", "y": "0.5"}, 3, 2)
    assert await client.revisions(["g", "none"]) == [3, 0]


async def test_no_flush_is_taken_before_those_that_the_store_lost(client: RedisStore) -> None:
    """It adds nothing and says what the store has, so that they can be sent again in order."""
    assert await client.flush("g", 3, 0, {"x": "1"}) == 3
    assert await client.flush("g", 8, 5, {"x": "10"}) == 3
    assert await client.read("g") == ({"x": "1"}, 1, 3)
    assert await client.flush("g", 5, 3, {"x": "100"}) == 5
    assert await client.flush("g", 8, 5, {"x": "10"}) == 8
    assert await client.read("g") == ({"x": "111"}, 3, 8)


async def test_a_flush_whose_reply_came_too_late_counts_once(
    client: RedisStore, store_server: StoreServer
) -> None:
    """The server stops before it answers: the client gives up, tries again, and it counts once."""
    await client.flush("g", 1, 0, {"x": "1"})
    assert store_server.process is not None
    store_server.process.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(StoreError):
            await client.flush("g", 2, 0, {"x": "1"})
    finally:
        store_server.process.send_signal(signal.SIGCONT)
    assert await client.flush("g", 2, 0, {"x": "1"}) == 2
    assert await client.read("g") == ({"x": "2"}, 2, 2)


async def test_scripts_are_loaded_again_when_the_server_forgot_them(
    client: RedisStore, store: str
) -> None:
    """SCRIPT FLUSH, as after a failover, costs nothing."""
    await client.flush("g", 1, 0, {"x": "1"})
    with redis.Redis.from_url(store) as raw:
        raw.script_flush()
    assert await client.flush("g", 2, 0, {"x": "1"}) == 2
    assert await client.swap_book(0, "text")


async def test_a_restart_keeps_what_was_flushed(
    client: RedisStore, store_server: StoreServer
) -> None:
    """While the server is gone calls fail; afterwards the same client goes on."""
    await client.flush("g", 1, 0, {"x": "1"})
    store_server.kill(signal.SIGTERM)
    with pytest.raises(StoreError):
        await client.flush("g", 2, 0, {"x": "1"})
    store_server.start()
    assert await client.flush("g", 2, 0, {"x": "1"}) == 2
    assert await client.read("g") == ({"x": "2"}, 2, 2)


async def test_a_read_only_server_is_an_error_that_passes(client: RedisStore, store: str) -> None:
    """A demoted server refuses; once it is a master again the same flush counts."""
    with redis.Redis.from_url(store) as raw:
        raw.replicaof("127.0.0.1", 1)
        with pytest.raises(StoreError) as caught:
            await client.flush("g", 1, 0, {"x": "1"})
        await client.reconnect(caught.value)
        raw.replicaof("NO", "ONE")
    assert await client.flush("g", 1, 0, {"x": "1"}) == 1


async def test_values_that_are_not_ours_are_refused_and_left_out(
    client: RedisStore, store: str
) -> None:
    """A flush onto them is refused for good, and counts at most once."""
    with redis.Redis.from_url(store) as raw:
        raw.set("nightjar:{g}:sums", "text")
        raw.hset("nightjar:{h}:sums", mapping={"x": "text", "y": "inf", "z": "3", "revision": "x"})
    with pytest.raises(Refused):
        await client.flush("g", 1, 0, {"x": "1"})
    with pytest.raises(Refused):
        await client.flush("h", 1, 0, {"x": "1"})
    assert await client.read("h") == ({"x": "text", "y": "inf", "z": "3"}, 0, 1)


async def test_the_store_adds_a_policys_own_sums_as_memory_does(client: RedisStore) -> None:
    """Forgetting sums merge at the later clock in either order; plain ones add; the last stays."""
    parts = [
        Stats(own={"p/a": OwnSums((8.0, 1.0), 10.0, 100.0)}, latest={"p/q": (1.0, 2.0)}),
        Stats(own={"p/a": OwnSums((3.0,), 10.0, 110.0), "p/b": OwnSums((5.0,))}),
        Stats(own={"p/a": OwnSums((1.0, 1.0, 1.0), 10.0, 90.0), "p/b": OwnSums((0.1,))}),
        Stats(latest={"p/q": (3.0,)}),
    ]
    for group, order in (("g", parts), ("h", [parts[i] for i in (2, 0, 1, 3)])):
        for number, part in enumerate(order, 1):
            await client.flush(group, number, 0, part.fields())
        stored, num_unknown = from_fields((await client.read(group))[0].items())
        assert num_unknown == 0
        together = NOTHING.plus(order[0]).plus(order[1]).plus(order[2]).plus(order[3])
        assert stored.fields() == together.fields()
        assert stored.own["p/a"] == OwnSums((3 + 4 + 0.25, 0.5 + 0.25, 0.25), 10.0, 110.0)
        assert stored.latest == {"p/q": (3.0,)}


async def test_own_sums_that_are_not_ours_give_way(client: RedisStore, store: str) -> None:
    """A torn text is replaced by what is added to it."""
    with redis.Redis.from_url(store) as raw:
        raw.hset("nightjar:{g}:sums", mapping={"own:inf:p/a": "0.0 nonsense", "own:inf:p/b": ""})
    added = Stats(own={"p/a": OwnSums((2.0,)), "p/b": OwnSums((3.0,))})
    await client.flush("g", 1, 0, added.fields())
    stored, num_unknown = from_fields((await client.read("g"))[0].items())
    assert (stored.own, num_unknown) == (added.own, 0)


async def test_the_book_is_swapped_only_from_the_revision_it_has(client: RedisStore) -> None:
    """Of two replicas that change the same book one has to read again."""
    assert await client.read_book() == (None, 0)
    assert await client.swap_book(0, "one")
    assert not await client.swap_book(0, "other")
    assert await client.read_book() == ("one", 1)


async def test_a_change_of_the_book_is_hinted(client: RedisStore) -> None:
    """Who listens is told at once, without polling, however often nothing happened before."""
    hints = client.hints()
    async with asyncio.timeout(10):
        await anext(hints)  # it listens
        hinted = asyncio.ensure_future(anext(hints))
        await asyncio.wait([hinted], timeout=2.5 * HINT_WAIT_S)
        assert not hinted.done()
        assert await client.swap_book(0, "text")
        await hinted
    await hints.aclose()  # type: ignore[attr-defined]


async def test_profiles_are_remembered(client: RedisStore, store: str) -> None:
    """What is no profile is left out."""
    assert await client.profile_groups() == set()
    await client.put_profile("p1", {"target": "t"})
    with redis.Redis.from_url(store) as raw:
        raw.sadd("nightjar:profiles", "p2", "p3")
        raw.set("nightjar:{p2}:profile", "[1")
    assert await client.profile_groups() == {"p1", "p2", "p3"}
    found = await client.profiles(["p1", "p2", "p3"])
    assert found == [("p1", {"target": "t"}), ("p2", {}), ("p3", {})]


@pytest.mark.parametrize(
    "url",
    ["localhost:6379", "http://x", "redis://", "redis://h:port", "redis+sentinel://h:1", "://"],
)
def test_a_url_that_names_no_store_is_refused(url: str) -> None:
    """The sentence names the flag and the value."""
    with pytest.raises(ConfigError, match="--store"):
        connect(url)


async def test_valkey_urls_are_taken(store: str) -> None:
    """The schemes that Valkey's own tools print work too."""
    opened = RedisStore(connect(store.replace("unix://", "valkey+unix://")), "me")
    assert await opened.read("g") == ({}, 0, 0)
    await opened.close()
