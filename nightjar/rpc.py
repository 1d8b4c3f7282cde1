"""Serving and dialling gRPC, the same for all: health, reflection, errors, keepalive, drain."""

from __future__ import annotations

import asyncio
import inspect
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from nightjar import log
from nightjar.errors import ConfigError, FieldError, InvalidRequest, NightjarError, Overloaded

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
# Both ends agree on keepalive: a client pings a silent stream every 30 s, a
# server tolerates a ping every 10 s; otherwise long prefills end in GOAWAY.
CHANNEL_OPTIONS = [
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # A stream that nobody reads holds 64 KB here; probing would let that grow to megabytes.
    ("grpc.http2.bdp_probe", 0),
]
SERVER_OPTIONS = [
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
]


def dial(address: str, credentials: grpc.ChannelCredentials | None = None) -> grpc.aio.Channel:
    """Open a channel to `host:port` or `unix:path`; it connects on first use."""
    if credentials is not None:
        return grpc.aio.secure_channel(address, credentials, options=CHANNEL_OPTIONS)
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


def status_of(error: NightjarError) -> status_pb2.Status:
    """The rich status of an error: code, sentence, and field or retry details."""
    code = code_pb2.Code.Value(error.code.name)
    status = status_pb2.Status(code=code, message=str(error))
    detail = any_pb2.Any()
    if isinstance(error, FieldError):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=error.message
        )
        detail.Pack(error_details_pb2.BadRequest(field_violations=[violation]))
        status.details.append(detail)
    elif isinstance(error, Overloaded):
        delay = duration_pb2.Duration(nanos=int(error.retry_after_s % 1 * 1e9))
        delay.seconds = int(error.retry_after_s)
        detail.Pack(error_details_pb2.RetryInfo(retry_delay=delay))
        status.details.append(detail)
    return status


async def abort_with(context: Any, status: status_pb2.Status) -> None:
    """End the call with a rich status; a hint to retry goes along as gRPC's own retries read it."""
    raised = rpc_status.to_status(status)
    metadata = list(raised.trailing_metadata or ())
    for detail in status.details:
        retry = error_details_pb2.RetryInfo()
        if detail.Unpack(retry):
            milliseconds = retry.retry_delay.ToMilliseconds()
            metadata.append(("grpc-retry-pushback-ms", str(milliseconds)))
    await context.abort(raised.code, raised.details, tuple(metadata))


async def abort(context: Any, error: Exception) -> None:
    """End the call with the status of `error`; anything but a `NightjarError` is INTERNAL."""
    if isinstance(error, NightjarError):
        await abort_with(context, status_of(error))
    log.get().error("unexpected error in a call", exc_info=error)
    await context.abort(grpc.StatusCode.INTERNAL, "internal error; see the service's log")


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns exceptions of handlers, unary and streaming alike, into statuses."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the handler of one method."""
        handler: Any = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith("/grpc."):
            return handler
        parse = handler.request_deserializer
        if not handler.request_streaming:
            parse = _or_none(parse)
        if handler.response_streaming:
            kind = "stream_stream" if handler.request_streaming else "unary_stream"
            behaviour = getattr(handler, kind)
            # A handler that writes by itself is awaited, like one with a single answer.
            writes = inspect.iscoroutinefunction(behaviour)
            wrapped: Any = _guard_unary(behaviour) if writes else _guard_stream(behaviour)
        else:
            kind = "stream_unary" if handler.request_streaming else "unary_unary"
            wrapped = _guard_unary(getattr(handler, kind))
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(wrapped, parse, handler.response_serializer)


def _or_none(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Bytes that are no message become None; gRPC itself would call that INTERNAL."""

    def parse_or_none(content: bytes) -> Any:
        try:
            return parse(content)
        except DecodeError:
            return None

    return parse_or_none


def _checked(request: Any) -> Any:
    if request is None:
        raise InvalidRequest("request", "not a valid message: malformed, or text that is not UTF-8")
    return request


async def _abort_unless_cancelled(context: Any) -> None:
    """End a call in which only something inner was cancelled; gRPC would send no status, ever."""
    task = asyncio.current_task()
    if task is not None and not task.cancelling():
        await context.abort(grpc.StatusCode.ABORTED, "the call was cancelled inside the service")


def _guard_unary(behaviour: Any) -> Any:
    async def guarded(request: Any, context: Any) -> Any:
        try:
            return await behaviour(_checked(request), context)
        except grpc.aio.AbortError:
            raise
        except asyncio.CancelledError:
            await _abort_unless_cancelled(context)
            raise
        except Exception as error:
            await abort(context, error)

    return guarded


def _guard_stream(behaviour: Any) -> Any:
    async def guarded(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            async for response in behaviour(_checked(request), context):
                yield response
        except (grpc.aio.AbortError, GeneratorExit):
            raise
        except asyncio.CancelledError:
            await _abort_unless_cancelled(context)
            raise
        except Exception as error:
            await abort(context, error)

    return guarded


def is_address(given: str) -> bool:
    """Whether it is HOST:PORT or unix:PATH.

    gRPC itself wraps ports, makes up missing ones, and takes a URL for the name of a host.
    """
    if given.startswith("unix:"):
        return True
    host, _, port = given.rpartition(":")
    is_port = port.isascii() and port.isdigit() and int(port) <= 65_535
    return bool(host) and is_port and not host.startswith(("http://", "https://"))


def check_address(given: str, flag: str = "", form: str = "HOST:PORT or unix:PATH") -> None:
    """Refuse what `is_address` does not take.

    Args:
        given: The address.
        flag: What it was given by; empty where it stands by itself.
        form: What would do, in words.

    Raises:
        ConfigError: It is none.
    """
    if not is_address(given):
        name = f"{flag}=" if flag else "address "
        raise ConfigError(f"{name}{given!r}: must be {form}")


class Server:
    """A gRPC server with health, reflection and the error interceptor.

    Health is NOT_SERVING until `set_ready(True)`; `address` is known after `start`. With
    `credentials` it speaks TLS alone; `gates` are interceptors that see a call before any other.
    """

    def __init__(
        self,
        listen: str,
        service_names: Sequence[str],
        credentials: grpc.ServerCredentials | None = None,
        gates: Sequence[grpc.aio.ServerInterceptor] = (),
        flag: str = "--listen",
    ) -> None:
        """Bind nothing yet.

        Raises:
            ConfigError: The address is none; `flag` is what it was given by.
        """
        check_address(listen, flag, "HOST:PORT with a port from 0 to 65535, or unix:PATH")
        self.grpc = grpc.aio.server(
            interceptors=[*gates, ErrorInterceptor()], options=SERVER_OPTIONS
        )
        self._credentials = credentials
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        self._names = list(service_names)
        names = [*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, self.grpc)
        self._listen, self._flag = listen, flag
        self.address = listen

    async def start(self) -> None:
        """Bind and serve.

        Raises:
            ConfigError: The address cannot be bound.
        """
        try:
            if self._credentials is not None:
                port = self.grpc.add_secure_port(self._listen, self._credentials)
            else:
                port = self.grpc.add_insecure_port(self._listen)
        except RuntimeError as error:
            raise ConfigError(
                f"{self._flag}={self._listen!r}: cannot bind; is it taken?"
            ) from error
        if not self._listen.startswith("unix:"):
            self.address = f"{self._listen.rpartition(':')[0]}:{port}"
        await self.grpc.start()
        await self.set_ready(False)

    async def set_ready(self, ready: bool) -> None:
        """Set the health of every service and of the server as a whole."""
        serving = health_pb2.HealthCheckResponse
        status = serving.SERVING if ready else serving.NOT_SERVING
        for name in ["", *self._names]:
            await self._health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, give admitted ones `grace_s` seconds, then cancel the rest."""
        await self.set_ready(False)
        await self.grpc.stop(grace_s)


async def until_signalled() -> None:
    """Return at the first SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await stop.wait()
