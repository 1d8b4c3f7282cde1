"""Stands before every HTTP route: what the table of rules refuses, no route ever sees.

Every answer bears its request's id, the client's own or one made here.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping

from starlette.responses import JSONResponse
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.access import HTTP_RULES, NO_KEY, Access, Rule
from gateway.http.errors import HttpError, render
from nightjar.validation import MAX_REQUEST_ID_CHARACTERS

_HEADER = b"x-request-id"


class Gate:
    """An ASGI application that hands on to `app` what may pass.

    Without a right key, 401; by neither route nor method in the table, 404 or 405.
    """

    def __init__(
        self,
        app: ASGIApp,
        access: Access,
        rules: Mapping[tuple[str, str], Rule] = HTTP_RULES,
    ) -> None:
        self._app, self._access = app, access
        self._rules = [
            (compile_path(path)[0], method, rule) for (method, path), rule in rules.items()
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer or hand on one request; there are no other kinds, the server is told."""
        name = _name(scope)

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), (_HEADER, name)]
                message = {**message, "headers": headers}
            await send(message)

        await self._pass(scope, receive, send_named)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        known = {m: rule for path, m, rule in self._rules if path.match(scope["path"])}
        rule = known.get(method)
        authorization = [value for name, value in scope["headers"] if name == b"authorization"]
        refusal = self._access.refusal(rule, authorization)
        headers: dict[str, str] = {}
        if refusal:
            error = HttpError(401, refusal, code="invalid_api_key")
            attribute = "" if refusal == NO_KEY else ', error="invalid_token"'
            headers["www-authenticate"] = f'Bearer realm="nightjar"{attribute}'
        elif rule in ("public", "key"):
            await self._app(scope, receive, send)
            return
        elif known:
            error = HttpError(
                405, f"{scope['method']} is not served here", code="method_not_allowed"
            )
            headers["allow"] = ", ".join(sorted({*known, *({"HEAD"} if "GET" in known else ())}))
        else:
            error = HttpError(404, "no such route", code="unknown_url")
        status, body, _ = render(error)
        await JSONResponse(body, status_code=status, headers=headers)(scope, receive, send)


def request_id_of(scope: Scope) -> str:
    """The id that the client gave its request, else the one that the gate did."""
    return str(scope["nightjar.request_id"])


def _name(scope: Scope) -> bytes:
    """Name a request; returns the name for its answer.

    That is another one where the client's is too long, and refused, or holds what no header should.
    """
    given: bytes = next((value for name, value in scope["headers"] if name == _HEADER), b"")
    own = f"req_{uuid.uuid4().hex}"
    scope["nightjar.request_id"] = given.decode("latin-1") or own
    fits = 0 < len(given) <= MAX_REQUEST_ID_CHARACTERS
    return given if fits and given.isascii() and given.decode().isprintable() else own.encode()
