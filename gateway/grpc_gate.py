"""Stands before every gRPC method: what the table of rules refuses, no handler ever sees."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import grpc

from gateway.access import GRPC_RULES, Access, Rule


class GrpcGate(grpc.aio.ServerInterceptor):
    """UNAUTHENTICATED without a right key; UNIMPLEMENTED for what the table does not serve."""

    def __init__(self, access: Access, rules: Mapping[str, Rule] = GRPC_RULES) -> None:
        self._access, self._rules = access, rules

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Refuse or hand on one call, before its messages are read."""
        rule = self._rules.get(handler_call_details.method)
        metadata: Any = handler_call_details.invocation_metadata or ()
        authorization = [
            value.encode() if isinstance(value, str) else value
            for name, value in metadata
            if name == "authorization"
        ]
        if refusal := self._access.refusal(rule, authorization):
            return _refuse(refusal)
        return await continuation(handler_call_details) if rule in ("public", "key") else None


def _refuse(sentence: str) -> grpc.RpcMethodHandler[Any, Any]:
    """A handler that waits for no message, whatever kind the method is."""

    async def refuse(_: AsyncIterator[bytes], context: Any) -> None:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, sentence)

    return grpc.stream_stream_rpc_method_handler(refuse)
