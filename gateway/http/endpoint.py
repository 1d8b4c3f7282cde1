"""A POST route: body to request, request to answer, streamed or whole, until the client leaves."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from gateway.dispatch import Dispatcher
from gateway.http.body import read_object
from gateway.http.errors import render
from gateway.http.render import Answer
from gateway.http.schema import Parsed, Route, parse
from nightjar import log
from nightjar.v1 import generation_pb2 as pb

_EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_MAX_LOGGED_CHARACTERS = 128


class AnswerEndpoint:
    """ASGI endpoint of a route that answers prompts."""

    def __init__(self, route: Route, dispatcher: Dispatcher, max_body_bytes: int) -> None:
        self._route: Route = route
        self._dispatcher = dispatcher
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; its worker call ends with it, whoever ends it."""
        request = Request(scope, receive)
        try:
            body = await read_object(request, self._max_body_bytes)
            parsed = parse(self._route, body, request.headers.get("x-request-id", ""))
        except ClientDisconnect:
            return
        except Exception as error:
            await _send_error(error, scope, receive, send)
            return
        exchange = _Exchange(parsed, self._dispatcher)
        await _while_connected(receive, exchange.run(scope, receive, send))
        exchange.log()


class _Exchange:
    """One parsed request and its answer."""

    def __init__(self, parsed: Parsed, dispatcher: Dispatcher) -> None:
        self._parsed = parsed
        self._dispatcher = dispatcher
        self._answer = Answer(route=parsed.route)
        self._started_at = time.monotonic()
        self._outcome = "client left"

    async def run(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; an error before the first token has its own status, a later one is an event."""
        responses = self._dispatcher.generate(self._parsed.request, None)
        streaming = False
        try:
            async with aclosing(responses):
                first = await anext(responses, None)
                self._answer.model = self._parsed.request.model
                if self._parsed.stream:
                    await send(self._start_of_stream())
                    streaming = True
                    async with aclosing(self._chunks(first, responses)) as chunks:
                        async for chunk in chunks:
                            await send(_event(chunk))
                    await send(_data(b"[DONE]"))
                else:
                    text = [self._answer.take(first)] if first else []
                    text += [self._answer.take(response) async for response in responses]
                    whole = JSONResponse(self._answer.whole("".join(text)))
                    await whole(scope, receive, send)
            self._outcome = self._answer.finish_reason
        except Exception as error:
            status, body, _ = render(error)
            self._outcome = f"error {status}: {body['error']['message']}"
            if not streaming:
                await _send_error(error, scope, receive, send)
                return
            await send(_event(body))
        if streaming:
            await send({"type": "http.response.body", "body": b""})

    def log(self) -> None:
        """One line an answer; names given by the client are escaped and cut."""
        log.get().info(
            "answered",
            id=self._answer.id,
            request_id=ascii(self._parsed.request.request_id[:_MAX_LOGGED_CHARACTERS]),
            user=ascii(self._parsed.user[:_MAX_LOGGED_CHARACTERS]),
            outcome=ascii(self._outcome),
            num_tokens=self._answer.num_completion_tokens,
            elapsed_ms=round(1000 * (time.monotonic() - self._started_at)),
        )

    async def _chunks(
        self, first: pb.GenerateResponse | None, responses: AsyncIterator[pb.GenerateResponse]
    ) -> AsyncGenerator[dict[str, Any]]:
        """The JSON of all chunks; the last waits for the usage, which closes an answer."""
        parsed, answer = self._parsed, self._answer
        text = answer.take(first) if first else ""
        if parsed.route == "chat":
            yield self._with_usage(answer.chunk("", first=True))
        if text:
            yield self._with_usage(answer.chunk(text))
        async for response in responses:
            if text := answer.take(response):
                yield self._with_usage(answer.chunk(text))
        yield self._with_usage(answer.chunk("", last=True))
        if parsed.include_usage:
            yield answer.usage_chunk()

    def _with_usage(self, chunk: dict[str, Any]) -> dict[str, Any]:
        if self._parsed.continuous_usage:
            chunk["usage"] = self._answer.usage_so_far()
        elif self._parsed.include_usage:
            chunk["usage"] = None
        return chunk

    def _start_of_stream(self) -> dict[str, Any]:
        return {"type": "http.response.start", "status": 200, "headers": list(_EVENT_STREAM)}


def _event(content: dict[str, Any]) -> dict[str, Any]:
    return _data(json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode())


def _data(content: bytes) -> dict[str, Any]:
    body = b"data: " + content + b"\n\n"
    return {"type": "http.response.body", "body": body, "more_body": True}


async def _send_error(error: Exception, scope: Scope, receive: Receive, send: Send) -> None:
    status, body, headers = render(error)
    await JSONResponse(body, status_code=status, headers=headers)(scope, receive, send)


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`, and cancel it the moment the client leaves."""
    tasks = [asyncio.create_task(work), asyncio.create_task(_until_disconnected(receive))]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
