"""A POST route: body to requests, requests to an answer, until it ends or its client leaves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from gateway.dispatch import Dispatcher
from gateway.http.answer import Answer
from gateway.http.body import Bodies
from gateway.http.errors import HttpError, render
from gateway.http.events import Events, error_event
from gateway.http.gate import request_id_of
from gateway.http.nothing import Route
from gateway.http.openapi import MAX_TIMEOUT_S
from gateway.http.translate import Parsed, parse
from gateway.http.whole import WholeAnswer
from gateway.merging import merged
from nightjar import log
from nightjar.v1 import generation_pb2 as pb

_TIMEOUT = "x-request-timeout"
_EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_START_OF_STREAM = {"type": "http.response.start", "status": 200, "headers": _EVENT_STREAM}
_MAX_LOGGED_CHARACTERS = 128


class AnswerEndpoint:
    """ASGI endpoint of a route that answers prompts."""

    def __init__(self, route: Route, dispatcher: Dispatcher, bodies: Bodies) -> None:
        self._route: Route = route
        self._dispatcher = dispatcher
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; its worker calls end with it, whoever ends it."""
        request = Request(scope, receive)
        try:
            timeout_s = _timeout_s(request.headers)
            body = await self._bodies.read_object(request)
            parsed = parse(self._route, body, request_id_of(scope))
        except ClientDisconnect:
            return
        except Exception as error:
            status, content, headers = render(error)
            response = JSONResponse(content, status_code=status, headers=headers)
            await response(scope, receive, send)
            return
        exchange = _Exchange(parsed, self._dispatcher, timeout_s)
        await _while_connected(receive, exchange.run(scope, receive, send))
        exchange.log()


class _Exchange:
    """One parsed request and its answer."""

    def __init__(self, parsed: Parsed, dispatcher: Dispatcher, timeout_s: float | None) -> None:
        self._parsed = parsed
        self._dispatcher = dispatcher
        self._timeout_s = timeout_s
        self._answer = Answer(parsed)
        self._started_at = time.monotonic()
        self._outcome = "client left"
        self._streaming = False

    async def run(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; an error before the first token has its own status, a later one is an event."""
        try:
            async with aclosing(self._responses()) as responses:
                if self._parsed.stream:
                    events = Events(self._parsed, self._answer)
                    async for response in responses:
                        if piece := events.of(response):
                            await self._stream(send, piece)
                    await self._stream(send, events.end())
                else:
                    whole = WholeAnswer(self._parsed, self._answer)
                    async for response in responses:
                        whole.take(response)
                    await JSONResponse(whole.json())(scope, receive, send)
            self._outcome = self._answer.outcome
        except Exception as error:
            status, body, headers = render(error, self._parsed.renamed)
            self._outcome = f"error {status}: {body['error']['message']}"
            if not self._streaming:
                refusal = JSONResponse(body, status_code=status, headers=headers)
                await refusal(scope, receive, send)
                return
            await self._stream(send, error_event(body))
        if self._streaming:
            await send({"type": "http.response.body", "body": b""})

    def log(self) -> None:
        """One line an answer; names given by the client are escaped and cut."""
        request = self._parsed.requests[0]
        log.get().info(
            "answered",
            id=self._answer.id,
            request_id=ascii(request.request_id[:_MAX_LOGGED_CHARACTERS]),
            user=ascii(self._parsed.user[:_MAX_LOGGED_CHARACTERS]),
            outcome=ascii(self._outcome),
            num_tokens=self._answer.num_completion_tokens,
            elapsed_ms=round(1000 * (time.monotonic() - self._started_at)),
        )

    def _responses(self) -> AsyncGenerator[pb.GenerateResponse]:
        requests, timeout_s = self._parsed.requests, self._timeout_s
        if len(requests) == 1:
            return self._dispatcher.generate(requests[0], timeout_s, self._answer.notes[0])
        return merged([self._of_prompt(p) for p in range(len(requests))])

    async def _of_prompt(self, p: int) -> AsyncGenerator[pb.GenerateResponse]:
        """The answers to one of several prompts, numbered after those to the prompts before it."""
        request, notes = self._parsed.requests[p], self._answer.notes[p]
        responses = self._dispatcher.generate(request, self._timeout_s, notes)
        async with aclosing(responses):
            async for response in responses:
                response.index += p * self._parsed.num_choices
                yield response

    async def _stream(self, send: Send, content: bytes) -> None:
        """Send a piece; the first one is the answer's status too."""
        if not self._streaming:
            self._streaming = True
            await send(_START_OF_STREAM)
        await send({"type": "http.response.body", "body": content, "more_body": True})


def _timeout_s(headers: Headers) -> float | None:
    """The seconds that the client gives its answer, from now on; None where it does not say.

    Raises:
        HttpError: 400, they are no number of seconds.
    """
    given = headers.get(_TIMEOUT)
    if given is None:
        return None
    try:
        seconds = 0.0 if "_" in given else float(given)  # Python alone takes 1_0 for a number
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_TIMEOUT_S:
        sentence = f"{_TIMEOUT}: must be seconds, above 0 and at most {MAX_TIMEOUT_S:g}"
        raise HttpError(400, sentence, _TIMEOUT, "invalid_value")
    return seconds


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
