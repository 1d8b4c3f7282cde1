"""uvicorn in the gateway's own event loop, on a socket that is bound before anything starts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
from collections.abc import Iterator

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from gateway.http.errors import HttpError, render
from nightjar.errors import ConfigError

MAX_HEADER_BYTES = 64 * 1024
# Of one connection, in the kernel: else its buffers take megabytes that a client does not read.
MAX_UNSENT_BYTES = 64 * 1024
_KEEP_ALIVE_S = 75
_START_POLL_S = 0.005


def bind(listen: str) -> socket.socket:
    """Bind `host:port`.

    Raises:
        ConfigError: The address is malformed or taken.
    """
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"--http-listen={listen!r}: must be host:port")
    bound = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections have it from the socket that accepts them.
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)
        bound.bind(address)
        # Two listeners cannot share a port, but two bound sockets can: listen now.
        bound.listen(2048)
    except OSError as error:
        if bound is not None:
            bound.close()
        raise ConfigError(
            f"--http-listen={listen!r}: cannot bind ({error.strerror}); is it taken?"
        ) from error
    bound.setblocking(False)
    return bound


class HttpServer:
    """Serves an ASGI application on a bound socket.

    `address` is the socket's host:port. With `context` it speaks TLS alone.
    """

    def __init__(
        self,
        app: ASGIApp,
        bound: socket.socket,
        drain_timeout_s: float,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self._socket = bound
        host, port = bound.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._drain_timeout_s = drain_timeout_s
        self._server = _Server(
            uvicorn.Config(
                app,
                http=_Protocol,
                ws="none",
                lifespan="off",
                loop="none",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                h11_max_incomplete_event_size=MAX_HEADER_BYTES,
                ssl_context_factory=None if context is None else (lambda *_: context),
            )
        )
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Accept connections."""
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
            await asyncio.sleep(_START_POLL_S)

    async def stop(self) -> None:
        """Accept nothing more, give open requests `drain_timeout_s` seconds, cut the rest."""
        if self._serving is None:
            self._socket.close()
            return
        # uvicorn takes whole seconds by its types, any number by its code.
        self._server.config.timeout_graceful_shutdown = self._drain_timeout_s  # type: ignore[assignment]
        self._server.should_exit = True
        await self._serving


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the gateway's own: it drains both protocols at once."""
        yield


class _Protocol(H11Protocol):
    """Answers what is not HTTP, or whose header is too long, in the shape of all errors.

    A header has to be whole in the time that an idle connection is kept: uvicorn itself waits for
    a first one, or for the rest of one, as long as the client likes.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first header."""
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def data_received(self, data: bytes) -> None:
        """Take what came; a part of a header, or more of a body answered already, wins no time."""
        ends, self.timeout_keep_alive_task = self.timeout_keep_alive_task, None
        super().data_received(data)
        if ends is None:
            return
        if self.conn.their_state is h11.IDLE or self.conn.our_state is h11.DONE:
            self.timeout_keep_alive_task = ends
        else:
            ends.cancel()

    def send_400_response(self, msg: str) -> None:
        """Send the error that the application never sees, and close."""
        message = f"{msg} A request's header may have {MAX_HEADER_BYTES} bytes."
        status, content, _ = render(HttpError(400, message))
        body = json.dumps(content).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        head = h11.Response(status_code=status, headers=headers, reason=b"Bad Request")
        for event in (head, h11.Data(data=body), h11.EndOfMessage()):
            if output := self.conn.send(event):
                self.transport.write(output)
        self.transport.close()
