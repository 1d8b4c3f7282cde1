"""A worker without a model: real gRPC services whose answers, pace and faults a test decides."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
from fake_answer import Manner, messages

from nightjar import rpc
from nightjar.errors import NightjarError
from nightjar.v1 import generation_pb2 as pb
from nightjar.v1 import generation_pb2_grpc, worker_pb2, worker_pb2_grpc
from nightjar.validation import Limits, validate

CONTEXT, VOCABULARY = 256, 300
SERVICES = ["nightjar.v1.GenerationService", "nightjar.v1.WorkerService"]


def words(num_tokens: int) -> str:
    """The text of an answer of `num_tokens` tokens."""
    return "".join(f" w{i}" for i in range(num_tokens))


@dataclass
class FakeWorker:
    """Answers a prompt of any n bytes (n tokens) with the words w0, w1, and so on.

    Two tokens a step with one draft of two, so that usage is not trivial. Set the fields
    while it runs: they apply to the next message or probe.
    """

    model: str = "tiny"
    status: dict[str, Any] = field(default_factory=dict)  # overrides of GetWorkerStatusResponse
    error: NightjarError | None = None  # raised before the first token
    error_after: int = -1  # tokens after which `late_error` is raised; -1: never
    late_error: BaseException | None = None
    lost_after: int = -1  # tokens after which the connection breaks; -1: never
    pause_after: int = -1  # tokens after which the answer waits for `resume`; -1: never
    start_first: bool = True  # facts of admission in a message of their own
    fingerprint: str = "fake"  # of its arithmetic
    arithmetic: str = "exact"  # or "free"
    manner: Manner | None = None  # of the answers, in place of what the fields here say
    padding: str = ""  # added to the text of every message
    probe_delay_s: float = 0.0
    # The messages of every answer, where they are not the words.
    script: Callable[[pb.GenerateRequest], list[pb.GenerateResponse]] | None = None
    requests: list[pb.GenerateRequest] = field(default_factory=list)
    remaining: list[float | None] = field(default_factory=list)  # deadlines, in seconds left
    num_active: int = 0
    num_sent: int = 0  # messages with tokens that the transport took
    num_cancelled: int = 0
    num_lost: int = 0  # connections that broke
    address: str = "127.0.0.1:0"
    credentials: grpc.ServerCredentials | None = None  # for TLS

    def __post_init__(self) -> None:
        self.resume = asyncio.Event()
        self._server: rpc.Server | None = None

    @property
    def limits(self) -> Limits:
        """What it serves."""
        return Limits(model=self.model, vocab_size=VOCABULARY, max_model_len=CONTEXT)

    async def start(self) -> FakeWorker:
        """Serve; on the same address again after `kill`."""
        self._server = rpc.Server(self.address, SERVICES, self.credentials)
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(
            _Generation(self), self._server.grpc
        )
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(_Worker(self), self._server.grpc)
        await self._server.start()
        self.address = self._server.address
        return self

    async def kill(self) -> None:
        """Be gone at once; open calls break."""
        if self._server is not None:
            server, self._server = self._server, None
            await server.grpc.stop(None)


class _Generation(generation_pb2_grpc.GenerationServiceServicer):
    def __init__(self, worker: FakeWorker) -> None:
        self._worker = worker

    async def Generate(
        self,
        request: pb.GenerateRequest,
        context: grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse],
    ) -> AsyncIterator[pb.GenerateResponse]:
        worker = self._worker
        worker.requests.append(request)
        worker.remaining.append(context.time_remaining())
        worker.num_active += 1
        try:
            async for response in self._answer(request, context):
                yield response
        except (asyncio.CancelledError, GeneratorExit):
            worker.num_cancelled += 1
            raise
        finally:
            worker.num_active -= 1

    async def _answer(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.GenerateResponse]:
        worker = self._worker
        validate(request, worker.limits)
        if worker.script is not None:
            for response in worker.script(request):
                yield response
            return
        manner = worker.manner or Manner(
            start_first=worker.start_first, fingerprint=worker.fingerprint, padding=worker.padding
        )
        done = len(request.continuation.token_ids)
        for response in messages(request, worker.limits, manner):
            tells = bool(response.token_ids or response.finish_reason)
            if tells and worker.error is not None:
                raise worker.error
            if 0 <= worker.error_after <= done and response.token_ids:
                raise worker.late_error or RuntimeError("a fault made to order")
            if 0 <= worker.lost_after <= done and tells:
                worker.num_lost += 1
                await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
            if 0 <= worker.pause_after <= done and response.token_ids:
                await worker.resume.wait()
            done += len(response.token_ids)
            yield response
            worker.num_sent += bool(response.token_ids)


class _Worker(worker_pb2_grpc.WorkerServiceServicer):
    def __init__(self, worker: FakeWorker) -> None:
        self._worker = worker

    async def GetWorkerStatus(
        self,
        request: worker_pb2.GetWorkerStatusRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> worker_pb2.GetWorkerStatusResponse:
        del request, context
        worker = self._worker
        if worker.probe_delay_s:
            await asyncio.sleep(worker.probe_delay_s)
        model = worker_pb2.ModelInfo(
            name=worker.model, vocab_size=VOCABULARY, max_model_len=CONTEXT, max_gamma=5
        )
        status = worker_pb2.GetWorkerStatusResponse(
            worker_id="fake",
            model=model,
            accepting=True,
            num_running=worker.num_active,
            num_free_blocks=64,
            num_total_blocks=64,
        )
        status.arithmetic.mode = worker.arithmetic
        status.arithmetic.fingerprint = worker.fingerprint
        for name, value in worker.status.items():
            setattr(status, name, value)
        return status
