"""GenerationService of the gateway: the dispatcher's stream, with the worker's errors handed on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

import grpc
from grpc_status import rpc_status

from gateway.dispatch import Dispatcher
from gateway.worker_client import WorkerFailed
from nightjar.v1 import generation_pb2 as pb
from nightjar.v1 import generation_pb2_grpc

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """The same service that a worker serves; a client cannot tell which it talks to."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    async def Generate(
        self,
        request: pb.GenerateRequest,
        context: grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse],
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Stream an answer; the client's deadline and cancellation reach the worker."""
        responses = self._dispatcher.generate(request, context.time_remaining())
        try:
            async with aclosing(responses):
                async for response in responses:
                    yield response
        except WorkerFailed as failure:
            raised = rpc_status.to_status(failure.status)
            await context.abort(raised.code, raised.details, raised.trailing_metadata)
