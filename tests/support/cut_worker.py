"""A door before a real worker that breaks connections after as many tokens as a test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from nightjar import rpc
from nightjar.v1 import generation_pb2 as pb
from nightjar.v1 import generation_pb2_grpc, worker_pb2, worker_pb2_grpc

SERVICES = ["nightjar.v1.GenerationService", "nightjar.v1.WorkerService"]


class CutWorker(
    generation_pb2_grpc.GenerationServiceServicer, worker_pb2_grpc.WorkerServiceServicer
):
    """Hands calls on to the worker at an address.

    With `cuts`, a request named "cut-K" ends after K tokens, of all its choices, as if the way to
    the worker were gone.
    """

    def __init__(self, behind: str, *, cuts: bool = False, num_waiting: int = 0) -> None:
        self.requests: list[pb.GenerateRequest] = []
        self.num_cut = 0
        self.num_together = 0  # requests that wait for each other before they are handed on
        self._cuts, self._num_waiting = cuts, num_waiting
        self._channel = rpc.dial(behind)
        self._generation = generation_pb2_grpc.GenerationServiceStub(self._channel)
        self._worker = worker_pb2_grpc.WorkerServiceStub(self._channel)
        self._together = asyncio.Event()
        self._server = rpc.Server("127.0.0.1:0", SERVICES)

    @property
    def address(self) -> str:
        """Where it serves, once started."""
        return self._server.address

    async def start(self) -> CutWorker:
        """Serve."""
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(self, self._server.grpc)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, self._server.grpc)
        await self._server.start()
        return self

    async def stop(self) -> None:
        """End."""
        await self._server.stop(0)
        await self._channel.close()

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Hand a request on, and its answer back as far as it goes."""
        self.requests.append(request)
        if len(self.requests) >= self.num_together:
            self._together.set()
        await self._together.wait()
        left = None
        if self._cuts and request.request_id.startswith("cut-"):
            left = int(request.request_id[4:])
        call = self._generation.Generate(request)
        try:
            async for response in call:
                if left is not None and left < len(response.token_ids):
                    self.num_cut += 1
                    if left:  # of a message with several tokens, the first; their text is late
                        del response.token_ids[left:], response.logprobs[left:]
                        response.text = ""
                        response.finish_reason = pb.FINISH_REASON_UNSPECIFIED
                        response.ClearField("usage")
                        yield response
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
                left = None if left is None else left - len(response.token_ids)
                yield response
        finally:
            call.cancel()

    async def GetWorkerStatus(
        self,
        request: worker_pb2.GetWorkerStatusRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> worker_pb2.GetWorkerStatusResponse:
        """The worker's status, with more requests that wait."""
        status: worker_pb2.GetWorkerStatusResponse = await self._worker.GetWorkerStatus(request)
        status.num_waiting += self._num_waiting
        return status
