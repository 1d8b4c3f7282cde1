"""A network between planners and a store, for tests: it can go silent, or lose answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class StoreProxy:
    """Passes TCP connections on to a unix socket; `url` is for redis-py.

    `go_silent` makes the connections of that moment half-open: nothing passes and nobody is told.
    `lose_answers` cuts that many connections after the store ran a script, before it is heard.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._silent: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_connections = 0
        self._asked: dict[int, bytes] = {}  # last question on each connection
        self.lose_answers = 0
        self.num_lost = 0
        self.url = ""

    def go_silent(self) -> None:
        """Let nothing pass any more on the connections that are open now; new ones work."""
        self._silent = set(range(self._num_connections))

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[StoreProxy]:
        """Serve on a port of its own."""
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
        try:
            yield self
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        number, self._num_connections = self._num_connections, self._num_connections + 1
        try:
            store_reader, store_writer = await asyncio.open_unix_connection(self._path)
        except OSError:
            writer.close()
            return
        ways = [
            asyncio.ensure_future(self._pass(number, *way))
            for way in ((reader, store_writer, False), (store_reader, writer, True))
        ]
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            store_writer.close()
            writer.close()

    async def _pass(
        self,
        number: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        answers: bool,
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                if number in self._silent:
                    await asyncio.Event().wait()
                if not answers:
                    self._asked[number] = data
                elif self.lose_answers > 0 and b"EVALSHA" in self._asked[number]:
                    self.lose_answers -= 1
                    self.num_lost += 1
                    return
                writer.write(data)
                await writer.drain()
