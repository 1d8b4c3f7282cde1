"""The worker's servicers: proto in, proto out; everything else is the front's."""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from nightjar import validation
from nightjar.errors import EngineFailure, Unavailable
from nightjar.v1 import (
    generation_pb2,
    generation_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from worker.front.admission import Ticket
from worker.front.state import WorkerState
from worker.front.streams import TokenStream
from worker.memory_client import RESIDENCIES
from worker.messages import Finished, RowUsage, SamplingParams, Status
from worker.text.detokenizer import Detokenizer

FINISH_REASONS = {
    "stop": generation_pb2.FINISH_REASON_STOP,
    "length": generation_pb2.FINISH_REASON_LENGTH,
}


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """`GenerationService`: validate, tokenize, queue, and stream what the engine decides."""

    def __init__(self, state: WorkerState) -> None:
        self._state = state

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        """Answer one request; see the proto for what the messages carry."""
        state = self._state
        limits, tokenizer = state.limits()
        validation.validate(request, limits)
        ticket = state.admission.enter()
        # The call may die while this generator is suspended outside of `read`; the callbacks
        # then free its place and its blocks at once.
        context.add_done_callback(lambda _: ticket.leave())
        try:
            prompt = await self._tokenize(request, limits)
            max_tokens = validation.check_length(len(prompt), request.sampling, limits)
            sampling = sampling_params(request, max_tokens)
            with state.engine.submit(prompt, sampling) as stream:
                context.add_done_callback(lambda _: stream.close())
                detokenizer = Detokenizer(tokenizer, sampling.stop)
                start: generation_pb2.GenerationStart | None = self._start(
                    len(prompt), sampling.seed
                )
                async for piece in _pieces(stream, detokenizer, ticket):
                    if start is not None:
                        piece.start.CopyFrom(start)
                        start = None
                    yield piece
        finally:
            ticket.leave()

    def _start(self, num_prompt_tokens: int, seed: int) -> generation_pb2.GenerationStart:
        ready = self._state.engine.ready
        return generation_pb2.GenerationStart(
            seed=seed,
            arithmetic_fingerprint="" if ready is None else ready.fingerprint,
            num_prompt_tokens=num_prompt_tokens,
        )

    async def _tokenize(
        self, request: generation_pb2.GenerateRequest, limits: validation.Limits
    ) -> list[int]:
        match request.WhichOneof("prompt"):
            case "text":
                return await self._state.encode(request.text, limits)
            case "chat":
                messages = [(m.role, m.content) for m in request.chat.messages]
                return await self._state.encode(messages, limits)
            case _:
                return list(request.tokens.token_ids)


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """`WorkerService`: the state of the worker, and its drain."""

    def __init__(self, state: WorkerState) -> None:
        self._state = state

    async def GetWorkerStatus(
        self, request: worker_pb2.GetWorkerStatusRequest, context: Any
    ) -> worker_pb2.GetWorkerStatusResponse:
        """Answer at any time, ready or not."""
        return worker_status(self._state)

    async def Drain(
        self, request: worker_pb2.DrainRequest, context: Any
    ) -> worker_pb2.DrainResponse:
        """Stop admission for good and wait for the calls inside."""
        self._state.admission.draining = True
        timeout_s = request.timeout_ms / 1000 if request.timeout_ms > 0 else None
        num_unfinished = await self._state.admission.wait_idle(timeout_s)
        return worker_pb2.DrainResponse(num_unfinished=num_unfinished)


def sampling_params(request: generation_pb2.GenerateRequest, max_tokens: int) -> SamplingParams:
    """Parameters of a validated request with every default filled in; draws the missing seed."""
    given = request.sampling
    speculation = request.speculation
    return SamplingParams(
        temperature=given.temperature if given.HasField("temperature") else 1.0,
        top_p=given.top_p if given.HasField("top_p") else 1.0,
        top_k=max(0, given.top_k),
        min_p=given.min_p,
        seed=given.seed if given.HasField("seed") else secrets.randbits(64),
        max_tokens=max_tokens,
        stop=tuple(given.stop),
        stop_token_ids=tuple(given.stop_token_ids),
        ignore_eos=given.ignore_eos,
        max_gamma=speculation.max_gamma if speculation.HasField("max_gamma") else None,
    )


def usage(row: RowUsage) -> generation_pb2.Usage:
    """The engine's count of one request, as it goes out."""
    return generation_pb2.Usage(
        num_prompt_tokens=row.num_prompt_tokens,
        num_completion_tokens=row.num_completion_tokens,
        num_cached_tokens=row.num_cached_tokens,
        num_draft_tokens=row.num_draft_tokens,
        num_accepted_tokens=row.num_accepted_tokens,
        num_steps=row.num_steps,
        gamma_histogram=row.gamma_histogram,
        policy_version=row.policy_version,
        num_preemptions=row.num_preemptions,
    )


def worker_status(state: WorkerState) -> worker_pb2.GetWorkerStatusResponse:
    """The worker's state at this moment; what the engine has not told yet stays zero."""
    engine = state.engine
    answer = worker_pb2.GetWorkerStatusResponse(
        worker_id=state.worker_id,
        pid=os.getpid(),
        engine_pid=engine.pid,
        progress_age_ms=int(engine.progress_age_s * 1000),
        accepting=state.serving,
        planner_connected=state.planner_connected(),
    )
    answer.model.name = state.model_name
    answer.draft.agent_attached = state.agent_attached()
    if engine.ready is not None:
        ready = engine.ready
        answer.model.vocab_size = ready.vocab_size
        answer.model.max_model_len = ready.max_model_len
        answer.model.dtype = ready.dtype
        answer.model.max_gamma = ready.max_gamma
        answer.model.proposer = ready.proposer
        answer.arithmetic.mode = ready.arithmetic
        answer.arithmetic.fingerprint = ready.fingerprint
        answer.arithmetic.build = ready.build
        answer.arithmetic.device = ready.device_name
        for choice in ready.products:
            answer.arithmetic.products.add(**msgspec.structs.asdict(choice))
        if ready.arithmetic == "free":
            answer.arithmetic.reason = ready.arithmetic_reason
    if engine.status is not None:
        _add_status(answer, engine.status, engine.num_requests)
    return answer


def _add_status(
    answer: worker_pb2.GetWorkerStatusResponse, status: Status, num_requests: int
) -> None:
    # The engine's own split is up to 50 ms old; the sum is known here at once.
    answer.num_running = min(status.num_running, num_requests)
    answer.num_waiting = num_requests - answer.num_running
    answer.num_free_blocks = status.num_free_blocks
    answer.num_total_blocks = status.num_total_blocks
    answer.gamma = status.gamma
    if status.num_draft_tokens:
        answer.acceptance_rate = status.num_accepted_tokens / status.num_draft_tokens
    answer.policy_version = status.policy_version
    answer.num_steps = status.num_steps
    answer.engine_rss_bytes = status.rss_bytes
    answer.num_generated_tokens = status.num_generated_tokens
    answer.num_preemptions = status.num_preemptions
    answer.draft.residency = RESIDENCIES[status.residency]
    answer.draft.epoch = status.draft_epoch
    answer.draft.expanded = status.expanded
    answer.draft.num_expansions = status.num_expansions
    answer.draft.num_contractions = status.num_contractions
    answer.draft.num_draft_tokens = status.num_draft_tokens
    answer.draft.num_accepted_tokens = status.num_accepted_tokens
    answer.draft.num_granted_blocks = status.num_granted_blocks


async def _pieces(
    stream: TokenStream, detokenizer: Detokenizer, ticket: Ticket
) -> AsyncIterator[generation_pb2.GenerateResponse]:
    """The answer as messages: ids as the engine decides, text as far as it is certain."""
    finished: Finished | None = None
    while finished is None:
        token_ids, finished = await stream.read()
        text = ""
        for token_id in token_ids:
            if not detokenizer.stopped:
                text += detokenizer.push(token_id)
        piece = generation_pb2.GenerateResponse(token_ids=token_ids)
        if finished is not None:
            ticket.complete()
            if not detokenizer.stopped:
                text += detokenizer.flush()
            _end(piece, finished)
        piece.text = text
        yield piece


def _end(piece: generation_pb2.GenerateResponse, finished: Finished) -> None:
    if finished.reason == "abort":
        raise Unavailable("the worker ended the answer before it was complete")
    if finished.reason not in FINISH_REASONS:
        raise EngineFailure(finished.error or "the engine ended the answer")
    piece.finish_reason = FINISH_REASONS[finished.reason]
    piece.usage.CopyFrom(usage(finished.usage))
