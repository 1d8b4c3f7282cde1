"""Clients of `gateway.py`: they ask for echoes over gRPC or HTTP, and note when what arrives."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from dataclasses import dataclass, field

import grpc
from gateway_echo import MODEL

from nightjar.v1 import generation_pb2 as pb
from nightjar.v1 import generation_pb2_grpc

PROMPT = [7 * i % 1000 for i in range(32)]
SLOW_BYTES, FIRST_BYTES = 128, 8192  # of one read of a slow reader, at last and at first
_STAMP = re.compile(rb'"text":"(\d+)\|')
_END = b"\r\n0\r\n\r\n"
_TAIL_BYTES = 4096


@dataclass
class Heard:
    """One answer as it arrived."""

    asked_ns: int = 0
    messages: list[tuple[int, int]] = field(default_factory=list)  # arrived, made; monotonic ns
    num_messages: int = 0
    num_tokens: int = 0

    @property
    def ttft_us(self) -> float:
        """From the question to the first message."""
        return (self.messages[0][0] - self.asked_ns) / 1e3

    @property
    def delays_us(self) -> list[float]:
        """Of each message, from the worker's making it to its arrival."""
        return [(arrived - made) / 1e3 for arrived, made in self.messages]


def http_request(manner: str, num_tokens: int) -> bytes:
    """A streamed completion of the prompt."""
    body = json.dumps(
        {
            "model": MODEL,
            "prompt": PROMPT,
            "max_tokens": num_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    return (
        f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx-request-id: {manner}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}"
    ).encode()


class HttpClient(asyncio.Protocol):
    """One connection, one answer at a time; reads without parsing more than it must."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[None] | None = None
        self._pieces: list[tuple[int, bytes]] = []
        self._tail = b""
        self._num_events = 0

    @classmethod
    async def connect(cls, address: str) -> HttpClient:
        """Open the connection."""
        host, _, port = address.rpartition(":")
        _, client = await asyncio.get_running_loop().create_connection(cls, host, int(port))
        return client

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport; small writes go out at once, as asyncio has it."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Note the time first."""
        self._pieces.append((time.monotonic_ns(), data))
        self._tail = (self._tail + data)[-_TAIL_BYTES:]
        if self._tail.endswith(_END) and self._done is not None and not self._done.done():
            self._done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        """An answer that is not there by now has failed."""
        if self._done is not None and not self._done.done():
            self._done.set_exception(error or ConnectionError(f"cut: {self._tail[-500:]!r}"))

    async def ask(self, manner: str, num_tokens: int) -> Heard:
        """The answer of so many tokens.

        Raises:
            ConnectionError: It broke off, or is not the whole one.
        """
        assert self._transport is not None
        self._pieces, self._tail = [], b""
        self._done = asyncio.get_running_loop().create_future()
        request = http_request(manner, num_tokens)
        heard = Heard(asked_ns=time.monotonic_ns())
        self._transport.write(request)
        await self._done
        for arrived, data in self._pieces:
            heard.messages += [(arrived, int(made)) for made in _STAMP.findall(data)]
        content = b"".join(data for _, data in self._pieces)
        heard.num_messages = content.count(b'"text":"') - content.count(b'"text":""')
        if b"[DONE]" not in self._tail:
            raise ConnectionError(f"no whole answer: {self._tail[-500:]!r}")
        usage = self._tail.rpartition(b'"usage":')[2].partition(b"}\n\n")[0]
        heard.num_tokens = json.loads(usage)["completion_tokens"]
        return heard

    def close(self) -> None:
        """Hang up."""
        if self._transport is not None:
            self._transport.abort()


async def ask_grpc(channel: grpc.aio.Channel, manner: str, num_tokens: int) -> Heard:
    """The same over gRPC, of a worker or of a gateway."""
    request = pb.GenerateRequest(
        model=MODEL,
        request_id=manner,
        tokens=pb.TokenPrompt(token_ids=PROMPT),
        sampling=pb.SamplingParams(max_tokens=num_tokens),
    )
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    heard = Heard(asked_ns=time.monotonic_ns())
    async for response in stub.Generate(request):
        made = response.text.partition("|")[0]
        heard.messages.append((time.monotonic_ns(), int(made)))
        heard.num_messages += 1
        if response.HasField("usage"):
            heard.num_tokens = response.usage.num_completion_tokens
    return heard


class SlowReader:
    """An HTTP client that takes some bytes when it is told to, and nothing else."""

    def __init__(self, address: str, request: bytes) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.socket()
        # What the kernel would take in the reader's place is no longer the gateway's burden.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2 * FIRST_BYTES)
        self._socket.connect((host, int(port)))
        self._socket.sendall(request)
        self._socket.setblocking(False)
        self.num_bytes = self.num_tokens = 0
        self.cut_off = False
        self.finished = False

    def read(self, num_bytes: int) -> None:
        """Take so many bytes, if there are any."""
        try:
            data = self._socket.recv(num_bytes)
        except BlockingIOError:
            return
        self.num_bytes += len(data)
        self.num_tokens += data.count(b" w")
        self.cut_off |= not data or b'"error"' in data
        self.finished |= b"[DONE]" in data

    def close(self) -> None:
        """Leave in the middle of the answer."""
        self._socket.close()
