"""Stands before every HTTP route: what the table of rules refuses, no route ever sees."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.responses import JSONResponse
from starlette.routing import compile_path
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.access import HTTP_RULES, NO_KEY, Access, Rule
from gateway.http.errors import HttpError, render


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
            error = HttpError(405, f"{scope['method']} is not served here")
            headers["allow"] = ", ".join(sorted({*known, *({"HEAD"} if "GET" in known else ())}))
        else:
            error = HttpError(404, "no such route")
        status, body, _ = render(error)
        await JSONResponse(body, status_code=status, headers=headers)(scope, receive, send)
