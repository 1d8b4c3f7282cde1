"""The store: sums and versions in Redis or Valkey, each write exactly once.

Keys, with a hash tag so that a script's keys share a slot of a cluster:

    nightjar:{GROUP}:sums           hash: a sum by name, and `revision`, raised by each flush
    nightjar:{GROUP}:flushed:WHO    number of the last flush of one process; ends after a week
    nightjar:{GROUP}:profile        JSON of the profile, for groups of times
    nightjar:profiles               set of the profiles' groups
    nightjar:policy                 hash: `book` (JSON of all versions) and `revision`

Changes of the book are also published on nightjar:policy:changed, which is only a hint.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, cast
from urllib.parse import urlsplit

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.exceptions import ReadOnlyError, RedisError, ResponseError

from nightjar.errors import ConfigError

SOCKET_TIMEOUT_S, CONNECT_TIMEOUT_S, HINT_WAIT_S = 2.0, 1.0, 1.0
SENTINEL_TIMEOUT_S = 0.5
FLUSH_MARK_S = 7 * 24 * 3600
BOOK, CHANGED, PROFILES = "nightjar:policy", "nightjar:policy:changed", "nightjar:profiles"
SENTINEL = "redis+sentinel"
SCHEMES = ("redis", "rediss", "unix", SENTINEL)
# Renamed here because redis-py knows only its own.
ALIASES = {
    "valkey": "redis",
    "valkeys": "rediss",
    "valkey+unix": "unix",
    "redis+unix": "unix",
    "valkey+sentinel": SENTINEL,
}

# KEYS: sums, mark. ARGV: number of the flush, least mark before it, seconds that the mark lives,
# name, text, ... Returns the mark. A flush that was applied is not applied again, nor one before
# those that the store lost. The mark comes first: if a sum cannot be added to, the rest of the
# flush is lost rather than the start counted twice.
# A policy's own sums are brought to the later of two clocks, as `OwnSums.plus` does; those that
# are not ours give way.
FLUSH = """
local function numbers(text)
  local found = {}
  for part in string.gmatch(text or '', '%S+') do
    local number = tonumber(part)
    if not number then return {} end
    found[#found + 1] = number
  end
  return found
end
local function merged(known, added, half_life)
  if #known < 2 then return added end
  if known[1] > added[1] then known, added = added, known end
  local kept = half_life and 0.5 ^ ((added[1] - known[1]) / half_life) or 1
  for i = 2, math.max(#known, #added) do
    added[i] = (added[i] or 0) + kept * (known[i] or 0)
  end
  return added
end
local last = tonumber(redis.call('GET', KEYS[2]) or '0')
if tonumber(ARGV[1]) <= last or last < tonumber(ARGV[2]) then
  return last
end
redis.call('SET', KEYS[2], ARGV[1], 'EX', ARGV[3])
redis.call('HINCRBY', KEYS[1], 'revision', 1)
for i = 4, #ARGV, 2 do
  local name, text = ARGV[i], ARGV[i + 1]
  local half_life = string.match(name, '^own:([^:]+):')
  if half_life then
    local known = numbers(redis.call('HGET', KEYS[1], name))
    local sums = merged(known, numbers(text), half_life ~= 'inf' and tonumber(half_life))
    for j = 1, #sums do
      sums[j] = string.format('%.17g', sums[j])
    end
    redis.call('HSET', KEYS[1], name, table.concat(sums, ' '))
  elseif string.sub(name, 1, 7) == 'latest:' then
    redis.call('HSET', KEYS[1], name, text)
  else
    redis.call('HINCRBYFLOAT', KEYS[1], name, text)
  end
end
return tonumber(ARGV[1])
"""

# KEYS: book. ARGV: revision it must have, new text, channel of the hint. Returns 1 if swapped.
SWAP_BOOK = """
local revision = tonumber(redis.call('HGET', KEYS[1], 'revision') or '0')
if revision ~= tonumber(ARGV[1]) then
  return 0
end
redis.call('HSET', KEYS[1], 'book', ARGV[2], 'revision', revision + 1)
redis.pcall('PUBLISH', ARGV[3], revision + 1)
return 1
"""

# What the server says when it cannot add to a value; trying again would not help.
NOT_OURS = ("WRONGTYPE", "not a float", "not an integer", "NaN or Infinity")
StoreError = (RedisError, OSError)


class Refused(Exception):
    """The store will never take this write: what is there is not ours."""


def connect(url: str) -> redis.Redis:
    """A client for a URL; it connects on first use.

    Its own retries are off: it would send a script again whose reply came late.

    Raises:
        ConfigError: The URL is not one of a store.
    """
    scheme, separator, rest = url.partition("://")
    scheme = ALIASES.get(scheme, scheme)
    if not separator or not rest or scheme not in SCHEMES:
        raise ConfigError(
            f"--store={url!r}: must be redis://, rediss://, unix:// (valkey:// likewise) or "
            f"{SENTINEL}://HOST:PORT,HOST:PORT/NAME; empty keeps what is learned in memory"
        )
    options: dict[str, Any] = {
        "socket_timeout": SOCKET_TIMEOUT_S,
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "retry": Retry(NoBackoff(), 0),
        "decode_responses": True,
    }
    try:
        if scheme == SENTINEL:
            return _by_sentinel(rest, options)
        return redis.Redis.from_url(f"{scheme}://{rest}", **options)
    except ValueError as error:
        raise ConfigError(f"--store={url!r}: {error}") from None


def _by_sentinel(rest: str, options: dict[str, Any]) -> redis.Redis:
    """A client that asks sentinels for the master, again whenever the connection is lost."""
    hosts, _, name = rest.partition("/")
    parts = [urlsplit(f"//{host}") for host in hosts.rpartition("@")[2].split(",")]
    if not name or not all(part.hostname for part in parts):
        raise ValueError("needs HOST:PORT,HOST:PORT/NAME")
    access = urlsplit(f"//{hosts.rpartition('@')[0]}@x") if "@" in hosts else None
    if access:
        options |= {"username": access.username or None, "password": access.password}
    sentinel = Sentinel(  # type: ignore[no-untyped-call]
        [(str(part.hostname), part.port or 26379) for part in parts],
        sentinel_kwargs={k: v for k, v in options.items() if k not in ("username", "password")},
        **options,
    )
    return cast(redis.Redis, sentinel.master_for(name))


class RedisStore:
    """Reads and writes; every method raises one of `StoreError` if the store is away."""

    def __init__(self, client: redis.Redis, incarnation: str) -> None:
        self._client = client
        self._incarnation = incarnation
        # Script objects send the digest and load the text when the store does not know it.
        self._flush = client.register_script(FLUSH)
        self._swap_book = client.register_script(SWAP_BOOK)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def reconnect(self, error: BaseException) -> None:
        """Drop the connections where the server was demoted, so that the next one is asked for."""
        if isinstance(error, ReadOnlyError):
            await self._client.connection_pool.disconnect()

    async def ask_sentinels(self) -> None:
        """Behind Sentinel, go to the new master if there is one.

        An old master that still runs takes writes for seconds after another was elected. Where
        no sentinel answers soon, the connections that are open stay.
        """
        pool = self._client.connection_pool
        if isinstance(pool, SentinelConnectionPool):
            with contextlib.suppress(*StoreError, TimeoutError):
                async with asyncio.timeout(SENTINEL_TIMEOUT_S):
                    await pool.get_master_address()  # type: ignore[no-untyped-call]

    async def flush(self, group: str, number: int, after: int, sums: Mapping[str, str]) -> int:
        """Add sums, if the store has the flush `after`; the same number never counts twice.

        Returns:
            The mark: number of this process's last flush that the store has.

        Raises:
            Refused: The store's value cannot be added to.
        """
        arguments: list[str | int] = [number, after, FLUSH_MARK_S]
        for name, text in sums.items():
            arguments += [name, text]
        try:
            return int(await self._flush([_sums(group), self._mark(group)], arguments))
        except ResponseError as error:
            if any(words in str(error) for words in NOT_OURS):
                raise Refused(str(error)) from None
            raise

    def _mark(self, group: str) -> str:
        return f"nightjar:{{{group}}}:flushed:{self._incarnation}"

    async def revisions(self, groups: Sequence[str]) -> list[int]:
        """Revision of each group's sums; 0 where there are none."""
        async with self._client.pipeline(transaction=False) as pipeline:
            for group in groups:
                pipeline.hget(_sums(group), "revision")
            return [_whole(value) for value in await pipeline.execute()]

    async def read(self, group: str) -> tuple[dict[str, str], int, int]:
        """Texts of the sums by name, their revision, and the mark; all of one moment."""
        async with self._client.pipeline(transaction=True) as pipeline:
            pipeline.hgetall(_sums(group))
            pipeline.get(self._mark(group))
            row, mark = await pipeline.execute()
        revision = _whole(row.pop("revision", None))
        return row, revision, _whole(mark)

    async def read_book(self) -> tuple[str | None, int]:
        """Text of the versions, None if there is none, and its revision."""
        book, revision = await _await(self._client.hmget(BOOK, ["book", "revision"]))
        return book, _whole(revision)

    async def swap_book(self, revision: int, text: str) -> bool:
        """Replace the versions if they still have this revision."""
        return bool(await self._swap_book([BOOK], [revision, text, CHANGED]))

    async def profile_groups(self) -> set[str]:
        """Groups of all profiles that any planner heard of."""
        return set(await _await(self._client.smembers(PROFILES)))

    async def profiles(self, groups: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
        """Fields of the profiles of some groups; none where what is stored is no profile."""
        found = []
        keys = [f"nightjar:{{{group}}}:profile" for group in groups]
        for group, key in zip(groups, keys, strict=True):
            try:
                found.append((group, dict(json.loads(await self._client.get(key) or ""))))
            except (ValueError, TypeError):
                found.append((group, {}))
        return found

    async def put_profile(self, group: str, profile: Mapping[str, object]) -> None:
        """Remember a profile."""
        await self._client.set(f"nightjar:{{{group}}}:profile", json.dumps(profile))
        await _await(self._client.sadd(PROFILES, group))

    async def hints(self) -> AsyncIterator[None]:
        """Yield once it listens, and whenever another process says that it changed the versions.

        Raises:
            StoreError: The subscription is broken, or silent: then it is pinged, since a path
                that drops packets looks like one on which nothing happens.
        """
        async with self._client.pubsub() as pubsub:
            await pubsub.subscribe(CHANGED)
            yield
            pinged = False
            while True:
                message = await pubsub.get_message(timeout=HINT_WAIT_S)
                if message is not None:
                    pinged = False
                    if message["type"] == "message":
                        yield
                elif pinged:
                    raise redis.ConnectionError("the subscription is silent")
                else:
                    await pubsub.ping()
                    pinged = True


def _sums(group: str) -> str:
    return f"nightjar:{{{group}}}:sums"


def _whole(text: str | None) -> int:
    return int(text) if text is not None and text.isascii() and text.isdigit() else 0


async def _await(value: Any) -> Any:
    """redis-py types its asyncio calls as either; here they are always awaitable."""
    return await value
