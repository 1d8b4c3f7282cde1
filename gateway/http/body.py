"""The body of a request: bounded, JSON, an object."""

from __future__ import annotations

from typing import Any

from pydantic_core import from_json
from starlette.requests import Request

from gateway.http.errors import HttpError

# A body over the limit is still read and thrown away up to here: a client that is cut off
# while it writes sees a broken connection, not the sentence.
_DISCARD_FACTOR = 16


async def read_object(request: Request, max_bytes: int) -> dict[str, Any]:
    """Read the JSON object in a request's body.

    Raises:
        HttpError: 413 over the limit, 415 for another content type, 400 for anything that is
            not a JSON object (lone surrogates and nesting beyond 200 levels included).
        starlette.requests.ClientDisconnect: The client left while it sent.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise HttpError(415, "content-type: must be application/json", "content-type")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise HttpError(415, "content-encoding: bodies are read as they are", "content-encoding")
    content = await _read(request, max_bytes)
    try:
        # NaN and Infinity pass, so that the validator refuses them as it does for gRPC.
        value = from_json(content, allow_inf_nan=True)
    except ValueError as error:
        raise HttpError(400, f"body: not valid JSON: {error}", "body") from None
    if not isinstance(value, dict):
        raise HttpError(400, "body: must be a JSON object", "body")
    return value


async def _read(request: Request, max_bytes: int) -> bytes:
    too_large = HttpError(413, f"body: must have at most {max_bytes} bytes", "body")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > max_bytes * _DISCARD_FACTOR:
        raise too_large
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= max_bytes:
            chunks.append(chunk)
        elif size > max_bytes * _DISCARD_FACTOR:
            break
        else:
            chunks.clear()
    if size > max_bytes:
        raise too_large
    return b"".join(chunks)
