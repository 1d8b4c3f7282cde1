"""Every error of the HTTP routes in OpenAI's shape, with the sentence that gRPC clients get."""

from __future__ import annotations

import math
import re
from typing import Any

from google.rpc import code_pb2, error_details_pb2, status_pb2

from gateway.worker_client import WorkerFailed
from nightjar import log, rpc
from nightjar.errors import EngineFailure, NightjarError

Headers = dict[str, str]

_INVALID, _SERVER = "invalid_request_error", "server_error"
# gRPC code -> HTTP status and OpenAI's type of error; all others are 500.
_HTTP: dict[int, tuple[int, str]] = {
    code_pb2.INVALID_ARGUMENT: (400, _INVALID),
    code_pb2.OUT_OF_RANGE: (400, _INVALID),
    code_pb2.FAILED_PRECONDITION: (400, _INVALID),
    code_pb2.UNAUTHENTICATED: (401, "authentication_error"),
    code_pb2.PERMISSION_DENIED: (403, "permission_error"),
    code_pb2.NOT_FOUND: (404, _INVALID),
    code_pb2.RESOURCE_EXHAUSTED: (429, "rate_limit_error"),
    code_pb2.UNIMPLEMENTED: (501, _INVALID),
    code_pb2.UNAVAILABLE: (503, _SERVER),
    code_pb2.DEADLINE_EXCEEDED: (504, _SERVER),
}
_UNAVAILABLE_RETRY_S = 1
# Fields of GenerateRequest -> parameters of the HTTP routes.
_PARAMETERS = [
    (re.compile(r"^(text|tokens\.token_ids)\b"), "prompt"),
    (re.compile(r"^chat\."), ""),
    (re.compile(r"^sampling\."), ""),
    (re.compile(r"^speculation\."), "nightjar."),
]


class HttpError(Exception):
    """An error that only HTTP has, with its status."""

    def __init__(
        self, http_status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.http_status, self.param, self.code = http_status, param, code


def parameter_of(field: str) -> str:
    """Name of a GenerateRequest field as HTTP clients know it."""
    for pattern, replacement in _PARAMETERS:
        field = pattern.sub(replacement, field)
    return field


def render(error: Exception) -> tuple[int, dict[str, Any], Headers]:
    """HTTP status, JSON body and extra headers of an error."""
    if isinstance(error, HttpError):
        return error.http_status, _body(str(error), _INVALID, error.param, error.code), {}
    status = _status(error)
    http_status, kind = _HTTP.get(status.code, (500, _SERVER))
    param, retry_s = None, None
    for detail in status.details:
        request, retry = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if detail.Unpack(request) and request.field_violations:
            param = parameter_of(request.field_violations[0].field)
        elif detail.Unpack(retry):
            retry_s = max(1, math.ceil(retry.retry_delay.ToTimedelta().total_seconds()))
    headers: Headers = {}
    if http_status == 503:
        retry_s = retry_s or _UNAVAILABLE_RETRY_S
    if retry_s is not None:
        headers["retry-after"] = str(retry_s)
    if http_status == 501:
        headers["x-should-retry"] = "false"  # OpenAI's clients repeat every other 5xx
    code = code_pb2.Code.Name(status.code).lower()
    return http_status, _body(status.message, kind, param, code), headers


def _status(error: Exception) -> status_pb2.Status:
    if isinstance(error, WorkerFailed):
        return error.status
    if isinstance(error, NightjarError):
        return rpc.status_of(error)
    log.get().error("unexpected error in a request", exc_info=error)
    return rpc.status_of(EngineFailure("internal error; see the gateway's log"))


def _body(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
