"""Who is told of decisions and reports as they happen: bounded queues, one a watcher."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Generic, Literal, NamedTuple, TypeVar

T = TypeVar("T")
Kind = Literal["decision", "report"]
MAX_WAITING = 1024  # that a slow watcher may lag behind; older ones are dropped for it


class _Wish(NamedTuple):
    profile_key: str  # empty: every profile
    include_reports: bool


class Watchers(Generic[T]):
    """Hands what happens to everyone who watches; never waits for any of them."""

    def __init__(self) -> None:
        self._wishes: dict[asyncio.Queue[T | None], _Wish] = {}

    def tell(self, kind: Kind, profile_key: str, make: Callable[[], T]) -> None:
        """Something happened; it is made only if somebody watches for it."""
        for queue, wish in self._wishes.items():
            if wish.profile_key in ("", profile_key) and (
                kind == "decision" or wish.include_reports
            ):
                if queue.full():
                    queue.get_nowait()
                queue.put_nowait(make())

    async def watch(self, profile_key: str, *, include_reports: bool) -> AsyncIterator[T]:
        """What happens from now on, in order, until `close`; a slow reader misses the oldest."""
        queue: asyncio.Queue[T | None] = asyncio.Queue(MAX_WAITING)
        self._wishes[queue] = _Wish(profile_key, include_reports)
        try:
            while (item := await queue.get()) is not None:
                yield item
        finally:
            self._wishes.pop(queue, None)

    def close(self) -> None:
        """End every watch."""
        for queue in self._wishes:
            while queue.full():
                queue.get_nowait()
            queue.put_nowait(None)
