"""The answers to several prompts as one stream, in the order in which they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from nightjar.v1 import generation_pb2 as pb

Responses = AsyncGenerator[pb.GenerateResponse]


async def merged(streams: Sequence[Responses], num_choices: int) -> Responses:
    """Every message of all streams, choice i of stream p renumbered p * num_choices + i.

    Nothing is read ahead of the reader but one message a stream. The first error ends them all,
    and so does closing.
    """
    queue: asyncio.Queue[pb.GenerateResponse | Exception | None] = asyncio.Queue(len(streams))

    async def pump(p: int, stream: Responses) -> None:
        end: Exception | None = None
        try:
            async with aclosing(stream):
                async for response in stream:
                    response.index += p * num_choices
                    await queue.put(response)
        except Exception as error:
            end = error
        await queue.put(end)

    tasks = [asyncio.create_task(pump(p, stream)) for p, stream in enumerate(streams)]
    try:
        num_open = len(streams)
        while num_open:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
