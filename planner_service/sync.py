"""Keeps memory and store together in the background; nothing that decides waits for it.

Everything happens in one task, one thing after the other, so that a flush and a read of the
same sums never overlap. While the store is away the planner goes on from memory.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from nightjar import log
from nightjar.errors import InvalidRequest
from planner_service.book_sync import BookSync, once
from planner_service.context import Profile
from planner_service.planner import MAX_PROFILES, Planner
from planner_service.store import RedisStore, Refused, StoreError
from planner_service.sums import FieldReader
from planner_service.versions import Book, Change

FLUSH_INTERVAL_S = 0.25
BOOK_INTERVAL_S = 0.5
MERGE_INTERVAL_S = 2.0
MAX_BACKOFF_S = 2.0
LISTEN_AGAIN_S = 1.0
CHANGE_TIMEOUT_S = 1.0
CANCEL_AGAIN_S = 0.05
LAST_FLUSH_TIMEOUT_S = 2.0
FIELDS_PER_TURN = 256


class Sync:
    """Carries sums and versions between a planner and its store; without a store, only versions.

    `first` is the book where there is none; `on_book` is told of every change.
    """

    def __init__(
        self,
        planner: Planner,
        store: RedisStore | None,
        *,
        first: Book,
        on_book: Callable[[], None] = lambda: None,
        clock: Callable[[], float],
    ) -> None:
        self._planner = planner
        self._store = store
        self._clock = clock
        self._books = BookSync(planner, first, on_book)
        self.connected = False
        self._known_profiles: set[str] = set()
        self._lock = asyncio.Lock()
        self._wake = asyncio.Event()
        self._said_away = False
        self._said_dropped = 0

    async def start(self) -> None:
        """Read everything back; without the store, begin from nothing and say so."""
        self._books.use_base()
        if self._store is None:
            log.get().warning("no store is configured: what is learned stays in memory")
            return
        try:
            async with self._lock, asyncio.timeout(CHANGE_TIMEOUT_S):
                await self._sync_book()
        except (*StoreError, TimeoutError) as error:
            self._away(error)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(10):
                await self._attempt(self._read_everything)

    async def run(self) -> None:
        """Flush, poll and merge until cancelled."""
        if self._store is None:
            await asyncio.Event().wait()
        listener = asyncio.create_task(self._listen())
        next_book = next_merge = 0.0
        backoff = FLUSH_INTERVAL_S
        was_connected = self.connected
        me = asyncio.current_task()
        assert me is not None
        try:
            # The store's client may swallow a cancellation that comes together with an answer.
            while not me.cancelling():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(backoff):
                        await self._wake.wait()
                    next_book = 0.0
                self._wake.clear()
                if self.connected and not was_connected:
                    await self._attempt(self._read_everything)
                was_connected = self.connected
                self._say_dropped()
                num_known = len(self._known_profiles)
                await self._attempt(self._flush)
                if len(self._known_profiles) > num_known:
                    next_merge = 0.0  # a profile that is new here may be known to others
                if self._clock() >= next_book:
                    await self._attempt(self._sync_book)
                    next_book = self._clock() + BOOK_INTERVAL_S
                if self._clock() >= next_merge:
                    await self._attempt(self._merge)
                    next_merge = self._clock() + MERGE_INTERVAL_S
                backoff = FLUSH_INTERVAL_S if self.connected else min(2 * backoff, MAX_BACKOFF_S)
        finally:
            while not listener.done():
                listener.cancel()
                await asyncio.wait({listener}, timeout=CANCEL_AGAIN_S)

    async def finish(self) -> None:
        """Write what is left, for a short while, and close; `run` must have ended."""
        if self._store is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_FLUSH_TIMEOUT_S):
                await self._attempt(self._flush)
        await self._store.close()

    async def change(self, change: Change) -> None:
        """Change the versions, here at once and in the store; without it, once it is back.

        Raises:
            NightjarError: What `change` raises.
            Unavailable: The store has been away for too many changes.
        """
        change = once(change)
        if self._store is not None and self.connected:
            with contextlib.suppress(*StoreError, TimeoutError):
                async with asyncio.timeout(CHANGE_TIMEOUT_S), self._lock:
                    await self._books.sync(self._store, change)
                    self._here()
                    return
        self._books.change_here(change, stored=self._store is not None)

    def tell(self, on_book: Callable[[], None]) -> None:
        """Whom to tell of every change of the versions from now on."""
        self._books.on_book = on_book

    def withdraw(self, version_id: str, because: str, at_ms: int) -> None:
        """Have a failed version withdrawn for all replicas; here it already is."""
        if self._store is not None:
            self._books.made(lambda book: book.withdraw(version_id, because, at_ms))
            self._wake.set()
        # Not now: whoever found the fault is in the middle of a decision.
        asyncio.get_running_loop().call_soon(self._books.on_book)

    async def _attempt(self, action: Callable[[], Awaitable[None]]) -> None:
        assert self._store is not None
        try:
            async with self._lock:
                await action()
        except StoreError as error:
            self._away(error)
            with contextlib.suppress(*StoreError):
                await self._store.reconnect(error)

    async def _flush(self) -> None:
        assert self._store is not None
        ledger = self._planner.ledger
        for key, profile in list(self._planner.profiles.items()):
            if key not in self._known_profiles:
                await self._store.put_profile(key, profile.as_dict())
                self._here()
                self._known_profiles.add(key)
        for key in ledger.groups():
            departing = ledger.depart(key)
            while departing is not None:
                flight, after = departing
                try:
                    mark = await self._store.flush(key, flight.number, after, flight.sums.fields())
                except Refused as error:
                    ledger.drop_flight(key)
                    log.get().error(
                        "the store refused sums; they stay in memory", group=key, reason=str(error)
                    )
                else:
                    self._settle(key, mark)
                    self._here()
                departing = ledger.depart(key, waiting=True)

    def _settle(self, key: str, mark: int) -> None:
        if num_lost := self._planner.ledger.settle(key, mark, self._clock()):
            self._known_profiles.clear()  # they may be lost too
            log.get().warning(
                "the store lost what it had confirmed; it is sent again",
                group=key,
                flushes=num_lost,
            )

    async def _merge(self) -> None:
        """Take over what other replicas wrote."""
        assert self._store is not None
        await self._store.ask_sentinels()
        await self._read_profiles()
        ledger = self._planner.ledger
        keys = ledger.groups()
        for key, revision in zip(keys, await self._store.revisions(keys), strict=True):
            if revision != ledger.revision(key):
                await self._read(key)

    async def _read(self, key: str) -> None:
        assert self._store is not None
        fields, revision, mark = await self._store.read(key)
        reader = FieldReader()
        for i, (name, text) in enumerate(fields.items()):
            reader.take(name, text)
            if i % FIELDS_PER_TURN == FIELDS_PER_TURN - 1:
                await asyncio.sleep(0)  # decisions go on while thousands of fields are read
        stats = reader.stats()
        if reader.num_unknown:
            log.get().warning(
                "the store holds sums that are not ours", group=key, fields=reader.num_unknown
            )
        if key not in self._planner.ledger.groups():
            return  # it was forgotten meanwhile
        self._settle(key, mark)
        if self._planner.ledger.adopt(key, stats, revision):
            self._known_profiles.clear()
            log.get().error(
                "the store lost sums; this planner goes on with what it knows", group=key
            )

    async def _read_everything(self) -> None:
        self._known_profiles.clear()
        await self._merge()
        self._here()

    async def _read_profiles(self) -> None:
        """Know of the profiles that other replicas heard of."""
        assert self._store is not None
        groups = await self._store.profile_groups() - self._known_profiles
        room = MAX_PROFILES - len(self._planner.profiles)
        for group, fields in await self._store.profiles(sorted(groups)[:room]):
            self._known_profiles.add(group)
            try:
                profile = Profile(**fields)
                profile.check("profile")
            except (TypeError, AttributeError, InvalidRequest) as error:
                log.get().warning("the store holds a profile that is not ours", reason=str(error))
                continue
            self._planner.register(profile)

    async def _sync_book(self) -> None:
        assert self._store is not None
        await self._books.sync(self._store)
        self._here()

    async def _listen(self) -> None:
        assert self._store is not None
        while True:
            with contextlib.suppress(*StoreError):
                async for _ in self._store.hints():
                    self._wake.set()
            await asyncio.sleep(LISTEN_AGAIN_S)

    def _say_dropped(self) -> None:
        dropped = self._planner.ledger.num_dropped
        if dropped >= 2 * self._said_dropped + 1:  # 1, 3, 7, ...: a log, not a flood
            self._said_dropped = dropped
            log.get().warning(
                "too much waits for the store: what is learned more stays in memory",
                updates_so_far=dropped,
            )

    def _here(self) -> None:
        if not self.connected:
            log.get().info("the store answers")
        self.connected, self._said_away = True, False

    def _away(self, error: BaseException) -> None:
        if not self._said_away:
            log.get().warning(
                "the store is away; decisions go on from memory",
                reason=f"{type(error).__name__}: {error}",
            )
        self.connected, self._said_away = False, True
