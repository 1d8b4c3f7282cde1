"""Every error of the HTTP routes in OpenAI's shape, with the sentence that gRPC clients get."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from google.rpc import code_pb2, error_details_pb2, status_pb2

from gateway.worker_client import WorkerFailed
from nightjar import log, rpc
from nightjar.errors import EngineFailure, NightjarError

Headers = dict[str, str]

_INVALID, _SERVER = "invalid_request_error", "server_error"
# gRPC code -> HTTP status, OpenAI's type of error and its code; all others are 500.
_HTTP: dict[int, tuple[int, str, str]] = {
    code_pb2.INVALID_ARGUMENT: (400, _INVALID, "invalid_value"),
    code_pb2.OUT_OF_RANGE: (400, _INVALID, "invalid_value"),
    code_pb2.UNIMPLEMENTED: (400, _INVALID, "unsupported_parameter"),
    code_pb2.UNAUTHENTICATED: (401, _INVALID, "invalid_api_key"),
    code_pb2.NOT_FOUND: (404, _INVALID, "not_found"),
    code_pb2.RESOURCE_EXHAUSTED: (429, "rate_limit_error", "rate_limit_exceeded"),
    # Of a request that is fine, at a bad moment: for instance an answer that no worker resumes.
    code_pb2.FAILED_PRECONDITION: (503, _SERVER, "failed_precondition"),
    code_pb2.UNAVAILABLE: (503, _SERVER, "unavailable"),
    # The deadline is the client's own.
    code_pb2.DEADLINE_EXCEEDED: (408, _INVALID, "deadline_exceeded"),
}
_RETRY_S = 1  # where the error names no time
_UNKNOWN_MODEL = "unknown model"
# Fields of GenerateRequest -> parameters of the HTTP routes.
_PARAMETERS = [
    (re.compile(r"^(text|tokens\.token_ids)\b"), "prompt"),
    (re.compile(r"^chat\."), ""),
    (re.compile(r"^sampling\."), ""),
    (re.compile(r"^speculation\."), "nightjar."),
    (
        re.compile(r"^((messages\[\d+\]\.tool_call|tool)s\[\d+\])\.(name|description|\w+_json)$"),
        r"\1.function.\3",
    ),
    (re.compile(r"_json$"), ""),
]


class HttpError(Exception):
    """An error that only HTTP has, with its status."""

    def __init__(
        self,
        http_status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Headers | None = None,
    ) -> None:
        super().__init__(message)
        self.http_status, self.param, self.code = http_status, param, code
        self.headers: Headers = headers or {}


def unknown_model(name: str) -> HttpError:
    """The error of a model that no ready worker serves."""
    message = f"model: {_UNKNOWN_MODEL} {name[:128]!r}"
    return HttpError(404, message, "model", "model_not_found")


def parameter_of(field: str) -> str:
    """Name of a GenerateRequest field as HTTP clients know it."""
    for pattern, replacement in _PARAMETERS:
        field = pattern.sub(replacement, field)
    return field


def render(
    error: Exception, renamed: Mapping[str, str] | None = None
) -> tuple[int, dict[str, Any], Headers]:
    """HTTP status, JSON body and extra headers of an error.

    Args:
        error: What went wrong.
        renamed: Parameters that this request called by another name.
    """
    if isinstance(error, HttpError):
        body = _body(str(error), _INVALID, error.param, error.code)
        return error.http_status, body, error.headers
    status = _status(error)
    http_status, kind, code = _HTTP.get(status.code, (500, _SERVER, ""))
    param, retry_s = None, None
    for detail in status.details:
        request, retry = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if detail.Unpack(request) and request.field_violations:
            violation = request.field_violations[0]
            param = parameter_of(violation.field)
            param = (renamed or {}).get(param, param)
            if param == "model" and violation.description.startswith(_UNKNOWN_MODEL):
                http_status, code = 404, "model_not_found"
        elif detail.Unpack(retry):
            retry_s = max(1, math.ceil(retry.retry_delay.ToTimedelta().total_seconds()))
    headers: Headers = {}
    if http_status in (429, 503):
        headers["retry-after"] = str(retry_s or _RETRY_S)
    code = code or code_pb2.Code.Name(status.code).lower()
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
