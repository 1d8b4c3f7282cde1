"""An echo worker for `gateway.py`: the worker's own messages and stream buffers, and no model.

It repeats the prompt's token ids. The request's id says how: `read:K`, messages of K tokens as fast
as they are read; `pace:R:MS`, R tokens a second, the first at once and the rest joined for MS
milliseconds, more where its client is slow. Every text begins with the time at which it was made.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from array import array
from collections.abc import AsyncIterator
from typing import Any

import grpc

from nightjar.rpc import Server, dial, until_signalled
from nightjar.v1 import generation_pb2 as pb
from nightjar.v1 import generation_pb2_grpc, worker_pb2, worker_pb2_grpc
from nightjar.validation import Limits, validate
from worker.front.pieces import Piece, Start
from worker.front.streams import TokenStream, Unread
from worker.messages import Finished, RowUsage
from worker.server import response_of

MODEL, CONTEXT, VOCABULARY = "echo", 262_144, 1000
SERVICES = ["nightjar.v1.GenerationService", "nightjar.v1.WorkerService"]
_FINGERPRINT = "echo"
_WORDS = [f" w{token_id:03}" for token_id in range(VOCABULARY)]


class Pace:
    """Pushes tokens into all streams of one pace, and wakes their readers together."""

    def __init__(self, tokens_per_s: float, interval_s: float) -> None:
        self._tokens_per_s, self._interval_s = tokens_per_s, interval_s
        self._rows: dict[TokenStream, Row] = {}
        self._timer: asyncio.TimerHandle | None = None

    def open(self, request: pb.GenerateRequest, unread: Unread) -> TokenStream:
        """A stream whose first token is there at once."""
        stream = TokenStream(0, self._close, unread=unread)
        row = Row(request)
        self._rows[stream] = row
        self._push(stream, row, 1)
        if self._timer is None and self._rows:
            self._later(asyncio.get_running_loop().time())
        return stream

    def _close(self, stream: TokenStream) -> None:
        self._rows.pop(stream, None)

    def _later(self, since: float) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_at(since + self._interval_s, self._tick, since)

    def _tick(self, since: float) -> None:
        now = asyncio.get_running_loop().time()
        for stream, row in list(self._rows.items()):
            row.owed += self._tokens_per_s * (now - since)
            self._push(stream, row, int(row.owed))
        self._timer = None
        if self._rows:
            self._later(now)

    def _push(self, stream: TokenStream, row: Row, num_tokens: int) -> None:
        token_ids = row.next(num_tokens)
        row.owed -= len(token_ids)
        if token_ids and stream.push(memoryview(array("i", token_ids).tobytes())):
            stream.wake()
        if row.left == 0:
            stream.finish(Finished(request_id=0, reason="length", usage=row.usage()))
        if stream.ended:
            self._close(stream)


class Row:
    """One answer: what is left of it."""

    def __init__(self, request: pb.GenerateRequest) -> None:
        self._prompt = list(request.tokens.token_ids)
        self._num_tokens = self.left = request.sampling.max_tokens
        self.owed = 1.0  # tokens due and not pushed

    def next(self, num_tokens: int) -> list[int]:
        """So many token ids, or all that are left."""
        num_tokens = min(num_tokens, self.left)
        begin = (self._num_tokens - self.left) % len(self._prompt)
        self.left -= num_tokens
        repeats = (begin + num_tokens) // len(self._prompt) + 1
        return (self._prompt * repeats)[begin : begin + num_tokens]

    def usage(self) -> RowUsage:
        """What the whole answer cost."""
        return RowUsage(
            num_prompt_tokens=len(self._prompt),
            num_completion_tokens=self._num_tokens,
            num_cached_tokens=0,
            num_draft_tokens=0,
            num_accepted_tokens=0,
            num_steps=self._num_tokens,
            gamma_histogram=(self._num_tokens,),
            policy_version="echo",
            num_preemptions=0,
        )

    def start(self, seed: int) -> Start:
        """Facts of its admission."""
        return Start(seed=seed, fingerprint=_FINGERPRINT, num_prompt_tokens=len(self._prompt))


class Generation(generation_pb2_grpc.GenerationServiceServicer):
    """The echo itself."""

    def __init__(self) -> None:
        self._paces: dict[tuple[float, float], Pace] = {}
        self._unread = Unread()

    async def Generate(
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Answer as the request's id says."""
        validate(request, Limits(model=MODEL, vocab_size=VOCABULARY, max_model_len=CONTEXT))
        row = Row(request)
        kind, *numbers = request.request_id.split(":")
        if kind == "read":
            batches = self._read(row, int(numbers[0]))
        else:
            batches = self._paced(request, float(numbers[0]), float(numbers[1]))
        start: Start | None = row.start(request.sampling.seed)
        async for token_ids, usage in batches:
            piece = Piece(index=0, token_ids=token_ids, start=start, usage=usage)
            piece.finish_reason = "length" if usage else ""
            piece.text = f"{time.monotonic_ns()}|{''.join(map(_WORDS.__getitem__, token_ids))}"
            start = None
            yield response_of(piece)

    async def _read(self, row: Row, size: int) -> AsyncIterator[tuple[list[int], RowUsage | None]]:
        while row.left:
            token_ids = row.next(size)
            yield token_ids, None if row.left else row.usage()

    async def _paced(
        self, request: pb.GenerateRequest, tokens_per_s: float, interval_ms: float
    ) -> AsyncIterator[tuple[list[int], RowUsage | None]]:
        pace = self._paces.setdefault(
            (tokens_per_s, interval_ms), Pace(tokens_per_s, interval_ms / 1000)
        )
        with pace.open(request, self._unread) as stream:
            while True:
                batch = await stream.read()
                ended = batch.finished is not None
                if batch.token_ids or ended:
                    yield batch.token_ids, batch.finished.usage if batch.finished else None
                if ended:
                    return


class Status(worker_pb2_grpc.WorkerServiceServicer):
    """Always ready."""

    async def GetWorkerStatus(
        self, request: worker_pb2.GetWorkerStatusRequest, context: Any
    ) -> worker_pb2.GetWorkerStatusResponse:
        """The status of an idle worker."""
        model = worker_pb2.ModelInfo(name=MODEL, vocab_size=VOCABULARY, max_model_len=CONTEXT)
        status = worker_pb2.GetWorkerStatusResponse(worker_id="echo", model=model, accepting=True)
        status.arithmetic.mode = "exact"
        status.arithmetic.fingerprint = _FINGERPRINT
        return status


async def serve(listen: str, relay_of: str) -> None:
    """Serve until a signal, as an echo worker or as a relay of one."""
    server = Server(listen, SERVICES)
    if relay_of:
        server.grpc.add_generic_rpc_handlers((relay(relay_of),))
    else:
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(Generation(), server.grpc)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(Status(), server.grpc)
    await server.start()
    print(f"grpc listening on {server.address}", flush=True)
    await until_signalled()
    await server.stop(0)


def relay(address: str) -> grpc.GenericRpcHandler:
    """Hands on the bytes of every message: what no gateway in this library can do without."""
    call = dial(address).unary_stream(f"/{SERVICES[0]}/Generate", bytes, bytes)

    async def generate(request: bytes, _: Any) -> AsyncIterator[bytes]:
        async for response in call(request):
            yield response

    handler = grpc.unary_stream_rpc_method_handler(generate, bytes, bytes)
    return grpc.method_handlers_generic_handler(SERVICES[0], {"Generate": handler})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--listen", default="127.0.0.1:0", help="HOST:PORT; port 0 takes any")
    parser.add_argument("--relay-of", default="", help="address of an echo worker to relay instead")
    options = parser.parse_args()
    asyncio.run(serve(options.listen, options.relay_of))
