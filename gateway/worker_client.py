"""One worker over gRPC: probes, streams, and failures as one exception with the whole status."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

from nightjar import rpc
from nightjar.v1 import generation_pb2 as pb
from nightjar.v1 import generation_pb2_grpc, worker_pb2, worker_pb2_grpc

_DETAILS_KEY = "grpc-status-details-bin"
_DEFAULT_RETRY_S = 1.0


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
    def gone(self) -> bool:
        """Whether the worker is lost, stalled, or ends what it has begun, as it does to leave."""
        return self.code is grpc.StatusCode.UNAVAILABLE

    @property
    def broke(self) -> bool:
        """Whether the engine failed: by this request's fault, or by that of any beside it."""
        return self.code is grpc.StatusCode.INTERNAL

    @property
    def full(self) -> bool:
        """Whether the worker has no room now."""
        return self.code is grpc.StatusCode.RESOURCE_EXHAUSTED

    @property
    def retry_after_s(self) -> float:
        """When to ask it again, by its own hint where it gave one."""
        for detail in self.status.details:
            retry = error_details_pb2.RetryInfo()
            if detail.Unpack(retry):
                return float(retry.retry_delay.ToTimedelta().total_seconds())
        return _DEFAULT_RETRY_S


def lost(message: str) -> WorkerFailed:
    """The failure of a worker that said nothing itself."""
    code = grpc.StatusCode.UNAVAILABLE
    return WorkerFailed(code, status_pb2.Status(code=code.value[0], message=message), lost=True)


class Stream:
    """One open call: its messages, and since when it waits for the next.

    Args:
        call: The call.
        replaceable: Whether another worker could go on with it now.
    """

    def __init__(self, call: Any, replaceable: Callable[[], bool]) -> None:
        self._call = call
        self._replaceable = replaceable
        self._waits_since: float | None = None  # None: its reader is busy
        self._left = False

    def leave_if_stalled(self, stall_timeout_s: float) -> None:
        """End a call that has brought nothing for so long, if another worker could go on.

        The caller knows that the worker stands still. Nothing that it still sends is read.
        """
        since = self._waits_since
        if since is None or asyncio.get_running_loop().time() - since < stall_timeout_s:
            return
        if self._replaceable():
            self._left = True
            self._call.cancel()

    async def responses(self) -> AsyncGenerator[pb.GenerateResponse]:
        """Stream the answer; closing the iterator cancels the call at once.

        Raises:
            WorkerFailed: The worker ended the call with an error, was lost, or was left.
        """
        time = asyncio.get_running_loop().time
        self._waits_since = time()
        try:
            async for response in self._call:
                self._waits_since = None
                yield response
                self._waits_since = time()
        except grpc.aio.AioRpcError as error:
            raise _failure(error) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._left and not (task is not None and task.cancelling()):
                raise lost("the worker stood still") from None
            raise
        finally:
            self._waits_since = None
            self._call.cancel()


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

    def generate(
        self,
        request: pb.GenerateRequest,
        timeout_s: float | None,
        replaceable: Callable[[], bool],
    ) -> Stream:
        """Begin a call; see `Stream`."""
        return Stream(self._generation.Generate(request, timeout=timeout_s), replaceable)

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
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return lost("the worker was lost")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        message = "the time that the client gave was over before the answer was complete"
    return WorkerFailed(code, status_pb2.Status(code=code.value[0], message=message), lost=False)
