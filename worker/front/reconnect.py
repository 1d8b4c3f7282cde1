"""A stream to a peer that is kept open for ever, whatever the peer does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import grpc

from nightjar import log, rpc
from nightjar.errors import Unavailable

FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.1, 2.0
CONNECT_TIMEOUT_S = 5.0
CONNECTING = "connecting"  # before the first attempt has ended


async def keep_open(
    peer: str,
    address: str,
    serve: Callable[[grpc.aio.Channel], Awaitable[bool]],
    tell: Callable[[str], None],
) -> None:
    """Connect, `serve`, and start again when that ends or fails, until cancelled.

    Args:
        peer: What logs call it.
        address: Where it listens.
        serve: Uses a connected channel until the stream ends; returns whether the peer
            answered on it, which resets the pause before the next attempt.
        tell: Hears why there is no stream, after each attempt.
    """
    backoff_s, told = FIRST_BACKOFF_S, ""
    while True:
        sentence = "the stream ended"
        try:
            async with rpc.dial(address) as channel:
                await asyncio.wait_for(_connected(channel), CONNECT_TIMEOUT_S)
                if await serve(channel):
                    backoff_s, told = FIRST_BACKOFF_S, ""
        except grpc.aio.AioRpcError as error:
            sentence = f"{error.code().name}: {error.details()}"
        except (Unavailable, TimeoutError, asyncio.InvalidStateError) as error:
            sentence = str(error) or "no connection in time"
        except Exception as error:
            sentence = f"{type(error).__name__}; see the worker's log"
            log.get().error(f"stream to the {peer} failed", address=address, exc_info=error)
        tell(sentence)
        if sentence != told:  # not every two seconds while a peer is away
            told = sentence
            log.get().warning(f"no stream to the {peer}; trying on", address=address, why=sentence)
        await asyncio.sleep(backoff_s)
        backoff_s = min(LAST_BACKOFF_S, 2 * backoff_s)


async def first_of(*coroutines: Coroutine[Any, Any, object]) -> None:
    """Run all until one ends, cancel the others, and raise what the one raised."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


async def _connected(channel: grpc.aio.Channel) -> None:
    state = channel.get_state(try_to_connect=True)
    while state is not grpc.ChannelConnectivity.READY:
        if state in (
            grpc.ChannelConnectivity.TRANSIENT_FAILURE,
            grpc.ChannelConnectivity.SHUTDOWN,
        ):
            raise Unavailable("cannot connect")
        await channel.wait_for_state_change(state)
        state = channel.get_state(try_to_connect=True)
