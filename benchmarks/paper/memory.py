"""The worker's own client of the memory agent, on a thread beside an engine without a front."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from typing import Any

from worker.memory_client import FromEngine, MemoryClient
from worker.messages import PoolInfo, Pressure, ToFront


class MemoryLink:
    """Carries messages between engine and agent; arms without elastic memory send no pressure."""

    def __init__(self, address: str, pool: PoolInfo) -> None:
        self._inbox: deque[Any] = deque()
        self._allowed = False
        self._loop = asyncio.new_event_loop()
        self._client = MemoryClient(address, "paper", pool, self._inbox.append)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def attached(self) -> bool:
        """Whether the agent has mapped the pool."""
        return self._client.attached

    def allow(self, elastic: bool) -> None:
        """Whether a resident draft may be asked to leave from now on."""
        self._allowed = elastic

    def messages(self) -> list[Any]:
        """What the agent said since."""
        found = []
        while self._inbox:
            found.append(self._inbox.popleft())
        return found

    def takes(self, message: ToFront) -> bool:
        """Whether a message is the agent's; it is then on its way.

        Pressure alone makes the agent ask for the draft's memory; a draft that is away comes
        back whoever's turn it is.
        """
        if not isinstance(message, FromEngine):
            return False
        keeps = isinstance(message, Pressure) and message.residency == "resident"
        if self._allowed or not keeps:
            self._loop.call_soon_threadsafe(self._client.forward, message)
        return True

    def close(self) -> None:
        """End the stream."""
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._task = self._loop.create_task(self._client.run())
        try:
            self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            pass
        finally:
            self._loop.close()
