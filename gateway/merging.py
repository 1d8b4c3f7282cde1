"""Several streams as one, without a buffer that could grow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

ItemT = TypeVar("ItemT")


async def merged(streams: Sequence[AsyncGenerator[ItemT]]) -> AsyncGenerator[ItemT]:
    """Items of all streams as they come; at most one of each is read ahead.

    The first error of a stream ends all; closing this closes them.
    """
    ready: asyncio.Queue[ItemT | Exception | None] = asyncio.Queue(1)  # None: a stream has ended

    async def pump(stream: AsyncGenerator[ItemT]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    await ready.put(item)
        except Exception as error:
            await ready.put(error)
        else:
            await ready.put(None)

    pumps = [asyncio.create_task(pump(stream)) for stream in streams]
    num_open = len(pumps)
    try:
        while num_open:
            item = await ready.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
