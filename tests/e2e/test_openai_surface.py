"""The OpenAI routes in front of a real worker that speculates: counts, stops, bytes, scores."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest
from scripted import events
from tiny import SPECIAL_TOKENS
from whole_system import System

from nightjar.v1 import generation_pb2 as pb
from nightjar.v1 import generation_pb2_grpc

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
PROMPT = "once upon a time"
CONTENT = [{"role": "user", "content": PROMPT}]
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
NO_SPECIAL = {str(i): -100 for i in range(len(SPECIAL_TOKENS))}


@pytest.fixture
def http(system: System) -> Iterator[httpx.Client]:
    """The gateway's HTTP."""
    url = f"http://{system.addresses['gateway_http']}"
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


def ask(http: httpx.Client, route: str, **fields: Any) -> Any:
    """An answer at once."""
    prompt = {"messages": CONTENT} if route == CHAT else {"prompt": PROMPT}
    response = http.post(route, json={**prompt, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def ask_streamed(http: httpx.Client, route: str, **fields: Any) -> tuple[str, int, str, Any]:
    """Text, number of entries, finish reason and usage of a stream."""
    prompt = {"messages": CONTENT} if route == CHAT else {"prompt": PROMPT}
    options = {"include_usage": True}
    body = {**prompt, "stream": True, "stream_options": options, **fields}
    response = http.post(route, json=body)
    chunks = events(response.text)
    text, num_entries, reasons = "", 0, []
    for choice in (choice for chunk in chunks[:-1] for choice in chunk["choices"]):
        text += choice["delta"].get("content", "") if route == CHAT else choice["text"]
        if choice["logprobs"]:
            entries = choice["logprobs"]["content" if route == CHAT else "tokens"]
            num_entries += len(entries)
        reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    (reason,) = reasons
    return text, num_entries, reason, chunks[-2]["usage"]


@pytest.mark.parametrize("max_gamma", [0, 4])
def test_exactly_so_many_tokens(http: httpx.Client, max_gamma: int) -> None:
    """Whatever is accepted at once: delivered = entries = counted = max_tokens, by `length`."""
    for num_tokens in range(1, 7):
        for route, entries in ((CHAT, {"logprobs": True}), (COMPLETION, {"logprobs": 0})):
            fields = {**GREEDY, **entries, "max_tokens": num_tokens}
            fields["nightjar"] = {"max_gamma": max_gamma}
            _, num_entries, reason, usage = ask_streamed(http, route, **fields)
            assert (num_entries, usage["completion_tokens"]) == (num_tokens, num_tokens)
            assert reason == "length"


def generated(system: System, request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    """An answer over gRPC."""
    with grpc.insecure_channel(system.addresses["gateway_grpc"]) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        return list(stub.Generate(request, timeout=60))


def test_stop_strings_at_every_door(system: System, http: httpx.Client) -> None:
    """No character of a stop string comes out, streamed or not, by any route, at any place."""
    fields = {**GREEDY, "max_tokens": 24}
    for route in (CHAT, COMPLETION):
        whole = ask(http, route, **fields)["choices"][0]
        text = whole["message"]["content"] if route == CHAT else whole["text"]
        for begin in (2, 5, 9):
            stop = text[begin : begin + 3]
            shown = text[: text.index(stop)]
            answer = ask(http, route, **fields, stop=stop)["choices"][0]
            got = answer["message"]["content"] if route == CHAT else answer["text"]
            assert (got, answer["finish_reason"]) == (shown, "stop")
            streamed, _, reason, _ = ask_streamed(http, route, **fields, stop=[stop])
            assert (streamed, reason) == (shown, "stop")
            sampling = pb.SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop=[stop])
            request = pb.GenerateRequest(text=PROMPT, sampling=sampling)
            if route == CHAT:
                request.chat.messages.add(role="user", content=PROMPT)
            pieces = generated(system, request)
            assert "".join(piece.text for piece in pieces) == shown


MIXED: list[dict[str, Any]] = [
    {"temperature": 5e-324, "max_tokens": 9, "repetition_penalty": 1.5, "n": 2},
    {
        "temperature": 1.0,
        "frequency_penalty": -2.0,
        "n": 3,
        "min_tokens": 4,
        "stop": ["e", "o"],
    },
    {"temperature": 2.0, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "presence_penalty": 2.0},
    {
        "temperature": 0.7,
        "logit_bias": {"100": 6.0, "150": -50.0},
        "stop_token_ids": [100, *range(200, 230)],
        "min_tokens": 5,
        "n": 2,
    },
]


@pytest.mark.parametrize("case", range(len(MIXED)))
def test_answers_are_plain_decodings_at_every_door(
    system: System, http: httpx.Client, case: int
) -> None:
    """Text, reasons, counts and scores over gRPC at gamma 0 are those of each route otherwise."""
    fields = {"seed": 40 + case, "max_tokens": 16, "ignore_eos": True, **MIXED[case]}
    biases = {int(name): bias for name, bias in fields.get("logit_bias", {}).items()}
    sampling = pb.SamplingParams(**{**fields, "logit_bias": biases}, logprobs=0)
    n = fields.get("n", 1)
    for route in (CHAT, COMPLETION):
        request = pb.GenerateRequest(text=PROMPT, sampling=sampling)
        if route == CHAT:
            request.chat.messages.add(role="user", content=PROMPT)
        request.speculation.max_gamma = 0
        pieces = generated(system, request)
        told = {"logprobs": True} if route == CHAT else {"logprobs": 0}
        whole = ask(http, route, **fields, **told)
        usage = pieces[-1].usage
        assert whole["usage"]["completion_tokens"] == usage.num_completion_tokens
        assert len(whole["choices"]) == n
        for choice in whole["choices"]:
            own = [piece for piece in pieces if piece.index == choice["index"]]
            text = choice["message"]["content"] if route == CHAT else choice["text"]
            assert text == "".join(piece.text for piece in own)
            stopped = own[-1].finish_reason == pb.FINISH_REASON_STOP
            assert choice["finish_reason"] == ("stop" if stopped else "length")
            scores = [entry.chosen.logprob for piece in own for entry in piece.logprobs]
            logprobs = choice["logprobs"]
            got = (
                [entry["logprob"] for entry in logprobs["content"]]
                if route == CHAT
                else logprobs["token_logprobs"]
            )
            assert got == scores


def test_scores_are_those_of_the_text_as_a_prompt(system: System, http: httpx.Client) -> None:
    """A penalized sample's log-probabilities are the model's own, read off one forward over all."""
    ids = [70, 71, 90, 33, 120]
    sampling = pb.SamplingParams(
        temperature=1.5, seed=5, max_tokens=20, repetition_penalty=1.4, logprobs=0, ignore_eos=True
    )
    pieces = generated(system, pb.GenerateRequest(tokens={"token_ids": ids}, sampling=sampling))
    ids += [token_id for piece in pieces for token_id in piece.token_ids]
    scores = [entry.chosen.logprob for piece in pieces for entry in piece.logprobs]
    scored = ask(http, COMPLETION, prompt=ids, echo=True, max_tokens=0, logprobs=0)
    expected = scored["choices"][0]["logprobs"]["token_logprobs"][5:]
    assert len(scores) == 20
    assert scores == pytest.approx(expected, abs=1e-4)


def test_bytes_of_entries_make_the_text(http: httpx.Client) -> None:
    """Raw bytes of hot answers, parts of characters among them, join to the text exactly."""
    num_parts = 0
    for seed in range(3):
        fields = {"temperature": 3, "seed": seed, "max_tokens": 40, "logit_bias": NO_SPECIAL}
        answer = ask(http, CHAT, **fields, logprobs=True, top_logprobs=2)
        (choice,) = answer["choices"]
        content = choice["logprobs"]["content"]
        raw = b"".join(bytes(one["bytes"]) for one in content)
        assert raw.decode(errors="replace") == choice["message"]["content"]
        assert len(content) == answer["usage"]["completion_tokens"]
        assert all(len(one["top_logprobs"]) == 2 for one in content)
        assert "\ufffd" not in "".join(one["token"] for one in content)
        num_parts += sum(one["token"].startswith("\\x") for one in content)
        completion = ask(http, COMPLETION, **fields, logprobs=2)["choices"][0]
        logprobs = completion["logprobs"]
        for offset, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
            if not token.startswith("bytes:"):
                assert completion["text"][offset:].startswith(token)
    assert num_parts > 5


def test_choices_are_requests_of_their_own(http: httpx.Client) -> None:
    """The choices of a seeded request differ, repeat, and the first one is the answer to n = 1."""
    fields = {"temperature": 1.5, "seed": 7, "max_tokens": 12, "ignore_eos": True}
    first = [choice["text"] for choice in ask(http, COMPLETION, **fields, n=3)["choices"]]
    again = [choice["text"] for choice in ask(http, COMPLETION, **fields, n=3)["choices"]]
    assert first == again
    assert len(set(first)) == 3
    assert ask(http, COMPLETION, **fields)["choices"][0]["text"] == first[0]
    prompts = [PROMPT, "another"]
    both = ask(http, COMPLETION, **fields, n=3, prompt=prompts)
    assert [choice["text"] for choice in both["choices"][:3]] == first


def test_scores_of_a_prompt(http: httpx.Client) -> None:
    """An echo's entries cover the prompt, as ids and as text alike, and go on with the answer's."""
    fields = {**GREEDY, "echo": True, "logprobs": 1}
    scored = ask(http, COMPLETION, **fields, max_tokens=0)
    (choice,) = scored["choices"]
    assert (choice["text"], scored["usage"]["completion_tokens"]) == (PROMPT, 0)
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == PROMPT
    assert logprobs["token_logprobs"][0] is None
    assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
    more = ask(http, COMPLETION, **fields, max_tokens=4)["choices"][0]
    assert more["text"].startswith(PROMPT)
    n = len(logprobs["tokens"])
    assert len(more["logprobs"]["tokens"]) == n + 4
    assert more["logprobs"]["token_logprobs"][:n] == logprobs["token_logprobs"]
    # What the model chose greedily is what it holds likeliest.
    tail = zip(
        more["logprobs"]["top_logprobs"][n:], more["logprobs"]["token_logprobs"][n:], strict=True
    )
    assert all(math.isclose(max(top.values()), chosen) for top, chosen in tail)


def test_tools_need_a_template_with_a_place_for_them(http: httpx.Client) -> None:
    """A model whose template drops tools refuses them, instead of passing them over."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"messages": CONTENT, "tools": tools, "max_tokens": 1}
    response = http.post(CHAT, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools"
    assert http.post(CHAT, json={**body, "tool_choice": "none"}).status_code == 200


def test_the_document_is_served(http: httpx.Client) -> None:
    """The running system publishes how it is spoken to."""
    document = http.get("/openapi.json").json()
    assert document["openapi"] == "3.1.0"
    assert json.dumps(document).count("nightjar") > 3
