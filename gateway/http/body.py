"""The bodies of requests: bounded each and all together, in time, JSON, objects."""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic_core import from_json
from starlette.requests import Request

from gateway.http.errors import HttpError
from nightjar.errors import NightjarError, Overloaded

TIMEOUT_S = 60.0
# So much of a body is always read, so that large ones cannot keep out small ones.
SMALL_BYTES = 64 * 1024
# Bodies of the largest size that may arrive at once; more of them, if they are smaller.
_MAX_LARGE = 16
_RETRY_S = 1.0
# A body over a limit is still read and thrown away up to here: a client that is cut off
# while it writes sees a broken connection, not the sentence.
_DISCARD_FACTOR = 16


class Bodies:
    """Reads bodies; clients that send slowly, or never end, hold a bounded part of memory.

    Args:
        max_bytes: Most bytes of one body.
        timeout_s: Seconds that a body has to arrive.
    """

    def __init__(self, max_bytes: int, timeout_s: float = TIMEOUT_S) -> None:
        self._max_bytes, self._timeout_s = max_bytes, timeout_s
        self._room = _MAX_LARGE * max_bytes  # for what is beyond the first `SMALL_BYTES` of each

    async def read_object(self, request: Request) -> dict[str, Any]:
        """Read the JSON object in a request's body.

        Raises:
            HttpError: 413 over the limit, 408 if it takes too long, 415 for another content type,
                400 for anything that is not a JSON object (lone surrogates and nesting beyond
                200 levels included).
            Overloaded: Too many large bodies are arriving.
            starlette.requests.ClientDisconnect: The client left while it sent.
        """
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != "application/json":
            raise HttpError(415, "content-type: must be application/json", "content-type")
        if request.headers.get("content-encoding", "identity").lower() != "identity":
            message = "content-encoding: bodies are read as they are"
            raise HttpError(415, message, "content-encoding")
        content = await self._read(request)
        try:
            # NaN and Infinity pass, so that the validator refuses them as it does for gRPC.
            value = from_json(content, allow_inf_nan=True)
        except ValueError as error:
            raise HttpError(400, f"body: not valid JSON: {error}", "body") from None
        if not isinstance(value, dict):
            raise HttpError(400, "body: must be a JSON object", "body")
        return value

    async def _read(self, request: Request) -> bytearray:
        too_large = HttpError(413, f"body: must have at most {self._max_bytes} bytes", "body")
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > self._max_bytes * _DISCARD_FACTOR:
            raise too_large
        content = bytearray()
        size = taken = 0
        refusal: HttpError | NightjarError | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                async for chunk in request.stream():
                    size += len(chunk)
                    more = max(0, size - SMALL_BYTES) - taken
                    if size > self._max_bytes:
                        refusal = too_large
                    elif refusal is None and more > self._room:
                        refusal = Overloaded("body: too many large ones are arriving", _RETRY_S)
                    if refusal is None:
                        self._room -= more
                        taken += more
                        content += chunk
                    elif size > self._max_bytes * _DISCARD_FACTOR:
                        break
                    else:
                        self._room += taken
                        taken = 0
                        content.clear()
        except TimeoutError:
            message = f"body: must arrive within {self._timeout_s:g} s"
            raise HttpError(408, message, "body", headers={"connection": "close"}) from None
        finally:
            self._room += taken
        if refusal is not None:
            raise refusal
        return content
