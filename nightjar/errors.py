"""The error tree, each leaf with its gRPC code; mapped once, in `rpc.ErrorInterceptor`.

NightjarError
├── ConfigError             bad flag, variable or file: the process stops, naming key and value
├── InvalidRequest          INVALID_ARGUMENT, with the field
├── NotServed               UNIMPLEMENTED, with the field
├── ModelRefused            FAILED_PRECONDITION: this model would be answered wrongly, or not at all
├── NotPossibleNow          FAILED_PRECONDITION: the request is fine, the state is not
├── OtherArithmetic         FAILED_PRECONDITION, with the field: resuming could not be exact
├── UnknownName             NOT_FOUND
├── Overloaded              RESOURCE_EXHAUSTED, with a retry hint
├── Unavailable             UNAVAILABLE: starting, draining, or a peer is gone
└── EngineFailure           INTERNAL: our fault
"""

from __future__ import annotations

from typing import ClassVar

import grpc


class NightjarError(Exception):
    """Root of the tree; `str(error)` is a sentence for a person."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNKNOWN


class ConfigError(NightjarError):
    """A flag, a variable or a file is wrong; the process exits with status 2."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class FieldError(NightjarError):
    """An error about one field of a request."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class InvalidRequest(FieldError):
    """The client sent something that can never work."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class NotServed(FieldError):
    """The field is designed but this build does not serve it; it is never ignored."""

    code = grpc.StatusCode.UNIMPLEMENTED


class ModelRefused(NightjarError):
    """The model cannot be served right; the sentence names what is wrong."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class NotPossibleNow(NightjarError):
    """The state forbids the request now."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class OtherArithmetic(FieldError):
    """An answer was begun by arithmetic that may give other bits; only its own can resume it."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class UnknownName(NightjarError):
    """Nothing has that name."""

    code = grpc.StatusCode.NOT_FOUND


class Overloaded(NightjarError):
    """The queue is full; try again after `retry_after_s` seconds."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(NightjarError):
    """Starting, draining, or a peer is gone."""

    code = grpc.StatusCode.UNAVAILABLE


class EngineFailure(NightjarError):
    """A fault of ours ended the request."""

    code = grpc.StatusCode.INTERNAL
