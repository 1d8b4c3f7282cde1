"""A request's way in: a worker is there, the request is valid, and there is room for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing

from gateway import router
from gateway.admission import Admission, num_prompt_tokens
from gateway.attempts import Attempts, Bounds, Notes
from gateway.continuity import Answer
from gateway.prompt_beginning import request_facts
from gateway.registry import Registry, Worker
from gateway.routing.facts import Policy, RequestFacts
from nightjar.errors import InvalidRequest, OtherArithmetic, Unavailable
from nightjar.v1 import generation_pb2 as pb
from nightjar.validation import validate


class Dispatcher:
    """Serves requests of both protocols from the registry's workers."""

    def __init__(
        self, registry: Registry, policy: Policy, admission: Admission, bounds: Bounds
    ) -> None:
        self._registry = registry
        self._policy = policy
        self._admission = admission
        self._bounds = bounds

    async def generate(
        self, request: pb.GenerateRequest, timeout_s: float | None, notes: Notes | None = None
    ) -> AsyncGenerator[pb.GenerateResponse]:
        """Stream the answer, from one worker or from several in turn; closing it cancels all calls.

        `request.model` is filled in where it was empty, `notes` as the answer goes on.

        Raises:
            InvalidRequest, NotServed: The request can never work; nothing was sent.
            Overloaded: The gateway has no room.
            Unavailable: No worker is ready, or none can go on with what was begun.
            OtherArithmetic: A continuation of an answer that no worker here could have begun.
            WorkerFailed: A worker's error.
        """
        loop = asyncio.get_running_loop()
        deadline = None if timeout_s is None else loop.time() + timeout_s
        facts = request_facts(request)
        worker = self._choose(facts, self._model(request))
        validate(request, None if worker is None else worker.limits)
        if worker is None:
            raise Unavailable("no worker is ready; try again in a moment")
        request.model = worker.status.model.name
        answer = Answer(request)

        def choose(fingerprint: str, excluded: set[str]) -> Worker | None:
            return self._choose(facts, request.model, fingerprint, excluded)

        if answer.fingerprint and choose(answer.fingerprint, set()) is None:
            raise OtherArithmetic(
                "continuation.arithmetic_fingerprint",
                "no worker that is ready computes with the arithmetic that began the answer",
            )
        notes = Notes() if notes is None else notes
        attempts = Attempts(
            answer,
            choose=choose,
            registry=self._registry,
            bounds=self._bounds,
            deadline=deadline,
            notes=notes,
        )
        with self._admission.enter(answer.num_choices, num_prompt_tokens(request)) as ticket:
            async with aclosing(attempts.run()) as responses:
                async for response in responses:
                    ticket.begun()
                    yield response

    def _model(self, request: pb.GenerateRequest) -> str:
        """The model to use; empty, for any worker and the validator, if there is no choice.

        Raises:
            InvalidRequest: The model must be named, or is none of several.
        """
        models = sorted(self._registry.models)
        if len(models) > 1 and request.model not in models:
            given = f"unknown model {request.model[:128]!r}" if request.model else "is required"
            raise InvalidRequest("model", f"{given}; this server has {', '.join(models)}")
        return request.model if request.model in models else ""

    def _choose(
        self,
        facts: RequestFacts,
        model: str,
        fingerprint: str = "",
        excluded: Collection[str] = (),
    ) -> Worker | None:
        chosen = router.choose(
            self._policy,
            facts,
            self._registry.loads(),
            model=model,
            fingerprint=fingerprint,
            excluded=excluded,
        )
        return None if chosen is None else self._registry.workers[chosen.address]
