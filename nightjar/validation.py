"""The one validator of generation requests, used by worker and gateway, whatever the protocol.

It runs before anything is allocated. Limits that only a worker knows (context, vocabulary)
are optional: the gateway passes what the worker's status told it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from nightjar.errors import InvalidRequest, NotServed
from nightjar.v1 import generation_pb2 as pb

MAX_STOP_STRINGS, MAX_STOP_CHARACTERS, MAX_STOP_TOKEN_IDS = 16, 256, 64
MAX_LOGIT_BIAS = 300
MAX_GAMMA, MAX_REQUEST_ID_CHARACTERS, MAX_MESSAGES = 8, 128, 1024
ROLES = ("system", "user", "assistant")
_RANGES = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "top_k": (-1, math.inf),
    "min_p": (0, 1),
    "max_tokens": (1, math.inf),
    "min_tokens": (0, math.inf),
    "repetition_penalty": (0, 2),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "logprobs": (0, 20),
    "n": (1, 128),
}
_ABOVE_ZERO = ("top_p", "repetition_penalty")  # ranges that leave out their lower end
_NEUTRAL = {  # designed, not served yet: only what asks for nothing is accepted
    "min_tokens": 0,
    "repetition_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "n": 1,
}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a worker can take."""

    model: str
    vocab_size: int
    max_model_len: int  # prompt and answer together, in tokens


def validate(request: pb.GenerateRequest, limits: Limits | None = None) -> None:
    """Check every field; the prompt's length in tokens is `check_length`'s, after tokenizing.

    Raises:
        InvalidRequest: A value can never work; names the field and the limit.
        NotServed: The field is designed but not served by this build.
    """
    _check_known(request)
    if len(request.request_id) > MAX_REQUEST_ID_CHARACTERS:
        raise InvalidRequest("request_id", f"at most {MAX_REQUEST_ID_CHARACTERS} characters")
    if limits is not None and request.model not in ("", limits.model):
        text = f"unknown model {request.model[:128]!r}; this server has {limits.model!r}"
        raise InvalidRequest("model", text)
    _check_prompt(request, limits)
    _check_sampling(request.sampling, limits)
    if request.speculation.HasField("max_gamma"):
        _check_range("speculation.max_gamma", request.speculation.max_gamma, 0, MAX_GAMMA)
    _check_served(request)


def check_length(num_prompt_tokens: int, sampling: pb.SamplingParams, limits: Limits) -> int:
    """Check the tokenized prompt; returns how many tokens may be generated.

    Raises:
        InvalidRequest: The prompt is empty, or prompt and max_tokens exceed the context.
    """
    room = limits.max_model_len - num_prompt_tokens
    if num_prompt_tokens == 0:
        raise InvalidRequest("prompt", "must hold at least one token")
    if room < 1:
        raise InvalidRequest(
            "prompt",
            f"has {num_prompt_tokens} tokens; the context is {limits.max_model_len} tokens, "
            "prompt and answer together",
        )
    if not sampling.HasField("max_tokens"):
        return room
    if sampling.max_tokens > room:
        raise InvalidRequest(
            "sampling.max_tokens",
            f"{sampling.max_tokens} with {num_prompt_tokens} prompt tokens exceeds the context of "
            f"{limits.max_model_len} tokens",
        )
    return sampling.max_tokens


def _check_known(message: Message, path: str = "") -> None:
    """Refuse fields of another version of the protocol, by number: nothing is ever ignored."""
    unknown = UnknownFieldSet(message)
    if len(unknown) > 0:
        raise InvalidRequest(f"{path}{unknown[0].field_number}", "unknown field")
    for field, value in message.ListFields():
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for part in value if field.is_repeated else (value,):
                _check_known(part, f"{path}{field.name}.")


def _check_served(request: pb.GenerateRequest) -> None:
    sampling = request.sampling
    for name, value in _NEUTRAL.items():
        if sampling.HasField(name) and getattr(sampling, name) != value:  # type: ignore[arg-type]
            text = f"not served by this version; only {value} is accepted"
            raise NotServed(f"sampling.{name}", text)
    if sampling.logit_bias:
        raise NotServed("sampling.logit_bias", "not served by this version")
    if sampling.HasField("logprobs"):
        raise NotServed("sampling.logprobs", "not served by this version")
    if request.HasField("continuation"):
        raise NotServed("continuation", "not served by this version")


def _check_prompt(request: pb.GenerateRequest, limits: Limits | None) -> None:
    form = request.WhichOneof("prompt")
    if form is None:
        raise InvalidRequest("prompt", "one of text, chat or tokens is required")
    if form == "text" and not request.text:
        raise InvalidRequest("text", "must not be empty")
    if form == "chat":
        messages = request.chat.messages
        if not 1 <= len(messages) <= MAX_MESSAGES:
            raise InvalidRequest("chat.messages", f"must hold 1 to {MAX_MESSAGES} messages")
        for i, message in enumerate(messages):
            if message.role not in ROLES:
                raise InvalidRequest(
                    f"chat.messages[{i}].role", f"must be one of {', '.join(ROLES)}"
                )
    if form == "tokens":
        ids = request.tokens.token_ids
        if not ids:
            raise InvalidRequest("tokens.token_ids", "must not be empty")
        if limits is not None:
            _check_ids("tokens.token_ids", ids, limits.vocab_size)


def _check_sampling(sampling: pb.SamplingParams, limits: Limits | None) -> None:
    for name, (low, high) in _RANGES.items():
        if sampling.HasField(name):  # type: ignore[arg-type]
            given = getattr(sampling, name)
            _check_range(f"sampling.{name}", given, low, high)
            if given == 0 and name in _ABOVE_ZERO:
                raise InvalidRequest(f"sampling.{name}", f"must be above 0 and at most {high}")
    if sampling.HasField("max_tokens") and sampling.min_tokens > sampling.max_tokens:
        raise InvalidRequest("sampling.min_tokens", f"exceeds max_tokens, {sampling.max_tokens}")
    if len(sampling.logit_bias) > MAX_LOGIT_BIAS:
        raise InvalidRequest("sampling.logit_bias", f"at most {MAX_LOGIT_BIAS} entries")
    for value in sampling.logit_bias.values():
        _check_range("sampling.logit_bias", value, -100, 100)
    if limits is not None:
        _check_ids("sampling.logit_bias", sampling.logit_bias, limits.vocab_size)
    if len(sampling.stop) > MAX_STOP_STRINGS:
        raise InvalidRequest(
            "sampling.stop", f"at most {MAX_STOP_STRINGS} strings, got {len(sampling.stop)}"
        )
    for i, text in enumerate(sampling.stop):
        if not 1 <= len(text) <= MAX_STOP_CHARACTERS:
            raise InvalidRequest(
                f"sampling.stop[{i}]", f"must have 1 to {MAX_STOP_CHARACTERS} characters"
            )
    if len(sampling.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest("sampling.stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS} ids")
    if limits is not None:
        _check_ids("sampling.stop_token_ids", sampling.stop_token_ids, limits.vocab_size)


def _check_ids(field: str, ids: Iterable[int], vocab_size: int) -> None:
    for i, token_id in enumerate(ids):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"{field}[{i}]", f"{token_id} lies outside the vocabulary [0, {vocab_size})"
            )


def _check_range(field: str, value: float, low: float, high: float) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        limit = f"lie in [{low:g}, {high:g}]" if math.isfinite(high) else f"be at least {low:g}"
        raise InvalidRequest(field, f"must {limit}, got {value:.16g}")
