"""The one validator of generation requests, used by worker and gateway, whatever the protocol.

It runs before anything is allocated, and what it does itself is bounded: counts are judged before
elements. Limits that only a worker knows (context, vocabulary) are optional: the gateway passes
what the worker's status told it.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from nightjar import chat_rules
from nightjar.errors import InvalidRequest
from nightjar.v1 import generation_pb2 as pb

# The rest of a message of 4 MiB is left to a continuation, which a gateway may have to add.
MAX_REQUEST_BYTES = 3_932_160
MAX_STOP_STRINGS, MAX_STOP_CHARACTERS, MAX_STOP_TOKEN_IDS = 16, 256, 64
MAX_LOGIT_BIAS = 300
MAX_GAMMA, MAX_REQUEST_ID_CHARACTERS = 8, 128
MAX_MESSAGES, MAX_TOOLS = chat_rules.MAX_MESSAGES, chat_rules.MAX_TOOLS
MAX_PROMPT_LOGPROBS = 1_048_576  # entries of a prompt, alternatives included
MAX_ATTEMPTS = 16
MAX_FINGERPRINT_CHARACTERS = 128
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
    "prompt_logprobs": (0, 20),
    "n": (1, 128),
}
_ABOVE_ZERO = ("top_p", "repetition_penalty")  # ranges that leave out their lower end


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
    """
    _check_counts(request)
    check_known(request)
    if len(request.request_id) > MAX_REQUEST_ID_CHARACTERS:
        raise InvalidRequest("request_id", f"at most {MAX_REQUEST_ID_CHARACTERS} characters")
    if limits is not None and request.model not in ("", limits.model):
        text = f"unknown model {request.model[:128]!r}; this server has {limits.model!r}"
        raise InvalidRequest("model", text)
    _check_prompt(request, limits)
    _check_sampling(request.sampling, limits)
    if request.speculation.HasField("max_gamma"):
        _check_range("speculation.max_gamma", request.speculation.max_gamma, 0, MAX_GAMMA)
    if request.HasField("continuation"):
        _check_continuation(request, limits)


def check_length(
    num_prompt_tokens: int,
    limits: Limits,
    *,
    max_tokens: int | None = None,
    min_tokens: int = 0,
    num_prompt_logprobs: int = -1,
    num_prior_tokens: int = 0,
) -> int:
    """Check the tokenized prompt; returns how many tokens the answer may have.

    Args:
        num_prompt_tokens: Its length.
        limits: What the worker can take.
        max_tokens: Of the answer; None takes what the context still holds.
        min_tokens: Of the answer.
        num_prompt_logprobs: Alternatives for each token of the prompt; -1 for no entries.
        num_prior_tokens: Tokens that the answer has already.

    Raises:
        InvalidRequest: The prompt is empty, or it and the answer exceed the context.
    """
    room = limits.max_model_len - num_prompt_tokens
    if num_prompt_tokens == 0:
        raise InvalidRequest("prompt", "must hold at least one token")
    if room < 1:
        raise _too_long(num_prompt_tokens, limits)
    if max_tokens is None:
        max_tokens = room
    if max_tokens > room:
        raise InvalidRequest(
            "sampling.max_tokens",
            f"{max_tokens} with {num_prompt_tokens} prompt tokens exceeds the context of "
            f"{limits.max_model_len} tokens",
        )
    if min_tokens > max_tokens:
        raise InvalidRequest(
            "sampling.min_tokens", f"{min_tokens} exceeds the {max_tokens} that can be generated"
        )
    if num_prior_tokens >= max_tokens:
        raise InvalidRequest(
            "continuation.token_ids",
            f"the answer has {num_prior_tokens} tokens; at most {max_tokens} can be generated",
        )
    if num_prompt_tokens * (num_prompt_logprobs + 1) > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            "sampling.prompt_logprobs",
            f"{num_prompt_tokens} tokens of the prompt have more than {MAX_PROMPT_LOGPROBS} "
            "entries together",
        )
    return max_tokens


def check_known(message: Message, path: str = "") -> None:
    """Refuse fields of another version of the protocol, by number: nothing is ever ignored.

    Raises:
        InvalidRequest: There is one, in the message or in one of its own.
    """
    unknown = UnknownFieldSet(message)
    if len(unknown) > 0:
        raise InvalidRequest(f"{path}{unknown[0].field_number}", "unknown field")
    for field, value in message.ListFields():
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for part in value if field.is_repeated else (value,):
                check_known(part, f"{path}{field.name}.")


def _too_long(num_prompt_tokens: int, limits: Limits) -> InvalidRequest:
    return InvalidRequest(
        "prompt",
        f"has {num_prompt_tokens} tokens; the context is {limits.max_model_len} tokens, "
        "prompt and answer together",
    )


def _check_counts(request: pb.GenerateRequest) -> None:
    """Bound what is read element by element from here on."""
    size = request.ByteSize() - request.continuation.ByteSize()
    if size > MAX_REQUEST_BYTES:
        raise InvalidRequest("request", f"has {size} bytes; at most {MAX_REQUEST_BYTES}")
    sampling = request.sampling
    if request.WhichOneof("prompt") == "chat":
        chat_rules.check_counts(request.chat)
    if len(sampling.stop) > MAX_STOP_STRINGS:
        raise InvalidRequest(
            "sampling.stop", f"at most {MAX_STOP_STRINGS} strings, got {len(sampling.stop)}"
        )
    if len(sampling.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest("sampling.stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS} ids")
    if len(sampling.logit_bias) > MAX_LOGIT_BIAS:
        raise InvalidRequest("sampling.logit_bias", f"at most {MAX_LOGIT_BIAS} entries")


def _check_prompt(request: pb.GenerateRequest, limits: Limits | None) -> None:
    form = request.WhichOneof("prompt")
    if form is None:
        raise InvalidRequest("prompt", "one of text, chat or tokens is required")
    if form == "text" and not request.text:
        raise InvalidRequest("text", "must not be empty")
    if form == "chat":
        chat_rules.check(request.chat)
    if form == "tokens":
        ids = request.tokens.token_ids
        if not ids:
            raise InvalidRequest("tokens.token_ids", "must not be empty")
        if limits is not None:
            if len(ids) >= limits.max_model_len:
                raise _too_long(len(ids), limits)
            _check_ids("tokens.token_ids", ids, limits.vocab_size)


def _check_continuation(request: pb.GenerateRequest, limits: Limits | None) -> None:
    given, sampling = request.continuation, request.sampling
    if sampling.n > 1:
        raise InvalidRequest("sampling.n", "must be 1 where an answer is continued")
    _check_range("continuation.attempt", given.attempt, 1, MAX_ATTEMPTS)
    delivered = given.num_text_bytes_delivered
    _check_range("continuation.num_text_bytes_delivered", delivered, 0, math.inf)
    fingerprint, path = given.arithmetic_fingerprint, "continuation.arithmetic_fingerprint"
    if len(fingerprint) > MAX_FINGERPRINT_CHARACTERS:
        raise InvalidRequest(path, f"at most {MAX_FINGERPRINT_CHARACTERS} characters")
    num_prior = len(given.token_ids)
    if sampling.HasField("max_tokens") and num_prior >= sampling.max_tokens:
        raise InvalidRequest(
            "continuation.token_ids",
            f"the answer has {num_prior} tokens; at most {sampling.max_tokens} can be generated",
        )
    if limits is not None:
        if num_prior >= limits.max_model_len:
            raise InvalidRequest(
                "continuation.token_ids",
                f"{num_prior} tokens exceed the context of {limits.max_model_len} tokens",
            )
        _check_ids("continuation.token_ids", given.token_ids, limits.vocab_size)


def _check_sampling(sampling: pb.SamplingParams, limits: Limits | None) -> None:
    for name, (low, high) in _RANGES.items():
        if sampling.HasField(name):  # type: ignore[arg-type]
            given = getattr(sampling, name)
            _check_range(f"sampling.{name}", given, low, high)
            if given == 0 and name in _ABOVE_ZERO:
                raise InvalidRequest(f"sampling.{name}", f"must be above 0 and at most {high}")
    if sampling.HasField("max_tokens") and sampling.min_tokens > sampling.max_tokens:
        raise InvalidRequest("sampling.min_tokens", f"exceeds max_tokens, {sampling.max_tokens}")
    if limits is not None and sampling.min_tokens >= limits.max_model_len:
        raise InvalidRequest(
            "sampling.min_tokens",
            f"{sampling.min_tokens} exceeds the context of {limits.max_model_len} tokens",
        )
    for token_id, value in sampling.logit_bias.items():
        _check_range("sampling.logit_bias", value, -100, 100)
        if token_id < 0 or (limits is not None and token_id >= limits.vocab_size):
            end = "…" if limits is None else limits.vocab_size
            raise InvalidRequest(
                f"sampling.logit_bias[{token_id}]", f"lies outside the vocabulary [0, {end})"
            )
    for i, text in enumerate(sampling.stop):
        if not 1 <= len(text) <= MAX_STOP_CHARACTERS:
            raise InvalidRequest(
                f"sampling.stop[{i}]", f"must have 1 to {MAX_STOP_CHARACTERS} characters"
            )
    if limits is not None:
        _check_ids("sampling.stop_token_ids", sampling.stop_token_ids, limits.vocab_size)


def _check_ids(field: str, ids: Collection[int], vocab_size: int) -> None:
    if not ids or 0 <= min(ids) <= max(ids) < vocab_size:
        return
    for i, token_id in enumerate(ids):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"{field}[{i}]", f"{token_id} lies outside the vocabulary [0, {vocab_size})"
            )


def _check_range(field: str, value: float, low: float, high: float) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        limit = f"lie in [{low:g}, {high:g}]" if math.isfinite(high) else f"be at least {low:g}"
        raise InvalidRequest(field, f"must {limit}, got {value:.16g}")
