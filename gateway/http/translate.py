"""From a body to the requests that a worker gets: one for each of its prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from gateway.http.errors import HttpError
from gateway.http.fields import MAX_CHOICES
from gateway.http.nothing import NEUTRAL, NEUTRAL_OF_MESSAGE, Route, drop_neutral
from gateway.http.schema import Body, ChatBody, CompletionBody, Message
from nightjar.chat_rules import MAX_MESSAGES
from nightjar.v1 import generation_pb2 as pb

DEFAULT_COMPLETION_TOKENS = 16
_MAX_NAME_CHARACTERS = 100
# pydantic's kind of error -> OpenAI's code and our words; others keep pydantic's words.
_KINDS = {
    "bool_type": ("invalid_type", "must be true or false"),
    "dict_type": ("invalid_type", "must be an object"),
    "extra_forbidden": ("unknown_parameter", "unknown field"),
    "float_type": ("invalid_type", "must be a number"),
    "greater_than_equal": ("invalid_value", "must be at least {ge}"),
    "int_type": ("invalid_type", "must be a whole number"),
    "less_than": ("invalid_value", "must be below {lt}"),
    "list_type": ("invalid_type", "must be a list"),
    "literal_error": ("invalid_value", "must be {expected}"),
    "missing": ("missing_required_parameter", "is required"),
    "model_type": ("invalid_type", "must be an object"),
    "string_type": ("invalid_type", "must be a string"),
    "value_error": ("invalid_value", "{error}"),
}


@dataclass(frozen=True, kw_only=True)
class Parsed:
    """A request of one of the routes."""

    route: Route
    requests: list[pb.GenerateRequest]  # one a prompt
    num_choices: int  # of each prompt
    stream: bool
    include_usage: bool  # one last chunk with the usage
    continuous_usage: bool  # the usage so far in every chunk
    logprobs: bool
    echo: bool  # answers begin with their prompts
    num_hidden: int  # tokens of each answer that were not asked for: 1 where max_tokens is 0
    user: str  # for logs only
    renamed: Mapping[str, str]  # parameters that the client called by another name


def parse(route: Route, body: dict[str, Any], request_id: str) -> Parsed:
    """Translate a body.

    Raises:
        HttpError: 400; a field is unknown, missing, of a wrong type, or asks for what is not
            served here.
    """
    model = ChatBody if route == "chat" else CompletionBody
    fields = drop_neutral(body, _neutral(route, body))
    if isinstance(fields.get("messages"), list):
        fields["messages"] = [
            drop_neutral(message, NEUTRAL_OF_MESSAGE, f"messages[{i}].")
            if isinstance(message, dict)
            else message
            for i, message in enumerate(fields["messages"][: MAX_MESSAGES + 1])
        ]
    known = model.model_fields
    fields = {
        name: given for name, given in fields.items() if given is not None or name not in known
    }
    try:
        if route == "chat":
            chat = ChatBody.model_validate(fields)
            return _chat(chat, request_id)
        return _completion(CompletionBody.model_validate(fields), request_id)
    except ValidationError as error:
        raise _refusal(error) from None


def _neutral(route: Route, body: dict[str, Any]) -> Mapping[str, tuple[Any, ...]]:
    """What asks for nothing here: to take the best of n answers is, where n are wanted."""
    neutral = NEUTRAL[route]
    if route == "completion" and type(body.get("n")) is int:
        return {**neutral, "best_of": (body["n"],)}
    return neutral


def _chat(body: ChatBody, request_id: str) -> Parsed:
    request = _request(body, request_id)
    for i, message in enumerate(body.messages):
        request.chat.messages.append(_message(message, i))
    request.chat.SetInParent()
    for tool in body.tools if body.tool_choice == "auto" else ():
        function = tool.function
        parameters = "" if function.parameters is None else _json(function.parameters, "tools")
        request.chat.tools.add(
            name=function.name, description=function.description, parameters_json=parameters
        )
    renamed = {"logprobs": "top_logprobs"}
    if body.max_completion_tokens is not None:
        if body.max_tokens not in (None, body.max_completion_tokens):
            raise _invalid("max_tokens", "differs from max_completion_tokens")
        request.sampling.max_tokens = body.max_completion_tokens
        renamed["max_tokens"] = "max_completion_tokens"
    if body.top_logprobs and not body.logprobs:
        raise _invalid("top_logprobs", "only with logprobs: true")
    if body.logprobs:
        request.sampling.logprobs = body.top_logprobs or 0
    return _parsed(
        "chat",
        body,
        [request],
        logprobs=body.logprobs,
        user=body.safety_identifier or body.user,
        renamed=renamed,
    )


def _completion(body: CompletionBody, request_id: str) -> Parsed:
    if body.echo and body.stream:
        raise _invalid("echo", "only without stream: true")
    common = _request(body, request_id)
    if body.max_tokens is None:
        common.sampling.max_tokens = DEFAULT_COMPLETION_TOKENS
    # Prompts alone are scored by generating one token, which is thrown away.
    num_hidden = 1 if body.echo and body.max_tokens == 0 else 0
    if num_hidden:
        if body.min_tokens:
            raise _invalid("min_tokens", "exceeds max_tokens, 0")
        common.sampling.max_tokens = 1
    if body.logprobs is not None:
        common.sampling.logprobs = body.logprobs
    requests = []
    for prompt in body.prompt:
        request = pb.GenerateRequest()
        request.CopyFrom(common)
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.tokens.token_ids.extend(prompt)
            request.tokens.SetInParent()
        if body.echo and (body.logprobs is not None or not isinstance(prompt, str)):
            request.sampling.prompt_logprobs = body.logprobs or 0
        requests.append(request)
    return _parsed(
        "completion",
        body,
        requests,
        logprobs=body.logprobs is not None,
        echo=body.echo,
        num_hidden=num_hidden,
        user=body.user,
        renamed={"prompt_logprobs": "logprobs"},
    )


def _parsed(
    route: Route,
    body: Body,
    requests: list[pb.GenerateRequest],
    *,
    logprobs: bool,
    user: str,
    renamed: Mapping[str, str],
    echo: bool = False,
    num_hidden: int = 0,
) -> Parsed:
    options = body.stream_options
    if options is not None and not body.stream:
        raise _invalid("stream_options", "only with stream: true")
    num_choices = 1 if body.n is None else body.n
    # n alone is the validator's to bound, as it is for gRPC.
    if len(requests) > 1 and len(requests) * num_choices > MAX_CHOICES:
        raise _invalid("n", f"{len(requests)} prompts make over {MAX_CHOICES} choices together")
    return Parsed(
        route=route,
        requests=requests,
        num_choices=num_choices,
        stream=body.stream,
        include_usage=options is not None and options.include_usage,
        continuous_usage=options is not None and options.continuous_usage_stats,
        logprobs=logprobs,
        echo=echo,
        num_hidden=num_hidden,
        user=user,
        renamed=renamed,
    )


def _message(message: Message, i: int) -> pb.ChatMessage:
    if message.content is None and not message.tool_calls:
        code = "missing_required_parameter"
        raise HttpError(400, f"messages[{i}].content: is required", f"messages[{i}].content", code)
    calls = [
        pb.ToolCall(id=call.id, name=call.function.name, arguments_json=call.function.arguments)
        for call in message.tool_calls
    ]
    return pb.ChatMessage(
        role="system" if message.role == "developer" else message.role,
        content=message.content or "",
        tool_calls=calls,
        tool_call_id=message.tool_call_id,
    )


def _json(value: object, field: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise _invalid(field, "NaN and Infinity are no JSON") from None


def _request(body: Body, request_id: str) -> pb.GenerateRequest:
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


def _invalid(field: str, words: str) -> HttpError:
    return HttpError(400, f"{field}: {words}", field, "invalid_value")


def _refusal(error: ValidationError) -> HttpError:
    first = error.errors(include_url=False, include_input=False)[0]
    path = ""
    for step in first["loc"]:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    path = path[:_MAX_NAME_CHARACTERS]
    code, words = _KINDS.get(first["type"], ("invalid_value", first["msg"]))
    if "ctx" in first:
        words = words.format(**first["ctx"])
    return HttpError(400, f"{path}: {words}", path, code)
