"""GenerationService of the gateway: the dispatcher's stream, with the worker's errors handed on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

import grpc

from gateway.attempts import Notes
from gateway.dispatch import Dispatcher
from gateway.worker_client import WorkerFailed
from nightjar import rpc
from nightjar.v1 import generation_pb2 as pb
from nightjar.v1 import generation_pb2_grpc

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name
# Trailing metadata of an answer that more than one worker gave: "exact", or "best-effort" where
# the workers' arithmetic is free and near-ties may have fallen otherwise.
RESUMED_KEY = "nightjar-resumed"


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """The same service that a worker serves; a client cannot tell which it talks to."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    async def Generate(
        self,
        request: pb.GenerateRequest,
        context: grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse],
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Stream an answer; the client's deadline and cancellation reach the worker.

        A message is taken from the worker once the transport has taken the one before it, so a
        client that does not read stops its own answer and costs no memory.
        """
        notes = Notes()
        responses = self._dispatcher.generate(request, context.time_remaining(), notes)
        try:
            async with aclosing(responses):
                async for response in responses:
                    yield response
        except WorkerFailed as failure:
            await rpc.abort_with(context, failure.status)
        if notes.num_resumptions:
            how = "best-effort" if notes.best_effort else "exact"
            context.set_trailing_metadata(((RESUMED_KEY, how),))
