"""`GenerationService`: proto in, proto out; everything else is the front's."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import msgspec

from nightjar import validation
from nightjar.v1 import generation_pb2 as pb
from nightjar.v1 import generation_pb2_grpc
from worker.front.answers import answer
from worker.front.pieces import Piece, PositionLogprobs, Request, Resumed, TokenLogprob
from worker.front.state import WorkerState
from worker.messages import RowUsage, SamplingParams
from worker.text.chat_template import Chat, Message, Tool, ToolCall

FINISH_REASONS = {
    "": pb.FINISH_REASON_UNSPECIFIED,
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
}
_DEFAULTS = {  # of fields whose absence is not 0
    "temperature": 1.0,
    "top_p": 1.0,
    "repetition_penalty": 1.0,
    "logprobs": -1,
    "prompt_logprobs": -1,
}


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """Validates, and writes what the engine decides as it comes."""

    def __init__(self, state: WorkerState) -> None:
        self._state = state

    async def Generate(
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Answer one request; see the proto for what the messages carry."""
        limits, _ = self._state.limits()
        validation.validate(request, limits)

        def on_end(callback: Any) -> None:
            context.add_done_callback(lambda _: callback())

        async with aclosing(answer(self._state, request_of(request), on_end)) as pieces:
            async for piece in pieces:
                yield response_of(piece)


def request_of(request: pb.GenerateRequest) -> Request:
    """A validated request in the front's terms; draws the seed where there is none."""
    resumed: Resumed | None = None
    if request.HasField("continuation"):
        given = request.continuation
        resumed = Resumed(
            token_ids=list(given.token_ids),
            num_text_bytes_delivered=given.num_text_bytes_delivered,
            fingerprint=given.arithmetic_fingerprint,
        )
    return Request(
        prompt=_prompt_of(request),
        sampling=sampling_params(request),
        n=request.sampling.n or 1,
        resumed=resumed,
    )


def sampling_params(request: pb.GenerateRequest) -> SamplingParams:
    """Parameters of a validated request with every default filled in, but for a max_tokens of 0."""
    given, speculation = request.sampling, request.speculation

    def value(name: str) -> Any:
        return getattr(given, name) if given.HasField(name) else _DEFAULTS[name]  # type: ignore[arg-type]

    if request.HasField("continuation"):
        seed = request.continuation.seed
    else:
        seed = given.seed if given.HasField("seed") else secrets.randbits(64)
    return SamplingParams(
        temperature=value("temperature"),
        top_p=value("top_p"),
        top_k=max(0, given.top_k),
        min_p=given.min_p,
        seed=seed,
        max_tokens=given.max_tokens,
        min_tokens=given.min_tokens,
        stop=tuple(given.stop),
        stop_token_ids=tuple(given.stop_token_ids),
        repetition_penalty=value("repetition_penalty"),
        presence_penalty=given.presence_penalty,
        frequency_penalty=given.frequency_penalty,
        logit_bias=tuple(sorted(given.logit_bias.items())),
        num_logprobs=value("logprobs"),
        num_prompt_logprobs=value("prompt_logprobs"),
        ignore_eos=given.ignore_eos,
        max_gamma=speculation.max_gamma if speculation.HasField("max_gamma") else None,
    )


def response_of(piece: Piece) -> pb.GenerateResponse:
    """A piece as it goes out."""
    response = pb.GenerateResponse(
        index=piece.index,
        token_ids=piece.token_ids,
        text=piece.text,
        logprobs=map(_position, piece.logprobs),
        prompt_logprobs=map(_position, piece.prompt_logprobs),
        finish_reason=FINISH_REASONS[piece.finish_reason],
    )
    if piece.start is not None:
        response.start.seed = piece.start.seed
        response.start.arithmetic_fingerprint = piece.start.fingerprint
        response.start.num_prompt_tokens = piece.start.num_prompt_tokens
        response.start.first_prompt_token = piece.start.first_prompt_token
    if piece.usage is not None:
        response.usage.CopyFrom(usage(piece.usage))
    return response


def usage(row: RowUsage) -> pb.Usage:
    """What an answer cost, as it goes out."""
    return pb.Usage(**msgspec.structs.asdict(row))


def _prompt_of(request: pb.GenerateRequest) -> str | Chat | list[int]:
    match request.WhichOneof("prompt"):
        case "text":
            return request.text
        case "chat":
            return Chat(
                messages=[_message(message) for message in request.chat.messages],
                tools=[
                    Tool(tool.name, tool.description, tool.parameters_json)
                    for tool in request.chat.tools
                ],
            )
        case _:
            return list(request.tokens.token_ids)


def _message(message: pb.ChatMessage) -> Message:
    calls = [ToolCall(call.id, call.name, call.arguments_json) for call in message.tool_calls]
    return Message(message.role, message.content, calls, message.tool_call_id)


def _position(position: PositionLogprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(chosen=_token(position.chosen), top=map(_token, position.top))


def _token(token: TokenLogprob) -> pb.TokenLogprob:
    return pb.TokenLogprob(**token._asdict())
