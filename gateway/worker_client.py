"""One worker over gRPC: probes, streams, and failures as one exception with the whole status."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import grpc
from google.rpc import status_pb2

from nightjar import rpc
from nightjar.v1 import generation_pb2 as pb
from nightjar.v1 import generation_pb2_grpc, worker_pb2, worker_pb2_grpc

_DETAILS_KEY = "grpc-status-details-bin"


class WorkerFailed(Exception):
    """A worker ended a call with an error, or was lost during it.

    Attributes:
        code: The gRPC code to hand on.
        status: Code, sentence and details to hand on, as google.rpc.Status.
        lost: True if the worker or the way to it is gone; it said nothing itself.
    """

    def __init__(self, code: grpc.StatusCode, status: status_pb2.Status, *, lost: bool) -> None:
        super().__init__(status.message)
        self.code, self.status, self.lost = code, status, lost

    @property
    def elsewhere(self) -> bool:
        """Whether another worker may do better: this one is gone, draining or full.

        INTERNAL is not among them: a request that breaks an engine is not carried to the next.
        """
        return self.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)


class WorkerClient:
    """Calls to one worker; the channel connects on first use and again after a loss."""

    def __init__(self, address: str, credentials: grpc.ChannelCredentials | None = None) -> None:
        self._channel = rpc.dial(address, credentials)
        self._generation = generation_pb2_grpc.GenerationServiceStub(self._channel)
        self._worker = worker_pb2_grpc.WorkerServiceStub(self._channel)

    async def probe(self, timeout_s: float) -> worker_pb2.GetWorkerStatusResponse:
        """The worker's status.

        Raises:
            WorkerFailed: No answer within `timeout_s` seconds, or an error.
        """
        try:
            return await self._worker.GetWorkerStatus(
                worker_pb2.GetWorkerStatusRequest(), timeout=timeout_s
            )
        except grpc.aio.AioRpcError as error:
            raise _failure(error) from error

    async def generate(
        self, request: pb.GenerateRequest, timeout_s: float | None
    ) -> AsyncGenerator[pb.GenerateResponse]:
        """Stream the answer; closing the iterator cancels the call at once.

        Raises:
            WorkerFailed: The worker ended the call with an error, or was lost.
        """
        call = self._generation.Generate(request, timeout=timeout_s)
        try:
            async for response in call:
                yield response
        except grpc.aio.AioRpcError as error:
            raise _failure(error) from error
        finally:
            call.cancel()

    async def close(self) -> None:
        """Close the channel; open calls end."""
        await self._channel.close()


def _failure(error: grpc.aio.AioRpcError) -> WorkerFailed:
    """Tell what the worker said from what the transport says of a worker that is gone."""
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS_KEY and isinstance(value, bytes):
            return WorkerFailed(error.code(), status_pb2.Status.FromString(value), lost=False)
    code, message = error.code(), error.details() or "the worker gave no reason"
    # A worker's own errors carry details. Without them these two come from the transport
    # or from a server that was torn down; their text names internal addresses.
    lost = code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    if lost:
        code, message = grpc.StatusCode.UNAVAILABLE, "the worker was lost"
    status = status_pb2.Status(code=code.value[0], message=message)
    return WorkerFailed(code, status, lost=lost)
