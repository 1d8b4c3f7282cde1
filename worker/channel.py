"""The unix socket between front and engine: frames of msgspec messages, 4-byte lengths before them.

The front is asyncio and listens; the engine is a plain loop and connects. Neither end ever
blocks on the other: what the socket does not take waits in user space, bounded.
"""

from __future__ import annotations

import asyncio
import select
import socket
import struct
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from worker.messages import Shutdown, ToEngine, ToFront

MAX_FRAME_BYTES = 64 * 1024 * 1024
MAX_UNSENT_BYTES = 64 * 1024 * 1024
READ_BYTES = 256 * 1024
_LENGTH = struct.Struct("<I")

MessageT = TypeVar("MessageT")


class ChannelError(Exception):
    """The peer broke the protocol, or takes nothing any more."""


class Framer(Generic[MessageT]):
    """Cuts a byte stream into messages of one union."""

    def __init__(self, union: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[MessageT] = msgspec.msgpack.Decoder(union)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[MessageT]:
        """Messages completed by `data`.

        Raises:
            ChannelError: A frame is too long or is no message of the union.
        """
        self._buffer += data
        messages: list[MessageT] = []
        start, size = 0, len(self._buffer)
        with memoryview(self._buffer) as view:
            while size - start >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(view, start)
                if length > MAX_FRAME_BYTES:
                    raise ChannelError(f"frame of {length} bytes; the limit is {MAX_FRAME_BYTES}")
                end = start + _LENGTH.size + length
                if end > size:
                    break
                try:
                    messages.append(self._decoder.decode(view[start + _LENGTH.size : end]))
                except msgspec.MsgspecError as error:
                    raise ChannelError(f"unreadable message: {error}") from error
                start = end
        del self._buffer[:start]
        return messages


def frame(encoder: msgspec.msgpack.Encoder, message: ToEngine | ToFront) -> bytes:
    """One message as it travels."""
    body = encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class EngineChannel:
    """The engine's end. Single-threaded; `send` and `poll` are called by the step loop alone."""

    def __init__(self, socket_path: str, max_unsent_bytes: int = MAX_UNSENT_BYTES) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(socket_path)
        self._socket.setblocking(False)
        self._framer: Framer[ToEngine] = Framer(ToEngine)
        self._encoder = msgspec.msgpack.Encoder()
        self._unsent = bytearray()
        self._max_unsent_bytes = max_unsent_bytes
        self._open = True
        self._poller = select.poll()
        self._poller.register(self._socket, select.POLLIN)

    def fileno(self) -> int:
        """Descriptor of the socket, readable when `poll(0)` would return something."""
        return self._socket.fileno()

    def send(self, message: ToFront) -> None:
        """Hand a message over; what the socket does not take now goes with later calls.

        Messages to a front that is gone are dropped: the next `poll` says `Shutdown`.

        Raises:
            ChannelError: The front takes nothing and the unsent bytes exceed their bound.
        """
        if not self._open:
            return
        self._unsent += frame(self._encoder, message)
        self._write()
        if len(self._unsent) > self._max_unsent_bytes:
            raise ChannelError(f"the front has left {len(self._unsent)} bytes unread")

    def poll(self, timeout_s: float) -> list[ToEngine]:
        """Messages that arrived; waits up to `timeout_s` for the first, 0 does not wait.

        Once the front is gone, the list ends with `Shutdown`, at this and every later call.

        Raises:
            ChannelError: The front broke the protocol.
        """
        deadline = time.monotonic() + timeout_s
        while self._open:
            self._write()
            messages = self._read()
            if messages:
                return messages
            left = deadline - time.monotonic()
            if left <= 0 or not self._open:
                break
            self._wait(left)
        return [] if self._open else [Shutdown()]

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything is sent; False when time is up or the front is gone."""
        deadline = time.monotonic() + timeout_s
        while self._open and self._unsent:
            self._write()
            left = deadline - time.monotonic()
            if not self._unsent or left <= 0:
                break
            only_writable = select.poll()
            only_writable.register(self._socket, select.POLLOUT)
            only_writable.poll(left * 1000)
        return self._open and not self._unsent

    def close(self, timeout_s: float = 1.0) -> None:
        """Send what is left, for at most `timeout_s`, and close."""
        self.flush(timeout_s)
        self._open = False
        self._socket.close()

    def _wait(self, timeout_s: float) -> None:
        events = select.POLLIN | (select.POLLOUT if self._unsent else 0)
        self._poller.modify(self._socket, events)
        self._poller.poll(timeout_s * 1000)

    def _write(self) -> None:
        while self._open and self._unsent:
            try:
                sent = self._socket.send(self._unsent)
            except BlockingIOError:
                return
            except OSError:
                self._lost()
                return
            del self._unsent[:sent]

    def _read(self) -> list[ToEngine]:
        messages: list[ToEngine] = []
        while self._open:
            try:
                data = self._socket.recv(READ_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self._lost()
                messages.append(Shutdown())
                break
            messages += self._framer.feed(data)
            if len(data) < READ_BYTES:
                break
        return messages

    def _lost(self) -> None:
        self._open = False
        self._unsent.clear()


class FrontChannel(asyncio.Protocol):
    """The front's end: callbacks for messages and for the end, `send` that never waits."""

    def __init__(
        self,
        on_open: Callable[[FrontChannel], None],
        on_message: Callable[[ToFront], None],
        on_lost: Callable[[Exception | None], None],
    ) -> None:
        self._on_open = on_open
        self._on_message = on_message
        self._on_lost = on_lost
        self._framer: Framer[ToFront] = Framer(ToFront)
        self._encoder = msgspec.msgpack.Encoder()
        self._transport: asyncio.Transport | None = None
        self._error: ChannelError | None = None

    @property
    def unsent_bytes(self) -> int:
        """Bytes that the engine has not taken yet."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def send(self, message: ToEngine) -> None:
        """Hand a message over; dropped when the engine is gone, of which `on_lost` tells."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(self._encoder, message))

    def close(self) -> None:
        """Close after what is unsent; `on_lost` follows."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Asyncio: the engine connected."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._on_open(self)

    def data_received(self, data: bytes) -> None:
        """Asyncio: bytes arrived."""
        try:
            messages = self._framer.feed(data)
        except ChannelError as error:
            self._error = error
            assert self._transport is not None
            self._transport.abort()
            return
        for message in messages:
            self._on_message(message)

    def connection_lost(self, exc: Exception | None) -> None:
        """Asyncio: the engine is gone."""
        self._transport = None
        self._on_lost(self._error or exc)
