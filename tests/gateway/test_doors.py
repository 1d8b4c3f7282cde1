"""One validator and one stream behind both doors: the same request, over HTTP and over gRPC."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from fake_worker import FakeWorker
from scripted import STOP, end, entry, events, piece, start

from gateway import dispatch
from nightjar import validation
from nightjar.v1 import generation_pb2 as pb

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MESSAGES = [
    {"role": "developer", "content": "be brief"},
    {
        "role": "user",
        "content": [{"type": "text", "text": "what is"}, {"type": "text", "text": "2"}],
    },
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
        ],
    },
    {"role": "tool", "content": "2", "tool_call_id": "c1"},
]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "number"}}}
SAMPLING: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 4,
    "min_p": 0.1,
    "seed": 2**63 + 7,
    "min_tokens": 1,
    "stop": ["x", "y"],
    "stop_token_ids": [1, 2],
    "repetition_penalty": 1.1,
    "presence_penalty": -0.5,
    "frequency_penalty": 2.0,
    "n": 2,
    "ignore_eos": True,
}


def answer(_: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    """Two choices in turn; text that lags, whole characters, control characters, quotes."""
    return [
        start(),
        piece("", 1, logprobs=[entry(b"\xf0\x9f")]),
        piece(
            '😀 "a"\n\x00\u2028',
            2,
            3,
            logprobs=[entry(b"\x98\x80"), entry(b' "a"\n\x00\xe2\x80\xa8')],
        ),
        piece("other", 4, index=1, logprobs=[entry(b"other")], finish_reason=STOP),
        piece(" end", 5, logprobs=[entry(b" end")]),
        end(5),
    ]


def expected(chat: bool) -> pb.GenerateRequest:
    """The request of both doors."""
    request = pb.GenerateRequest(
        model="tiny",
        sampling=pb.SamplingParams(**SAMPLING, max_tokens=7, logit_bias={5: -1.5}, logprobs=2),
        speculation=pb.SpeculationParams(max_gamma=2),
        request_id="mine",
    )
    if not chat:
        request.text = "hello"
        return request
    request.chat.messages.add(role="system", content="be brief")
    request.chat.messages.add(role="user", content="what is\n2")
    made = request.chat.messages.add(role="assistant")
    made.tool_calls.add(id="c1", name="add", arguments_json='{"a": 1}')
    request.chat.messages.add(role="tool", content="2", tool_call_id="c1")
    parameters = '{"type": "object", "properties": {"a": {"type": "number"}}}'
    request.chat.tools.add(name="add", description="adds", parameters_json=parameters)
    return request


def body(chat: bool) -> dict[str, Any]:
    """The same for HTTP, with all that asks for nothing."""
    common = {"model": "tiny", **SAMPLING, "logit_bias": {"5": -1.5}, "nightjar": {"max_gamma": 2}}
    if not chat:
        return {**common, "prompt": "hello", "max_tokens": 7, "logprobs": 2, "best_of": 2}
    function = {"name": "add", "description": "adds", "parameters": PARAMETERS, "strict": None}
    return {
        **common,
        "messages": MESSAGES,
        "max_completion_tokens": 7,
        "logprobs": True,
        "top_logprobs": 2,
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
        "service_tier": "auto",
    }


@pytest.mark.parametrize("chat", [True, False])
async def test_both_doors_ask_the_same_and_say_the_same(
    worker: FakeWorker, served: Any, monkeypatch: pytest.MonkeyPatch, chat: bool
) -> None:
    """The validator and the worker get one message from both doors; both tell the same pieces."""
    worker.script = answer
    judged: list[bytes] = []

    def validate(request: pb.GenerateRequest, *limits: Any) -> None:
        judged.append(request.SerializeToString(deterministic=True))
        validation.validate(request, *limits)

    monkeypatch.setattr(dispatch, "validate", validate)
    messages = [message async for message in served.grpc.Generate(expected(chat))]
    headers = {"x-request-id": "mine"}
    response = await served.http.post(
        CHAT if chat else COMPLETION, json={**body(chat), "stream": True}, headers=headers
    )
    assert judged[0] == judged[1] == expected(chat).SerializeToString(deterministic=True)
    first, second = (r.SerializeToString(deterministic=True) for r in worker.requests)
    assert first == second
    assert response.headers["x-request-id"] == "mine"
    chunks = [chunk["choices"][0] for chunk in events(response.text) if chunk]
    told = [
        (c["index"], c["delta"]["content"] if chat else c["text"])
        for c in chunks
        if c["logprobs"] is not None
    ]
    pieces = [message for message in messages if message.token_ids]
    assert told == [(message.index, message.text) for message in pieces]
    told_bytes = [
        bytes(one["bytes"])
        for c in chunks
        if chat and c["logprobs"]
        for one in c["logprobs"]["content"]
    ]
    if chat:
        assert told_bytes == [e.chosen.token_bytes for m in messages for e in m.logprobs]
    ends = [(c["index"], c["finish_reason"]) for c in chunks if c["finish_reason"]]
    assert ends == [(1, "stop"), (0, "length")]


async def test_tools_that_must_not_be_used_are_not_shown(worker: FakeWorker, served: Any) -> None:
    """With tool_choice none, the model hears of no tools; an empty list is none as well."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    for fields in ({"tools": tools, "tool_choice": "none"}, {"tools": []}, {}):
        reply = await served.http.post(
            CHAT, json={"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, **fields}
        )
        assert reply.status_code == 200
    assert [len(request.chat.tools) for request in worker.requests] == [0, 0, 0]


async def test_a_deadline_is_one_at_both_doors(worker: FakeWorker, served: Any) -> None:
    """X-Request-Timeout reaches the worker as a gRPC deadline does, and ends an answer in words."""
    worker.pause_after = 2
    plain = {"prompt": "hello"}
    for stream in (False, True):
        response = await served.http.post(
            COMPLETION, json={**plain, "stream": stream}, headers={"x-request-timeout": "0.3"}
        )
        error = events(response.text)[-1] if stream else response.json()
        assert response.status_code == (200 if stream else 408)
        assert error["error"]["code"] == "deadline_exceeded"
        assert error["error"]["message"].startswith("the time that the client gave was over")
    call = served.grpc.Generate(pb.GenerateRequest(text="hello"), timeout=0.3)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        _ = [message async for message in call]
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert all(left is not None and left <= 0.31 for left in worker.remaining)
    for given in ("0", "-1", "nan", "inf", "soon", "1e9", "1_0", ""):
        response = await served.http.post(
            COMPLETION, json=plain, headers={"x-request-timeout": given}
        )
        assert (response.status_code, response.json()["error"]["param"]) == (
            400,
            "x-request-timeout",
        )
