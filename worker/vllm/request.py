"""A request of `vllm.grpc.engine` as one of ours; what has no place there is refused by name.

The one validator then judges the values; here stand only the meanings that differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf.message import Message

from nightjar import validation
from nightjar.errors import InvalidRequest, NotServed
from nightjar.v1 import generation_pb2 as pb

_TEXT_ALONE = "the model reads text alone"
_NO_TRANSFER = "no KV travels between these workers"
_FREE = "answers are not constrained to a grammar"
_NOT_SERVED = {
    "kv_transfer_params": _NO_TRANSFER,
    "kv_transfer_params_json": _NO_TRANSFER,
    "mm_inputs": _TEXT_ALONE,
    "extra_mm_inputs": _TEXT_ALONE,
    "media_refs": _TEXT_ALONE,
}
_SAMPLING_NOT_SERVED = {
    "json_schema": _FREE,
    "regex": _FREE,
    "grammar": _FREE,
    "structural_tag": _FREE,
    "json_object": _FREE,
    "choice": _FREE,
    "grammar_from_first_token": _FREE,
    "truncate_prompt_tokens": "prompts are never cut",
}
# An answer here holds ids and no text, so three fields change nothing: what stands between
# special tokens, whether the text would keep its stop string, and, without stop strings,
# whether special tokens would be written.
_ALWAYS = ("top_k", "min_p", "frequency_penalty", "presence_penalty", "min_tokens", "ignore_eos")
_WHERE_GIVEN = ("temperature", "max_tokens", "logprobs", "prompt_logprobs")
_ZERO_IS_UNSET = ("top_p", "repetition_penalty", "n")
_MAX_INT32 = 2**31 - 1


def translated(request: Any) -> pb.GenerateRequest:
    """The same request, a `vllm.grpc.engine.GenerateRequest`, in our terms, not yet validated.

    Raises:
        InvalidRequest: A value has no place in ours, or the field belongs to another version.
        NotServed: The field asks for what Nightjar does not do.
    """
    validation.check_known(request)
    _refuse(request, _NOT_SERVED, "")
    if request.data_parallel_rank != 0:
        raise InvalidRequest("data_parallel_rank", "there is one rank, 0")
    ours = pb.GenerateRequest(request_id=request.request_id)
    match request.WhichOneof("input"):
        case "text":
            ours.text = request.text
        case "tokenized":
            ids = request.tokenized.input_ids
            ours.tokens.token_ids.extend(_int32("tokenized.input_ids", ids))
        case _:
            raise InvalidRequest("input", "one of text or tokenized is required")
    _sampling(request.sampling_params, ours.sampling)
    return ours


def _sampling(given: Any, ours: pb.SamplingParams) -> None:
    _refuse(given, _SAMPLING_NOT_SERVED, "sampling_params.")
    if given.stop and not given.skip_special_tokens:
        raise NotServed(
            "sampling_params.skip_special_tokens",
            "must be true where `stop` is given: stop strings are looked for in the text "
            "without special tokens",
        )
    names = [*_ALWAYS, *(name for name in _WHERE_GIVEN if given.HasField(name))]
    names += [name for name in _ZERO_IS_UNSET if getattr(given, name) != 0]
    for name in names:
        value = getattr(given, name)
        if isinstance(value, int):
            (value,) = _int32(f"sampling_params.{name}", (value,))
        setattr(ours, name, value)
    if given.HasField("seed"):
        ours.seed = given.seed % 2**64  # a negative one by its 64 bits
    ours.stop.extend(given.stop)
    ours.stop_token_ids.extend(_int32("sampling_params.stop_token_ids", given.stop_token_ids))
    for token_id, bias in given.logit_bias.items():
        ours.logit_bias[token_id] = bias


def _refuse(message: Message, reasons: Mapping[str, str], path: str) -> None:
    for field, _ in message.ListFields():
        if field.name in reasons:
            raise NotServed(f"{path}{field.name}", reasons[field.name])


def _int32(field: str, values: Any) -> Any:
    """The values, which are unsigned there and signed in ours."""
    if max(values, default=0) > _MAX_INT32:
        raise InvalidRequest(field, f"must be at most {_MAX_INT32}, got {max(values)}")
    return values
