"""Waiting on conditions in asyncio tests, with a deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import grpc


async def until(
    holds: Callable[[], bool | Awaitable[bool]],
    what: str,
    task: asyncio.Task[int] | None = None,
    timeout_s: float = 30,
) -> None:
    """Wait until `holds()`; a call that the server refuses counts as no.

    Raises:
        AssertionError: It did not within `timeout_s`, or `task` ended before.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            answer = holds()
            if answer if isinstance(answer, bool) else await answer:
                return
        except grpc.aio.AioRpcError:
            pass
        if task is not None and task.done():
            raise AssertionError(f"ended with {task.result()} before: {what}")
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        await asyncio.sleep(0.01)
