"""A request's way to a worker: choose, validate, stream; elsewhere while nothing was sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from gateway import router
from gateway.prompt_beginning import request_facts
from gateway.registry import Registry, Worker
from gateway.routing.facts import Policy, RequestFacts
from gateway.worker_client import WorkerFailed
from nightjar import log
from nightjar.errors import InvalidRequest, Unavailable
from nightjar.v1 import generation_pb2 as pb
from nightjar.validation import validate

MAX_ATTEMPTS = 3


class Dispatcher:
    """Serves requests of both protocols from the registry's workers."""

    def __init__(self, registry: Registry, policy: Policy) -> None:
        self._registry = registry
        self._policy = policy

    async def generate(
        self, request: pb.GenerateRequest, timeout_s: float | None
    ) -> AsyncGenerator[pb.GenerateResponse]:
        """Stream the answer of the worker that routing chooses; closing it cancels the call.

        A worker that is lost, draining or full before it sent a token is replaced by
        another, at most twice. `request.model` is filled in where it was empty.

        Raises:
            InvalidRequest, NotServed: The request can never work; nothing was sent.
            Unavailable: No worker is ready.
            WorkerFailed: A worker's error, or its loss after the first token.
        """
        loop = asyncio.get_running_loop()
        deadline = None if timeout_s is None else loop.time() + timeout_s
        failure: WorkerFailed | None = None
        facts = request_facts(request)
        tried: set[str] = set()
        for _ in range(MAX_ATTEMPTS):
            worker = self._choose(request, facts, tried)
            if worker is None:
                break
            validate(request, worker.limits)
            request.model = worker.status.model.name
            tried.add(worker.address)
            remaining = None if deadline is None else deadline - loop.time()
            held: pb.GenerateResponse | None = None
            committed = False
            worker.request_sent()
            try:
                async with aclosing(worker.client.generate(request, remaining)) as responses:
                    async for response in responses:
                        # Facts of admission commit nothing: they wait for the first token.
                        if not committed and held is None and _only_starts(response):
                            held = response
                            continue
                        committed = True
                        if held is not None:
                            yield held
                            held = None
                        yield response
                if held is not None:
                    yield held
                return
            except WorkerFailed as error:
                failure = error
                if error.lost:
                    await self._registry.suspect(worker)
                if committed or not error.elsewhere:
                    raise
                log.get().warning("trying another worker", lost=worker.address, error=str(error))
            finally:
                worker.request_ended()
        if failure is not None:
            raise failure
        validate(request)
        raise Unavailable("no worker is ready; try again in a moment")

    def _choose(
        self, request: pb.GenerateRequest, facts: RequestFacts, tried: set[str]
    ) -> Worker | None:
        """The worker to use; any ready one if none has the model, for the validator to refuse.

        Raises:
            InvalidRequest: The model must be named, or is none of several.
        """
        models = sorted(self._registry.models)
        if len(models) > 1 and request.model not in models:
            given = f"unknown model {request.model[:128]!r}" if request.model else "is required"
            raise InvalidRequest("model", f"{given}; this server has {', '.join(models)}")
        model = request.model if request.model in models else ""
        loads = self._registry.loads()
        chosen = router.choose(self._policy, facts, loads, model=model, excluded=tried)
        return None if chosen is None else self._registry.workers[chosen.address]


def _only_starts(response: pb.GenerateResponse) -> bool:
    return response.HasField("start") and not (
        response.token_ids or response.text or response.finish_reason or response.HasField("usage")
    )
