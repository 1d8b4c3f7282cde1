"""Brings the versions here and in the store to one state; each change is made exactly once."""

from __future__ import annotations

import uuid
from collections.abc import Callable

from nightjar import log
from nightjar.errors import NightjarError, Unavailable
from planner_service.planner import Planner
from planner_service.store import RedisStore
from planner_service.versions import Book, Change, from_json, to_json

MAX_PENDING_CHANGES = 64
MAX_SWAPS = 10


class BookSync:
    """The planner's versions, and what of them the store does not have yet.

    `first` is the book where there is none; `on_book` is told of every change.
    """

    def __init__(self, planner: Planner, first: Book, on_book: Callable[[], None]) -> None:
        self._planner = planner
        self._base = first  # the versions as last seen in the store
        self.on_book = on_book
        self._changes: list[Change] = []  # made here, not yet in the store
        self._revision = -1

    def use_base(self) -> None:
        """Decide by the versions as last seen in the store."""
        self._use(self._base)

    def change_here(self, change: Change, *, stored: bool) -> None:
        """Change the versions here; in the store with the next sync, if there is one.

        Raises:
            NightjarError: What `change` raises.
            Unavailable: Too many changes wait for the store.
        """
        if stored and len(self._changes) >= MAX_PENDING_CHANGES:
            raise Unavailable("the store is away, and too many changes wait for it")
        self._use(change(self._planner.book))
        if stored:
            self._changes.append(change)

    def made(self, change: Change) -> None:
        """The planner changed its versions itself: the store gets that with the next sync."""
        self._changes.append(change)

    async def sync(self, store: RedisStore, change: Change | None = None) -> None:
        """Bring the versions here and in the store to one state, `change` included.

        Raises:
            NightjarError: What `change` raises.
            TimeoutError: Others changed them all the time.
        """
        for _ in range(MAX_SWAPS):
            text, revision = await store.read_book()
            if revision == self._revision and not self._changes and change is None:
                return
            stored = _parsed(text)
            # A store that lost its versions gets them back.
            book = stored if stored is not None and stored.versions else self._base
            pending = [*self._changes, *([change] if change else [])]
            for waiting in pending:
                try:
                    book = waiting(book)
                except NightjarError:
                    if waiting is change:
                        raise
                    # Possible when it was made, not any more: another replica was first.
            if book == stored or await store.swap_book(revision, to_json(book)):
                self._revision = revision + (book != stored)
                self._changes = [waiting for waiting in self._changes if waiting not in pending]
                self._base = book
                self._use(book)
                return
        raise TimeoutError("the versions changed too often")

    def _use(self, book: Book) -> None:
        if book != self._planner.book:
            self._planner.set_book(book)
            self.on_book()


def _parsed(text: str | None) -> Book | None:
    try:
        return None if text is None else from_json(text)
    except ValueError as error:
        log.get().error("the store's versions are unreadable; they are replaced", reason=str(error))
        return None


def once(change: Change) -> Change:
    """The change, made once however often it is tried: a reply from the store may be lost."""
    token = uuid.uuid4().hex

    def changed(book: Book) -> Book:
        return book if token in book.changes else change(book).marked(token)

    return changed
