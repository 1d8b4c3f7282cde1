"""The one validator: hostile and odd requests are refused by name, quickly, in little memory."""

from __future__ import annotations

import json
import math
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from nightjar import validation
from nightjar.errors import InvalidRequest
from nightjar.v1 import generation_pb2 as pb
from nightjar.validation import Limits, check_length, validate

VOCABULARY, CONTEXT = 320, 512
LIMITS = Limits(model="tiny", vocab_size=VOCABULARY, max_model_len=CONTEXT)
PARTS = json.dumps({"a": [[]] * 4094 + [""] * 10_000})  # as many parts as there may be
NESTED = '{"a":' * 65 + "1" + "}" * 65


def request(**fields: Any) -> pb.GenerateRequest:
    """A text request with sampling parameters."""
    return pb.GenerateRequest(text="abc", sampling=pb.SamplingParams(**fields))


def chat(*messages: pb.ChatMessage, tools: list[pb.Tool] | None = None) -> pb.GenerateRequest:
    """A chat, of one user's message unless others are given."""
    turns = messages or (pb.ChatMessage(role="user", content="hi"),)
    return pb.GenerateRequest(chat=pb.ChatPrompt(messages=turns, tools=tools or []))


def tool(**fields: Any) -> pb.GenerateRequest:
    """A chat with one tool."""
    return chat(tools=[pb.Tool(**{"name": "f", **fields})])


def called(**fields: Any) -> pb.GenerateRequest:
    """A chat with one call of a tool."""
    call = pb.ToolCall(**{"name": "f", "arguments_json": "{}", **fields})
    return chat(pb.ChatMessage(role="assistant", tool_calls=[call]))


def continued(**fields: Any) -> pb.GenerateRequest:
    """A request that goes on with an answer."""
    sampling = fields.pop("sampling", {"max_tokens": 8})
    given = pb.Continuation(**{"attempt": 1, "token_ids": [5], **fields})
    return pb.GenerateRequest(
        text="abc", sampling=pb.SamplingParams(**sampling), continuation=given
    )


REFUSED: dict[str, tuple[pb.GenerateRequest, str, str]] = {
    "no prompt": (pb.GenerateRequest(), "prompt", "is required"),
    "empty text": (pb.GenerateRequest(text=""), "text", "empty"),
    "no tokens": (pb.GenerateRequest(tokens=pb.TokenPrompt()), "tokens.token_ids", "empty"),
    "no messages": (pb.GenerateRequest(chat=pb.ChatPrompt()), "chat.messages", "1 to 1024"),
    "min_tokens alone": (request(min_tokens=10**8), "sampling.min_tokens", "context of 512"),
    "min_tokens": (request(min_tokens=9, max_tokens=8), "sampling.min_tokens", "max_tokens, 8"),
    "stop id": (
        request(stop_token_ids=[1, VOCABULARY + 5], min_tokens=1),
        "sampling.stop_token_ids[1]",
        "[0, 320)",
    ),
    "negative stop id": (request(stop_token_ids=[-1]), "sampling.stop_token_ids[0]", "[0, 320)"),
    "bias id": (
        request(logit_bias={99_999_999: 5}),
        "sampling.logit_bias[99999999]",
        "[0, 320)",
    ),
    "negative bias id": (request(logit_bias={-1: 5}), "sampling.logit_bias[-1]", "[0, 320)"),
    "bias": (request(logit_bias={1: 100.5}), "sampling.logit_bias", "[-100, 100]"),
    "bias nan": (request(logit_bias={1: math.nan}), "sampling.logit_bias", "[-100, 100]"),
    "biases": (
        request(logit_bias=dict.fromkeys(range(301), 1.0)),
        "sampling.logit_bias",
        "at most 300",
    ),
    "top_k": (request(top_k=-2), "sampling.top_k", "at least -1"),
    "n": (request(n=10**9), "sampling.n", "[1, 128]"),
    "n 0": (request(n=0), "sampling.n", "[1, 128]"),
    "logprobs": (request(logprobs=10**6), "sampling.logprobs", "[0, 20]"),
    "prompt_logprobs": (request(prompt_logprobs=21), "sampling.prompt_logprobs", "[0, 20]"),
    "repetition": (request(repetition_penalty=0), "sampling.repetition_penalty", "above 0"),
    "frequency": (request(frequency_penalty=-2.1), "sampling.frequency_penalty", "[-2, 2]"),
    "role": (chat(pb.ChatMessage(role="root")), "chat.messages[0].role", "must be one of"),
    "129 tools": (
        chat(tools=[pb.Tool(name=f"f{i}") for i in range(129)]),
        "chat.tools",
        "at most 128",
    ),
    "tool twice": (
        chat(tools=[pb.Tool(name="f"), pb.Tool(name="f")]),
        "chat.tools[1].name",
        "twice",
    ),
    "no name": (tool(name=""), "chat.tools[0].name", "1 to 64"),
    "long name": (tool(name="f" * 65), "chat.tools[0].name", "1 to 64"),
    "odd name": (tool(name="f\n"), "chat.tools[0].name", "letters"),
    "description": (tool(description="d" * 16_385), "chat.tools[0].description", "at most 16384"),
    "parameters": (tool(parameters_json="{"), "chat.tools[0].parameters_json", "valid JSON"),
    "a list": (tool(parameters_json="[]"), "chat.tools[0].parameters_json", "a JSON object"),
    "nan": (tool(parameters_json='{"a": NaN}'), "chat.tools[0].parameters_json", "valid JSON"),
    "deep": (tool(parameters_json=NESTED), "chat.tools[0].parameters_json", "64 levels"),
    "very deep": (tool(parameters_json="[" * 4000), "chat.tools[0].parameters_json", "valid JSON"),
    "brackets": (
        tool(parameters_json="[" * 60_000),
        "chat.tools[0].parameters_json",
        "at most 4096 opening brackets",
    ),
    "long": (
        tool(parameters_json=json.dumps({"a": "b" * 65_536})),
        "chat.tools[0].parameters_json",
        "at most 65536",
    ),
    "all JSON": (
        chat(
            tools=[
                pb.Tool(name=f"f{i}", parameters_json=json.dumps({"a": "b" * 65_000}))
                for i in range(9)
            ]
        ),
        "chat",
        "at most 524288",
    ),
    "no arguments": (
        called(arguments_json=""),
        "chat.messages[0].tool_calls[0].arguments_json",
        "valid JSON",
    ),
    "call's name": (called(name="a b"), "chat.messages[0].tool_calls[0].name", "letters"),
    "call's id": (called(id="i" * 129), "chat.messages[0].tool_calls[0].id", "at most 128"),
    "a user's calls": (
        chat(pb.ChatMessage(role="user", tool_calls=[pb.ToolCall(name="f")])),
        "chat.messages[0].tool_calls",
        "assistant",
    ),
    "a user's answer": (
        chat(pb.ChatMessage(role="user", tool_call_id="1")),
        "chat.messages[0].tool_call_id",
        "only a tool's",
    ),
    "attempt 0": (continued(attempt=0), "continuation.attempt", "[1, 16]"),
    "attempt 17": (continued(attempt=17), "continuation.attempt", "[1, 16]"),
    "prior id": (continued(token_ids=[1, 320]), "continuation.token_ids[1]", "[0, 320)"),
    "prior all": (continued(token_ids=[1] * 8), "continuation.token_ids", "8 tokens; at most 8"),
    "prior context": (
        continued(token_ids=[1] * CONTEXT, sampling={}),
        "continuation.token_ids",
        "the context of 512",
    ),
    "delivered": (
        continued(num_text_bytes_delivered=-1),
        "continuation.num_text_bytes_delivered",
        "at least 0",
    ),
    "fingerprint": (
        continued(arithmetic_fingerprint="f" * 129),
        "continuation.arithmetic_fingerprint",
        "at most 128",
    ),
    "two continued": (continued(sampling={"n": 2}), "sampling.n", "must be 1"),
}
ACCEPTED: dict[str, pb.GenerateRequest] = {
    "top_k 0": request(top_k=0),
    "top_k -1": request(top_k=-1),
    "top_k 1": request(top_k=1),
    "smallest temperature": request(temperature=5e-324),
    "64 levels": tool(parameters_json=NESTED[5:-1]),
    "tool": tool(parameters_json='{"type": "object", "properties": {"a": {"type": "string"}}}'),
    "bare tool": tool(),
    "call": called(id="call-1", arguments_json='{"a": [1, 2.5, null]}'),
    "answer": chat(pb.ChatMessage(role="tool", content="4", tool_call_id="call-1")),
    "odd request id": pb.GenerateRequest(text="a", request_id="a\0/b\n\u202e"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_field_and_limit(name: str) -> None:
    """The error names the field, and its sentence the limit."""
    bad, field, limit = REFUSED[name]
    with pytest.raises(InvalidRequest) as caught:
        validate(bad, LIMITS)
    assert caught.value.field == field
    assert limit in caught.value.message


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(name: str) -> None:
    """What is odd but has a meaning is let pass, limits known or not."""
    validate(ACCEPTED[name], LIMITS)
    validate(ACCEPTED[name])


HUGE: dict[str, Callable[[], pb.GenerateRequest]] = {
    "messages": lambda: chat(*[pb.ChatMessage()] * 900_000),
    "tools": lambda: chat(tools=[pb.Tool()] * 900_000),
    "JSON": lambda: chat(
        tools=[pb.Tool(name=f"f{i}", parameters_json=PARTS) for i in range(8)]
        + [pb.Tool(name="deep", parameters_json=NESTED)]
    ),
    "calls": lambda: chat(pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall()] * 900_000)),
    "tokens": lambda: pb.GenerateRequest(tokens=pb.TokenPrompt(token_ids=[7] * 3_000_000)),
    "bad tokens": lambda: pb.GenerateRequest(tokens=pb.TokenPrompt(token_ids=[-1] * 300_000)),
    "prior": lambda: continued(token_ids=[7] * 3_000_000, sampling={}),
    "stops": lambda: request(stop=["x"] * 900_000),
    "stop ids": lambda: request(stop_token_ids=[7] * 3_000_000),
    "biases": lambda: request(logit_bias=dict.fromkeys(range(200_000), 1.0)),
    "text": lambda: pb.GenerateRequest(text="x" * 4_000_000),
    "name": lambda: pb.GenerateRequest(text="a", model="m" * 3_000_000),
    "id": lambda: pb.GenerateRequest(text="a", request_id="i" * 3_000_000),
}


@pytest.mark.parametrize("name", HUGE)
def test_huge_requests_are_refused_before_they_are_read(name: str) -> None:
    """Millions of elements cost no time of their own, and next to no memory."""
    huge = HUGE[name]()
    with pytest.raises(InvalidRequest):
        validate(huge, LIMITS)  # protobuf makes its containers once
    took = []
    for _ in range(3):  # what it costs is the least: processors in use by others take longer
        begin = time.process_time()
        with pytest.raises(InvalidRequest) as caught:
            validate(huge, LIMITS)
        took.append(time.process_time() - begin)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest):
            validate(huge, LIMITS)
        assert tracemalloc.get_traced_memory()[1] < 16_000_000
    finally:
        tracemalloc.stop()
    assert min(took) < 0.1  # of the slowest: half as long as this by itself
    assert len(str(caught.value)) < 400


def test_a_continuation_may_be_added_to_the_largest_request() -> None:
    """A request within the bound stays within it when a gateway resumes it."""
    whole = pb.GenerateRequest(text="x" * (validation.MAX_REQUEST_BYTES - 100))
    validate(whole)
    whole.continuation.token_ids.extend(range(60_000))
    whole.continuation.attempt = 1
    validate(whole)
    assert whole.ByteSize() < 4 * 1024 * 1024


def test_the_length_of_prompt_and_answer() -> None:
    """The prompt's tokens decide what the answer may have, whatever else was left open."""
    assert check_length(12, LIMITS) == 500
    assert check_length(12, LIMITS, max_tokens=500, min_tokens=500, num_prior_tokens=499) == 500
    for field, fields in (
        ("prompt", {"num_prompt_tokens": 0}),
        ("prompt", {"num_prompt_tokens": 512}),
        ("sampling.max_tokens", {"max_tokens": 501}),
        ("sampling.min_tokens", {"min_tokens": 501}),
        ("continuation.token_ids", {"num_prior_tokens": 500}),
        ("continuation.token_ids", {"max_tokens": 3, "num_prior_tokens": 3}),
    ):
        with pytest.raises(InvalidRequest) as caught:
            check_length(**{"num_prompt_tokens": 12, "limits": LIMITS, **fields})
        assert caught.value.field == field
    wide = Limits(model="m", vocab_size=9, max_model_len=10**6)
    assert check_length(49_932, wide, num_prompt_logprobs=20) > 0
    with pytest.raises(InvalidRequest, match=r"sampling\.prompt_logprobs"):
        check_length(49_933, wide, num_prompt_logprobs=20)
