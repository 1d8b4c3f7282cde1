"""Whatever JSON comes, it becomes a request that the validator accepts, or a refusal."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.http.errors import HttpError, render
from gateway.http.nothing import NEUTRAL
from gateway.http.schema import ChatBody, CompletionBody
from gateway.http.translate import parse
from nightjar.errors import InvalidRequest
from nightjar.v1 import generation_pb2 as pb
from nightjar.validation import Limits, validate

FIELDS = {*ChatBody.model_fields, *CompletionBody.model_fields}
NAMES = sorted({*FIELDS, *NEUTRAL["chat"], *NEUTRAL["completion"], "other"})
# Texts without lone surrogates: the JSON reader refuses those, which test_bad_input shows.
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
NUMBERS = st.integers() | st.floats() | st.sampled_from([2**31, 2**63, 2**64, -1, 0, 1])
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "max_gamma", "text", "1"]), inner)
    ),
    max_leaves=6,
)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "x"]), "content": TEXTS})
)
BODIES = st.dictionaries(st.sampled_from(NAMES), JSON, max_size=4)
LIMITS = Limits(model="tiny", vocab_size=300, max_model_len=256)


@pytest.mark.parametrize("route", ["chat", "completion"])
@given(BODIES, MESSAGES, TEXTS)
@settings(max_examples=150, deadline=None, derandomize=True)
@example({"temperature": math.nan, "logit_bias": {"1": math.inf}}, [], "a")
def test_any_body_is_a_request_or_a_refusal(
    route: Any, fields: dict[str, Any], messages: list[Any], prompt: str
) -> None:
    """No body raises anything but a refusal that names a field; the rest goes over the wire."""
    body = {"messages": messages} if route == "chat" else {"prompt": prompt}
    body.update({name: value for name, value in fields.items() if value is not None})
    try:
        for request in parse(route, body, "").requests:
            assert pb.GenerateRequest.FromString(request.SerializeToString()).ByteSize() > 0
            validate(request, LIMITS)
    except (InvalidRequest, HttpError) as error:
        status, content, _ = render(error)
        assert status in (400, 404)
        assert content["error"]["param"]
        assert content["error"]["message"]


def test_no_more_is_read_than_it_takes_to_refuse() -> None:
    """Of too many biases, messages, tools, calls and unknown names one too many is kept."""
    call = {"id": "", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    calling = {"role": "assistant", "tool_calls": [call] * 999}
    messages = [calling, *[{"role": "user", "content": ""}] * 9999]
    function = {"type": "function", "function": {"name": "f"}}
    biases = {str(i): 0 for i in range(999)}
    body = {"messages": messages, "tools": [function] * 999, "logit_bias": biases}
    (request,) = parse("chat", body, "").requests
    assert len(request.chat.messages) == 1025
    assert len(request.chat.messages[0].tool_calls) == 129
    assert len(request.chat.tools) == 129
    assert len(request.sampling.logit_bias) == 301
    with pytest.raises(HttpError, match="first: unknown field"):
        parse("completion", {"first": 1, **{str(i): 1 for i in range(999)}, "prompt": "a"}, "")
