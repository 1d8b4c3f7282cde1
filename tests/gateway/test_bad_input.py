"""Hostile and odd input: refused with the same sentence by both protocols, others unharmed."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest
from conditions import until
from fake_worker import CONTEXT, VOCABULARY, FakeWorker, words
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from nightjar.v1 import generation_pb2 as pb

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def served(shared: Any) -> Any:
    """The module's gateway."""
    return shared[0]


@pytest.fixture
def worker(shared: Any) -> Iterator[FakeWorker]:
    """The module's worker, without a history; tests that pause it let it go again."""
    worker = shared[1]
    worker.requests.clear()
    yield worker
    worker.pause_after = -1
    worker.resume.clear()


CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
HELLO: dict[str, Any] = {"prompt": "hello"}


def request(**fields: Any) -> pb.GenerateRequest:
    """A request with the prompt `hello`, unless a prompt is given."""
    prompts = {"text", "chat", "tokens"} & set(fields)
    sampling = pb.SamplingParams(**fields.pop("sampling", {"max_tokens": 4}))
    return pb.GenerateRequest(sampling=sampling, **({} if prompts else {"text": "hello"}), **fields)


def sampling(**fields: Any) -> tuple[dict[str, Any], pb.GenerateRequest]:
    """The same sampling parameters for both protocols."""
    return {**HELLO, **fields}, request(sampling=fields)


LONG_STOP = ["x"] * 17
SAME: dict[str, tuple[dict[str, Any], pb.GenerateRequest, str, str]] = {
    name: (*bodies, field, words_)
    for name, bodies, field, words_ in [
        ("empty prompt", ({"prompt": ""}, request(text="")), "prompt", "must not be empty"),
        ("empty list", ({"prompt": [""]}, request(text="")), "prompt", "must not be empty"),
        ("no ids", ({"prompt": []}, request(tokens={})), "prompt", "must not be empty"),
        ("no ids in a list", ({"prompt": [[]]}, request(tokens={})), "prompt", "must not be empty"),
        (
            "prompt beyond the context",
            ({"prompt": "a" * CONTEXT}, request(text="a" * CONTEXT)),
            "prompt",
            f"the context is {CONTEXT} tokens",
        ),
        ("answer beyond the context", sampling(max_tokens=CONTEXT), "max_tokens", f"{CONTEXT}"),
        (
            "id too large",
            ({"prompt": [1, VOCABULARY]}, request(tokens={"token_ids": [1, VOCABULARY]})),
            "prompt[1]",
            f"[0, {VOCABULARY})",
        ),
        (
            "negative id",
            ({"prompt": [-1]}, request(tokens={"token_ids": [-1]})),
            "prompt[0]",
            f"[0, {VOCABULARY})",
        ),
        ("temperature nan", sampling(temperature=math.nan), "temperature", "[0, 100]"),
        ("temperature inf", sampling(temperature=math.inf), "temperature", "[0, 100]"),
        ("temperature < 0", sampling(temperature=-0.1), "temperature", "[0, 100]"),
        ("temperature > 100", sampling(temperature=101.0), "temperature", "[0, 100]"),
        ("top_p 0", sampling(top_p=0.0), "top_p", "above 0 and at most 1"),
        ("top_p > 1", sampling(top_p=1.5), "top_p", "[0, 1]"),
        ("min_p nan", sampling(min_p=math.nan), "min_p", "[0, 1]"),
        ("n too many", sampling(n=10**9), "n", "[1, 128]"),
        ("min_tokens", sampling(min_tokens=10**8, max_tokens=4), "min_tokens", "max_tokens, 4"),
        ("logprobs", sampling(logprobs=10**6), "logprobs", "[0, 20]"),
        ("penalty", sampling(presence_penalty=2.5), "presence_penalty", "[-2, 2]"),
        ("top_k -2", sampling(top_k=-2), "top_k", "at least -1"),
        ("max_tokens 0", sampling(max_tokens=0), "max_tokens", "at least 1"),
        ("max_tokens -1", sampling(max_tokens=-1), "max_tokens", "at least 1"),
        ("17 stops", sampling(stop=LONG_STOP), "stop", "at most 16"),
        ("long stop", sampling(stop=["x" * 257]), "stop[0]", "1 to 256"),
        ("empty stop", sampling(stop=[""]), "stop[0]", "1 to 256"),
        ("65 stop ids", sampling(stop_token_ids=[1] * 65), "stop_token_ids", "at most 64"),
        (
            "stop id too large",
            sampling(stop_token_ids=[VOCABULARY + 5]),
            "stop_token_ids[0]",
            f"[0, {VOCABULARY})",
        ),
        (
            "unknown model",
            ({**HELLO, "model": "other"}, request(model="other")),
            "model",
            "unknown model 'other'; this server has 'tiny'",
        ),
        ("penalty 0", sampling(repetition_penalty=0.0), "repetition_penalty", "above 0"),
        ("penalty nan", sampling(frequency_penalty=math.nan), "frequency_penalty", "[-2, 2]"),
        ("bias", sampling(logit_bias={5: 101.0}), "logit_bias", "[-100, 100]"),
        ("bias nan", sampling(logit_bias={5: math.nan}), "logit_bias", "[-100, 100]"),
        ("bias id", sampling(logit_bias={99_999_999: 5.0}), "logit_bias", f"[0, {VOCABULARY})"),
        ("301 biases", sampling(logit_bias=dict.fromkeys(range(301), 0.0)), "logit_bias", "300"),
        ("n 0", sampling(n=0), "n", "[1, 128]"),
        ("min_tokens -1", sampling(min_tokens=-1), "min_tokens", "at least 0"),
        (
            "gamma too large",
            ({**HELLO, "nightjar": {"max_gamma": 9}}, request(speculation={"max_gamma": 9})),
            "nightjar.max_gamma",
            "[0, 8]",
        ),
    ]
}


async def outcome(call: Any) -> grpc.aio.AioRpcError:
    """The error that ends a call."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return caught.value


async def post(served: Any, route: str, body: Any, **more: Any) -> httpx.Response:
    """Send a body as JSON, NaN and lone surrogates included."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json", **more}
    return await served.http.post(route, content=content, headers=headers)


@pytest.mark.parametrize("name", SAME)
async def test_both_protocols_say_the_same(served: Any, name: str) -> None:
    """What can never work is 400 and INVALID_ARGUMENT, with one sentence naming field and limit."""
    body, message, field, limit = SAME[name]
    response = await post(served, COMPLETION, body)
    error = await outcome(served.grpc.Generate(message))
    status, code = (404, "model_not_found") if field == "model" else (400, "invalid_value")
    assert response.status_code == status
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    said = response.json()["error"]
    assert said["message"] == error.details()
    assert limit in said["message"]
    assert said["param"].partition("[")[0] == field.partition("[")[0]
    assert (said["type"], said["code"]) == ("invalid_request_error", code)
    status = rpc_status.from_call(error)
    violation = error_details_pb2.BadRequest()
    assert status.details[0].Unpack(violation)
    assert violation.field_violations[0].field in said["message"]


HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


def tool(**function: Any) -> list[Any]:
    """One tool."""
    return [{"type": "function", "function": {"name": "f", **function}}]


def calling(arguments: str) -> dict[str, Any]:
    """An assistant's message that makes a call."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]}


TOOLS = tool()
HTTP_ONLY: list[tuple[str, Any, str, str]] = [
    (COMPLETION, {**HELLO, "foo": 1}, "foo", "unknown field"),
    (COMPLETION, {**HELLO, "foo": None}, "foo", "unknown field"),
    (COMPLETION, {**HELLO, "echo": 0}, "echo", "must be true or false"),
    (CHAT, {**HI, "echo": 0}, "echo", "only false is accepted"),
    (COMPLETION, {**HELLO, "logit_bias": {"5": 10**400}}, "logit_bias", "[-100, 100]"),
    (CHAT, {"messages": [{"role": "user", "content": "a", "x": 1}]}, "messages[0].x", "unknown"),
    (COMPLETION, {**HELLO, "nightjar": {"gamma": 1}}, "nightjar.gamma", "unknown field"),
    (COMPLETION, {}, "prompt", "is required"),
    (CHAT, {}, "messages", "is required"),
    (CHAT, {"messages": []}, "messages", "1 to 1024"),
    (CHAT, {"messages": "hello"}, "messages", "must be a list"),
    (CHAT, {"messages": [{"role": "bot", "content": "a"}]}, "messages[0].role", "must be one of"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content", "is required"),
    (CHAT, {"messages": [{"role": "user", "content": 1}]}, "messages[0].content", "a string"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content",
        "text",
    ),
    (CHAT, {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}, "top_logprobs", ""),
    (COMPLETION, {"prompt": ["a"] * 200_000}, "prompt", "200000 prompts"),
    (COMPLETION, {"prompt": [[1]] * 65}, "prompt", "65 prompts"),
    (COMPLETION, {"prompt": ["a", [1]]}, "prompt", "a list of either"),
    (COMPLETION, {"prompt": [[1], [True]]}, "prompt", "token ids"),
    (COMPLETION, {"prompt": ["a", "b"], "n": 10**9}, "n", "over 128 choices"),
    (COMPLETION, {"prompt": [True]}, "prompt", "token ids"),
    (COMPLETION, {"prompt": [1.5]}, "prompt", "token ids"),
    (COMPLETION, {"prompt": [2**40]}, "prompt", "vocabulary"),
    (COMPLETION, {"prompt": {"a": 1}}, "prompt", "must be a string"),
    (COMPLETION, {**HELLO, "temperature": "1"}, "temperature", "must be a number"),
    (COMPLETION, {**HELLO, "temperature": True}, "temperature", "must be a number"),
    (COMPLETION, {**HELLO, "top_k": 0.5}, "top_k", "whole number"),
    (COMPLETION, {**HELLO, "stream": 1}, "stream", "true or false"),
    (COMPLETION, {**HELLO, "stop": 5}, "stop", "string"),
    (COMPLETION, {**HELLO, "seed": -1}, "seed", "at least 0"),
    (COMPLETION, {**HELLO, "seed": 2**64}, "seed", "below 18446744073709551616"),
    (COMPLETION, {**HELLO, "n": 10**12}, "n", "below 2147483648"),
    (COMPLETION, {**HELLO, "logit_bias": {"x": 1}}, "logit_bias", "token ids"),
    (COMPLETION, {**HELLO, "logit_bias": {"5": 1, "05": 2}}, "logit_bias", "token 5 twice"),
    (
        COMPLETION,
        {**HELLO, "echo": True, "max_tokens": 0, "min_tokens": 1},
        "min_tokens",
        "max_tokens, 0",
    ),
    (COMPLETION, {**HELLO, "best_of": 3}, "best_of", "only 1 is accepted"),
    (COMPLETION, {**HELLO, "best_of": 3, "n": 2}, "best_of", "only 2 is accepted"),
    (COMPLETION, {**HELLO, "best_of": 10**9}, "best_of", "only 1 is accepted"),
    (CHAT, {**HI, "response_format": {"type": "json_object"}}, "response_format", "forced"),
    (CHAT, {**HI, "metadata": {"a": "b"}}, "metadata", "not stored"),
    (CHAT, {**HI, "prediction": {"type": "content", "content": "a"}}, "prediction", "only null"),
    (CHAT, {**HI, "modalities": ["text", "audio"]}, "modalities", "only"),
    (CHAT, {**HI, "service_tier": "flex"}, "service_tier", 'only "auto" or "default"'),
    (CHAT, {**HI, "tools": TOOLS, "tool_choice": "required"}, "tool_choice", "cannot be forced"),
    (CHAT, {**HI, "tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice", "forced"),
    (CHAT, {**HI, "tools": TOOLS, "parallel_tool_calls": False}, "parallel_tool_calls", "limited"),
    (CHAT, {**HI, "tools": TOOLS * 2}, "tools[1].function.name", "twice"),
    (CHAT, {**HI, "tools": TOOLS * 129}, "tools", "at most 128"),
    (CHAT, {**HI, "tools": [{"type": "function"}]}, "tools[0].function", "is required"),
    (CHAT, {**HI, "tools": [{"type": "x", "function": {}}]}, "tools[0].type", "'function'"),
    (CHAT, {**HI, "tools": tool(name="a b")}, "tools[0].function.name", "letters"),
    (CHAT, {**HI, "tools": tool(strict=True)}, "tools[0].function.strict", "must be False"),
    (CHAT, {**HI, "tools": tool(parameters={"a": math.nan})}, "tools", "no JSON"),
    (CHAT, {"messages": [{"role": "assistant"}]}, "messages[0].content", "is required"),
    (CHAT, {"messages": [calling("{")]}, "messages[0].tool_calls[0].function.arguments", "JSON"),
    (CHAT, {"messages": [{"role": "user", "content": "a", "name": "b"}]}, "messages[0].name", ""),
    (CHAT, {**HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "[0, 20]"),
    (CHAT, {**HI, "max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
    (CHAT, {**HI, "max_completion_tokens": 2, "max_tokens": 3}, "max_tokens", "differs"),
    (COMPLETION, {**HELLO, "logprobs": True}, "logprobs", "whole number"),
    (COMPLETION, {**HELLO, "stream_options": {"include_usage": True}}, "stream_options", "stream"),
    (COMPLETION, b'{"prompt": "\\ud83d"}', "body", "not valid JSON"),
    (COMPLETION, b'{"prompt": "\xff"}', "body", "not valid JSON"),
    (COMPLETION, b'{"prompt": "a"', "body", "not valid JSON"),
    (COMPLETION, b'{"prompt": "a"} x', "body", "not valid JSON"),
    (COMPLETION, b"[" * 100_000, "body", "not valid JSON"),
    (COMPLETION, b'{"seed": ' + b"1" * 10_000 + b"}", "body", "not valid JSON"),
    (COMPLETION, b"", "body", "not valid JSON"),
    (COMPLETION, b"[]", "body", "must be a JSON object"),
    (COMPLETION, json.dumps({**HELLO, "x" * 100_000: 1}).encode(), "x" * 100, "unknown field"),
]


@pytest.mark.parametrize("case", range(len(HTTP_ONLY)))
async def test_shapes_and_types(served: Any, worker: FakeWorker, case: int) -> None:
    """Unknown fields, wrong types and malformed JSON are 400 before a worker hears of them."""
    route, body, field, limit = HTTP_ONLY[case]
    response = await post(served, route, body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == field
    assert limit in error["message"]
    assert len(error["message"]) < 400
    assert worker.requests == []


async def test_a_null_limit_skips_no_check(served: Any) -> None:
    """More tokens at least than the context holds are refused where no most is given; all lives."""
    body = {**HI, "max_tokens": None, "min_tokens": 10**8}
    messages = [{"role": "user", "content": "hi"}]
    message = request(chat={"messages": messages}, sampling={"min_tokens": 10**8})
    response = await post(served, CHAT, body)
    error = await outcome(served.grpc.Generate(message))
    assert (response.status_code, error.code()) == (400, grpc.StatusCode.INVALID_ARGUMENT)
    assert response.json()["error"]["message"] == error.details()
    assert response.json()["error"]["param"] == "min_tokens"
    assert (await post(served, COMPLETION, HELLO)).status_code == 200


async def test_long_values_are_not_echoed(served: Any) -> None:
    """A megabyte of a name comes back as a short sentence, from both protocols."""
    name = "m" * 1_000_000
    response = await post(served, COMPLETION, {**HELLO, "model": name})
    error = await outcome(served.grpc.Generate(request(model=name)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert response.json()["error"]["message"] == error.details()
    assert len(error.details() or "") < 400


async def test_bytes_that_are_no_message(served: Any, worker: FakeWorker) -> None:
    """On gRPC, malformed bytes, text that is not UTF-8 and unknown fields are INVALID_ARGUMENT."""
    raw = served.channel.unary_stream("/nightjar.v1.GenerationService/Generate")
    unknown = bytes([0xB8, 0x06, 1])  # field 103
    for content, sentence in [
        (b"\xff\xff\xff", "request: not a valid message"),
        (b"\x12\x02\xed\xa0", "request: not a valid message"),
        (unknown, "103: unknown field"),
        (b"\x2a\x03" + unknown, "sampling.103: unknown field"),
    ]:
        error = await outcome(raw(content))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert sentence in (error.details() or "")
    assert worker.requests == []


async def test_oversized_bodies_and_messages(served: Any) -> None:
    """A body or message over the limit is refused by name of the limit; the connection lives."""
    limit = 4 * 1024 * 1024
    for content in (b"x" * (limit + 1), b"x" * (2 * limit)):
        response = await post(served, COMPLETION, content)
        assert response.status_code == 413
        assert str(limit) in response.json()["error"]["message"]
    error = await outcome(served.grpc.Generate(request(text="x" * (limit + 1))))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(limit) in (error.details() or "")
    answers = [message async for message in served.grpc.Generate(request())]
    assert "".join(message.text for message in answers) == words(4)


async def test_limit_holds_without_a_declared_length(served: Any) -> None:
    """A chunked body is measured as it comes."""

    async def chunks() -> Any:
        for _ in range(5):
            yield b" " * 1024 * 1024

    headers = {"content-type": "application/json"}
    response = await served.http.post(COMPLETION, content=chunks(), headers=headers)
    assert response.status_code == 413


async def test_request_ids_and_headers(served: Any, worker: FakeWorker) -> None:
    """A long request id is 400, a header beyond all bounds too; control characters do no harm."""
    response = await post(served, COMPLETION, HELLO, **{"x-request-id": "i" * 129})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "request_id: at most 128 characters"
    assert len(response.headers["x-request-id"]) < 64
    response = await post(served, COMPLETION, HELLO, **{"x-request-id": "i" * 1_000_000})
    assert response.status_code == 400
    assert "65536 bytes" in response.json()["error"]["message"]
    assert worker.requests == []
    response = await post(served, COMPLETION, HELLO, **{"x-request-id": b"a\x01\xff"})
    assert response.status_code == 200
    assert response.headers["x-request-id"].startswith("req_")
    message = request(request_id="a\0b/\nc")
    assert [part async for part in served.grpc.Generate(message)]


async def test_free_text_is_for_logs_alone(
    served: Any, worker: FakeWorker, capsys: pytest.CaptureFixture[str]
) -> None:
    """A name of a user with any characters, or a megabyte of it, is cut, escaped, and harmless."""
    for name, field, route, body in [
        ("a\0b/\nc\x1b[31m", "user", COMPLETION, HELLO),
        ("u" * 1_000_000, "user", COMPLETION, HELLO),
        ("x\r\nanswered", "safety_identifier", CHAT, {**HI, "max_tokens": 2}),
    ]:
        response = await post(served, route, {**body, field: name})
        assert response.status_code == 200
        assert name not in worker.requests[-1].SerializeToString().decode("latin-1")
    lines: list[str] = []

    def three() -> bool:
        out = capsys.readouterr().out.splitlines()
        lines.extend(line for line in out if "answered   " in line)
        return len(lines) >= 3

    await until(three, "three answers are logged")
    assert all(len(line) < 1000 and "\0" not in line for line in lines)


async def test_content_type_must_be_json(served: Any) -> None:
    """A page in a browser cannot post a form here without asking first."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        response = await post(served, COMPLETION, HELLO, **{"content-type": kind})
        assert response.status_code == 415
    response = await post(served, COMPLETION, HELLO, **{"content-encoding": "gzip"})
    assert response.status_code == 415


CALL = {"id": "", "type": "function", "function": {"name": "f", "arguments": "{}"}}
HUGE: list[tuple[str, dict[str, Any]]] = [
    (COMPLETION, {"prompt": ["a"] * 400_000}),
    (COMPLETION, {"prompt": [1] * 500_000}),
    (COMPLETION, {"prompt": [[1]] * 100_000}),
    (COMPLETION, {**HELLO, "stop": ["x"] * 400_000}),
    (COMPLETION, {**HELLO, "stop_token_ids": [1] * 500_000}),
    (COMPLETION, {**HELLO, "logit_bias": {str(i): 0 for i in range(250_000)}}),
    (COMPLETION, {**HELLO, "n": 10**9, "best_of": 10**9}),
    (COMPLETION, {**HELLO, "prompt": ["a"] * 64, "n": 10**9}),
    (COMPLETION, {**HELLO, **{str(i): 0 for i in range(250_000)}}),
    (CHAT, {"messages": [{}] * 400_000}),
    (CHAT, {"messages": [{"role": "user", "content": ""}] * 100_000}),
    (CHAT, {**HI, "tools": TOOLS * 60_000}),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [CALL] * 45_000}]}),
]


async def test_refusals_are_fast_and_leave_others_alone(served: Any, worker: FakeWorker) -> None:
    """While an answer streams, every bad request is refused, and the answer comes out whole."""
    worker.pause_after = 2
    call = aiter(served.grpc.Generate(request(sampling={"max_tokens": 20})))
    first = await anext(call)
    assert first.HasField("start")
    slowest = 0.0
    for route, body in [*((COMPLETION, same[0]) for same in SAME.values()), *HUGE]:
        content = json.dumps(body).encode()
        started = time.process_time()  # of client and gateway; others may use the machine
        assert (await post(served, route, content)).status_code in (400, 404)
        slowest = max(slowest, time.process_time() - started)
    for _, message, _, _ in SAME.values():
        await outcome(served.grpc.Generate(message))
    worker.resume.set()
    messages = [first, *[message async for message in call]]
    assert "".join(message.text for message in messages) == words(20)
    assert slowest < 0.5


async def test_same_request_id_twice(served: Any, worker: FakeWorker) -> None:
    """A name that two clients chose is theirs alone: both are served, with ids of our own."""
    worker.pause_after = 2
    headers = {"x-request-id": "twin"}
    pair = [asyncio.create_task(post(served, COMPLETION, HELLO, **headers)) for _ in range(2)]
    await until(lambda: worker.num_active == 2, "both are being answered")
    worker.resume.set()
    answers = [response.json() for response in await asyncio.gather(*pair)]
    assert [answer["choices"][0]["text"] for answer in answers] == [words(16)] * 2
    assert answers[0]["id"] != answers[1]["id"]
