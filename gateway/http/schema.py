"""The JSON of the OpenAI routes, and its translation to GenerateRequest.

Only shapes and types are checked here; every value is `nightjar.validation`'s, so that HTTP and
gRPC clients get the same sentence. Unknown fields are refused; fields that OpenAI has and
Nightjar has not are accepted at the one value that asks for nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationError

from nightjar.errors import InvalidRequest
from nightjar.v1 import generation_pb2 as pb

Route = Literal["chat", "completion"]

DEFAULT_COMPLETION_TOKENS = 16
_MAX_NAME_CHARACTERS = 100
# Fields that ask for what no part of Nightjar does: the values that ask for nothing.
_ASKS_NOTHING: dict[str, Any] = {
    "best_of": 1,
    "echo": False,
    "response_format": {"type": "text"},
    "store": False,
    "suffix": "",
    "tool_choice": "none",
    "tools": [],
    "use_beam_search": False,
}
_WORDS = {
    "bool_type": "must be true or false",
    "dict_type": "must be an object",
    "extra_forbidden": "unknown field",
    "float_type": "must be a number",
    "int_type": "must be a whole number",
    "list_type": "must be a list",
    "missing": "is required",
    "model_type": "must be an object",
    "string_type": "must be a string",
}


def _prompt(value: object) -> str | list[int]:
    """A string, a list of one string, or token ids; several prompts are refused."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(type(item) is int for item in value):
        return _token_ids(value)
    if isinstance(value, list) and all(isinstance(item, str | list) for item in value):
        raise ValueError(f"holds {len(value)} prompts; one prompt a request is served")
    raise ValueError("must be a string, a list of one string, or a list of token ids")


def _token_ids(value: object) -> list[int]:
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise ValueError("must be a list of token ids")
    for i, item in enumerate(value):
        if not -(2**31) <= item < 2**31:
            raise ValueError(f"entry {i} lies outside the vocabulary")
    return value


def _strings(value: object) -> list[str]:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(item, str) for item in strings):
        raise ValueError("must be a string or a list of strings")
    return strings


def _content(value: object) -> str:
    """A string, or text parts, which are joined by line ends."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of text parts")
    texts = []
    for part in value:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str) or len(part) != 2:
            raise ValueError('must hold parts {"type": "text", "text": "…"} only')
        texts.append(text)
    return "\n".join(texts)


def _without_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {name: member for name, member in value.items() if member is not None}
    return value


def _bias(value: object) -> dict[int, float]:
    if not isinstance(value, dict):
        raise ValueError("must be an object of token ids and numbers")
    bias: dict[int, float] = {}
    for name, number in value.items():
        if not (name.isdecimal() and name.isascii() and len(name) < 10):
            raise ValueError("its names must be token ids")
        if not isinstance(number, int | float) or isinstance(number, bool):
            raise ValueError("its values must be numbers")
        try:
            bias[int(name)] = float(number)
        except OverflowError:
            raise ValueError("its values must lie in [-100, 100]") from None
    return bias


Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
TokenIds = Annotated[list[int], PlainValidator(_token_ids)]
Strings = Annotated[list[str], PlainValidator(_strings)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class NightjarOptions(_Strict):
    """Nightjar's own parameters."""

    max_gamma: Int32 | None = None


class StreamOptions(_Strict):
    """What a stream carries beside the text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Message(_Strict):
    """One chat message; `developer` is `system` under OpenAI's newer name."""

    role: str
    content: Annotated[str, PlainValidator(_content)]


class _Body(_Strict):
    model: str = ""
    stream: bool = False
    stream_options: Annotated[StreamOptions | None, BeforeValidator(_without_nulls)] = None
    user: str = ""
    nightjar: Annotated[NightjarOptions | None, BeforeValidator(_without_nulls)] = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    max_tokens: Int32 | None = None
    min_tokens: Int32 | None = None
    stop: Strings = []
    stop_token_ids: TokenIds = []
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[int, float], PlainValidator(_bias)] = {}
    n: Int32 | None = None
    ignore_eos: bool = False


class ChatBody(_Body):
    """Body of POST /v1/chat/completions; without a limit the context is the limit."""

    messages: list[Annotated[Message, BeforeValidator(_without_nulls)]]
    max_completion_tokens: Int32 | None = None
    logprobs: bool = False
    top_logprobs: Int32 | None = None


class CompletionBody(_Body):
    """Body of POST /v1/completions; `max_tokens` is 16 by default, as OpenAI's is."""

    prompt: Annotated[str | list[int], PlainValidator(_prompt)]
    logprobs: Int32 | None = None


@dataclass(frozen=True, kw_only=True)
class Parsed:
    """A request of one of the routes."""

    route: Route
    request: pb.GenerateRequest
    stream: bool
    include_usage: bool  # one last chunk with the usage
    continuous_usage: bool  # the usage so far in every chunk
    user: str  # for logs only


def parse(route: Route, body: dict[str, Any], request_id: str) -> Parsed:
    """Translate a body.

    Raises:
        InvalidRequest: A field is unknown, missing or of a wrong type.
    """
    model = ChatBody if route == "chat" else CompletionBody
    known = {*model.model_fields, *_ASKS_NOTHING}
    body = {name: given for name, given in body.items() if given is not None or name not in known}
    for name, value in _ASKS_NOTHING.items():
        # 0 is not false and true is not 1, whatever Python says.
        if name in body and json.dumps(body.pop(name)) != json.dumps(value):
            raise InvalidRequest(name, f"not supported; only {json.dumps(value)} is accepted")
    try:
        if route == "chat":
            chat = ChatBody.model_validate(body)
            return _parsed(route, chat, _chat_request(chat, request_id))
        completion = CompletionBody.model_validate(body)
        return _parsed(route, completion, _completion_request(completion, request_id))
    except ValidationError as error:
        raise _refusal(error) from None


def _parsed(route: Route, body: _Body, request: pb.GenerateRequest) -> Parsed:
    options = body.stream_options
    if options is not None and not body.stream:
        raise InvalidRequest("stream_options", "only with stream: true")
    return Parsed(
        route=route,
        request=request,
        stream=body.stream,
        include_usage=options is not None and options.include_usage,
        continuous_usage=options is not None and options.continuous_usage_stats,
        user=body.user,
    )


def _chat_request(body: ChatBody, request_id: str) -> pb.GenerateRequest:
    request = _request(body, request_id)
    for message in body.messages:
        role = "system" if message.role == "developer" else message.role
        request.chat.messages.add(role=role, content=message.content)
    request.chat.SetInParent()
    if body.max_completion_tokens is not None:
        if body.max_tokens not in (None, body.max_completion_tokens):
            raise InvalidRequest("max_tokens", "differs from max_completion_tokens")
        request.sampling.max_tokens = body.max_completion_tokens
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs", "only with logprobs: true")
    if body.logprobs:
        request.sampling.logprobs = body.top_logprobs or 0
    return request


def _completion_request(body: CompletionBody, request_id: str) -> pb.GenerateRequest:
    request = _request(body, request_id)
    if isinstance(body.prompt, str):
        request.text = body.prompt
    else:
        request.tokens.token_ids.extend(body.prompt)
        request.tokens.SetInParent()
    if body.max_tokens is None:
        request.sampling.max_tokens = DEFAULT_COMPLETION_TOKENS
    if body.logprobs is not None:
        request.sampling.logprobs = body.logprobs
    return request


def _request(body: _Body, request_id: str) -> pb.GenerateRequest:
    sampling = pb.SamplingParams(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        seed=body.seed,
        max_tokens=body.max_tokens,
        min_tokens=body.min_tokens,
        stop=body.stop,
        stop_token_ids=body.stop_token_ids,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=body.logit_bias,
        n=body.n,
        ignore_eos=body.ignore_eos,
    )
    request = pb.GenerateRequest(model=body.model, sampling=sampling, request_id=request_id)
    if body.nightjar is not None and body.nightjar.max_gamma is not None:
        request.speculation.max_gamma = body.nightjar.max_gamma
    return request


def _refusal(error: ValidationError) -> InvalidRequest:
    first = error.errors(include_url=False, include_input=False)[0]
    path = ""
    for step in first["loc"]:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    limits = first.get("ctx", {})
    if first["type"] == "value_error":
        words = str(limits["error"])
    elif first["type"] == "greater_than_equal":
        words = f"must be at least {limits['ge']}"
    elif first["type"] == "less_than":
        words = f"must be below {limits['lt']}"
    else:
        words = _WORDS.get(first["type"], first["msg"])
    return InvalidRequest(path[:_MAX_NAME_CHARACTERS], words)
