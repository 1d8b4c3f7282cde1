"""What a worker's messages become: choices, several prompts, log-probabilities, echoes, events."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from fake_worker import FakeWorker
from pydantic import TypeAdapter
from scripted import LENGTH, STOP, end, entry, events, piece, start

from gateway.http import shapes
from nightjar.v1 import generation_pb2 as pb

pytestmark = pytest.mark.asyncio(loop_scope="module")
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
ROUTES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hello"}]},
    COMPLETION: {"prompt": "hello"},
}
CHUNKS: dict[str, TypeAdapter[Any]] = {
    CHAT: TypeAdapter(shapes.ChatCompletionChunk),
    COMPLETION: TypeAdapter(shapes.Completion),
}
WHOLES: dict[str, TypeAdapter[Any]] = {
    CHAT: TypeAdapter(shapes.ChatCompletion),
    COMPLETION: TypeAdapter(shapes.Completion),
}


@pytest.fixture
def served(shared: Any) -> Any:
    """The module's gateway."""
    return shared[0]


@pytest.fixture
def worker(shared: Any) -> Iterator[FakeWorker]:
    """The module's worker, without a history."""
    worker = shared[1]
    worker.requests.clear()
    yield worker
    worker.script = None


async def whole(served: Any, route: str, **fields: Any) -> Any:
    """An answer at once, of the published shape."""
    response = await served.http.post(route, json={**ROUTES[route], **fields})
    assert response.status_code == 200, response.text
    WHOLES[route].validate_json(response.content, strict=True)
    return response.json()


async def streamed(served: Any, route: str, **fields: Any) -> list[Any]:
    """The chunks of a stream, each of the published shape, [DONE] taken off."""
    response = await served.http.post(route, json={**ROUTES[route], "stream": True, **fields})
    assert response.status_code == 200, response.text
    chunks = events(response.text)
    assert chunks.pop() is None
    for chunk in chunks:
        CHUNKS[route].validate_python(chunk, strict=True)
    return chunks


def text_of(route: str, choice: Any) -> str:
    """The text of a choice, whole or of a chunk."""
    if route == COMPLETION:
        return str(choice["text"])
    return str((choice.get("message") or choice.get("delta")).get("content", ""))


def by_choice(route: str, chunks: list[Any]) -> dict[int, tuple[str, list[str]]]:
    """Text and finish reasons of each choice of a stream."""
    found: dict[int, tuple[str, list[str]]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            text, reasons = found.get(choice["index"], ("", []))
            reason = choice["finish_reason"]
            found[choice["index"]] = (
                text + text_of(route, choice),
                [*reasons, reason] if reason else reasons,
            )
    return found


def two_choices(_: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    """Choices that take turns; the second ends first."""
    return [
        start(),
        piece(" a", 1, index=0),
        piece(" x", 2, index=1),
        piece(" b", 3, index=0),
        piece(" y", 4, index=1, finish_reason=STOP),
        piece(" c", 5, index=0),
        end(5, index=0),
    ]


@pytest.mark.parametrize("route", ROUTES)
async def test_choices(served: Any, worker: FakeWorker, route: str) -> None:
    """Several answers are choices by index, interleaved in a stream, with one usage for all."""
    worker.script = two_choices
    answer = await whole(served, route, n=2)
    assert worker.requests[0].sampling.n == 2
    texts = [(c["index"], text_of(route, c), c["finish_reason"]) for c in answer["choices"]]
    assert texts == [(0, " a b c", "length"), (1, " x y", "stop")]
    assert answer["usage"]["completion_tokens"] == 5
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    chunks = await streamed(served, route, n=2, stream_options={"include_usage": True})
    assert by_choice(route, chunks) == {0: (" a b c", ["length"]), 1: (" x y", ["stop"])}
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert (chunks[-1]["choices"], chunks[-1]["usage"]) == ([], answer["usage"])
    assert ["nightjar" in chunk for chunk in chunks] == [False] * (len(chunks) - 2) + [True, False]
    order = [chunk["choices"][0]["index"] for chunk in chunks[:-1]]
    assert order == ([0, 1] if route == CHAT else []) + [0, 1, 0, 1, 1, 0, 0]
    if route == CHAT:
        roles = [chunk["choices"][0]["delta"].get("role") for chunk in chunks[:3]]
        assert roles == ["assistant", "assistant", None]


@pytest.mark.parametrize("asked", [{}, {"include_usage": False}, None])
@pytest.mark.parametrize("route", ROUTES)
async def test_no_usage_unasked(served: Any, worker: FakeWorker, route: str, asked: Any) -> None:
    """A stream that was not asked for its usage says nothing of it, and ends with a reason."""
    worker.script = two_choices
    chunks = await streamed(served, route, n=2, stream_options=asked)
    assert not any("usage" in chunk for chunk in chunks)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def of_prompt(request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    """Two choices that repeat their prompt."""
    name = request.text or str(list(request.tokens.token_ids))
    return [
        start(),
        piece(f"{name}0", 1),
        piece(f"{name}1", 2, index=1, finish_reason=STOP),
        end(2),
    ]


@pytest.mark.parametrize("prompts", [["a", "b", "c"], [[1, 2], [3], [4]]])
async def test_several_prompts(served: Any, worker: FakeWorker, prompts: Any) -> None:
    """Choices are numbered prompt by prompt, each prompt is a request, the usage is their sum."""
    worker.script = of_prompt
    expected = {
        2 * p + i: (f"{prompt}{i}", ["stop" if i else "length"])
        for p, prompt in enumerate(prompts)
        for i in range(2)
    }
    answer = await whole(served, COMPLETION, prompt=prompts, n=2)
    assert [c["index"] for c in answer["choices"]] == list(range(6))
    assert [c["text"] for c in answer["choices"]] == [text for text, _ in expected.values()]
    assert len(worker.requests) == 3
    assert answer["usage"] == {
        "prompt_tokens": 15,
        "completion_tokens": 6,
        "total_tokens": 21,
        "prompt_tokens_details": {"cached_tokens": 12},
        "completion_tokens_details": {
            "accepted_prediction_tokens": 6,
            "rejected_prediction_tokens": 12,
        },
    }
    assert answer["nightjar"]["gamma_histogram"] == [3, 0, 6]
    assert answer["nightjar"]["policy_version"] == "fixed-1"
    chunks = await streamed(
        served, COMPLETION, prompt=prompts, n=2, stream_options={"include_usage": True}
    )
    assert by_choice(COMPLETION, chunks) == expected
    assert chunks[-1]["usage"] == answer["usage"]


async def test_one_bad_prompt_ends_all(served: Any, worker: FakeWorker) -> None:
    """A prompt that can never work refuses the request with its words; nothing is left running."""
    response = await served.http.post(COMPLETION, json={"prompt": ["a", "", "c"]})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "text: must not be empty"
    response = await served.http.post(COMPLETION, json={"prompt": ["a"] * 64, "n": 3})
    assert response.json()["error"]["param"] == "n"
    response = await served.http.post(COMPLETION, json={"prompt": ["a"] * 65})
    assert response.json()["error"]["message"].startswith("prompt: holds 65 prompts; at most 64")
    assert worker.num_active == 0


EMOJI = "😀".encode()


def partial_bytes(_: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    """A character in two tokens, text after it, and a token that text lags behind."""
    alternatives = ((EMOJI[:2], -0.25), (b"\xff", float("-inf")))
    return [
        start(),
        piece("", 1, logprobs=[entry(EMOJI[:2], -0.25, alternatives)]),
        piece("😀 a", 2, 3, logprobs=[entry(EMOJI[2:]), entry(b" a")]),
        piece(" é", 4, logprobs=[entry(" é".encode(), -1.5)]),
        end(4),
    ]


async def test_chat_logprobs(served: Any, worker: FakeWorker) -> None:
    """Chat entries have raw bytes that make the text; no part of a character shows as U+FFFD."""
    worker.script = partial_bytes
    answer = await whole(served, CHAT, logprobs=True, top_logprobs=2)
    assert worker.requests[0].sampling.logprobs == 2
    (choice,) = answer["choices"]
    content = choice["logprobs"]["content"]
    assert len(content) == answer["usage"]["completion_tokens"] == 4
    assert b"".join(bytes(one["bytes"]) for one in content) == text_of(CHAT, choice).encode()
    assert [one["token"] for one in content] == ["\\xf0\\x9f", "\\x98\\x80", " a", " é"]
    assert [one["logprob"] for one in content] == [-0.25, -0.5, -0.5, -1.5]
    assert content[0]["top_logprobs"] == [
        {"token": "\\xf0\\x9f", "logprob": -0.25, "bytes": list(EMOJI[:2])},
        {"token": "\\xff", "logprob": -9999.0, "bytes": [255]},
    ]
    chunks = await streamed(served, CHAT, logprobs=True, top_logprobs=2)
    found = [c["choices"][0]["logprobs"] for c in chunks]
    assert [entry for one in found if one for entry in one["content"]] == content
    assert by_choice(CHAT, chunks)[0][0] == text_of(CHAT, choice)
    await whole(served, CHAT, logprobs=True)
    assert worker.requests[-1].sampling.logprobs == 0


async def test_completion_logprobs(served: Any, worker: FakeWorker) -> None:
    """Completion entries are lists of one length; offsets count characters of the text."""
    worker.script = partial_bytes
    answer = await whole(served, COMPLETION, logprobs=2)
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs == {
        "tokens": ["bytes:\\xf0\\x9f", "bytes:\\x98\\x80", " a", " é"],
        "token_logprobs": [-0.25, -0.5, -0.5, -1.5],
        "top_logprobs": [
            {"bytes:\\xf0\\x9f": -0.25, "bytes:\\xff": -9999.0},
            {"bytes:\\x98\\x80": -0.5},
            {" a": -0.5},
            {" é": -1.5},
        ],
        "text_offset": [0, 0, 1, 3],
    }
    chunks = await streamed(served, COMPLETION, logprobs=2)
    found = [one for c in chunks if (one := c["choices"][0]["logprobs"])]
    for name, values in logprobs.items():
        assert [value for one in found for value in one[name]] == values
    assert all(c["choices"][0]["logprobs"] is None for c in await streamed(served, COMPLETION))


def scored(request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    """Entries of the prompt `hello`, tokenized as he-ll-o, then one token."""
    if not request.sampling.HasField("prompt_logprobs"):
        return [start(), piece(" you", 9), end(1, STOP)]
    own = {"logprobs": [entry(b" you")]} if request.sampling.HasField("logprobs") else {}
    first = start(3, first_prompt_token=b"he")
    first.prompt_logprobs.append(entry(b"ll", -1.0, ((b"l", -0.75),)))
    last = pb.GenerateResponse(prompt_logprobs=[entry(b"o", -2.0, ((b"o", -2.0),))])
    return [first, last, piece(" you", 9, **own), end(1, STOP)]


async def test_echo(served: Any, worker: FakeWorker) -> None:
    """An echo begins with the prompt, its log-probabilities with those of the prompt."""
    worker.script = scored
    plain = await whole(served, COMPLETION, echo=True)
    assert plain["choices"][0]["text"] == "hello you"
    assert not worker.requests[-1].sampling.HasField("prompt_logprobs")
    for prompt in ("hello", [1, 2, 3]):
        answer = await whole(served, COMPLETION, prompt=prompt, echo=True, logprobs=1)
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("hello you", "stop")
        assert choice["logprobs"] == {
            "tokens": ["he", "ll", "o", " you"],
            "token_logprobs": [None, -1.0, -2.0, -0.5],
            "top_logprobs": [None, {"l": -0.75, "ll": -1.0}, {"o": -2.0}, {" you": -0.5}],
            "text_offset": [0, 2, 4, 5],
        }
    ids = await whole(served, COMPLETION, prompt=[1, 2, 3], echo=True)
    assert (ids["choices"][0]["text"], ids["choices"][0]["logprobs"]) == ("hello you", None)


async def test_scores_of_prompts_alone(served: Any, worker: FakeWorker) -> None:
    """With echo and no tokens wanted, prompts are scored and nothing else is told or counted."""
    worker.script = scored
    fields: Any = {"prompt": ["hello", "hello"], "echo": True, "logprobs": 1, "max_tokens": 0}
    answer = await whole(served, COMPLETION, **fields)
    assert [c["text"] for c in answer["choices"]] == ["hello", "hello"]
    assert [c["logprobs"]["token_logprobs"] for c in answer["choices"]] == [[None, -1.0, -2.0]] * 2
    assert {c["finish_reason"] for c in answer["choices"]} == {"length"}
    assert answer["usage"]["completion_tokens"] == 0
    assert worker.requests[0].sampling.max_tokens == 1
    for fields, param in (
        ({"max_tokens": 0}, "max_tokens"),
        ({"echo": True, "stream": True}, "echo"),
    ):
        response = await served.http.post(COMPLETION, json={"prompt": "hello", **fields})
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_a_token_put_before_the_prompt_shifts_no_offset(
    served: Any, worker: FakeWorker
) -> None:
    """A beginning that the tokenizer added is a token of the echo, but no part of its text."""

    def script(_: pb.GenerateRequest) -> list[pb.GenerateResponse]:
        first = start(2, first_prompt_token=b"<s>")
        first.prompt_logprobs.append(entry(b"hello"))
        return [first, piece("!", 9, logprobs=[entry(b"!")]), end(1)]

    worker.script = script
    (choice,) = (await whole(served, COMPLETION, echo=True, logprobs=0))["choices"]
    assert choice["text"] == "hello!"
    assert choice["logprobs"]["tokens"] == ["<s>", "hello", "!"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 5]


@pytest.mark.parametrize("num_tokens", range(1, 9))
@pytest.mark.parametrize("route", ROUTES)
async def test_every_token_is_delivered(served: Any, route: str, num_tokens: int) -> None:
    """max_tokens 1 to 8, streamed: exactly so many words, by one finish reason, `length`."""
    fields = {"max_tokens": num_tokens, "stream_options": {"include_usage": True}}
    chunks = await streamed(served, route, **fields)
    text = "".join(f" w{i}" for i in range(num_tokens))
    assert by_choice(route, chunks) == {0: (text, ["length"])}
    assert chunks[-1]["usage"]["completion_tokens"] == num_tokens


BROKEN: dict[str, list[pb.GenerateResponse]] = {
    "without an end": [start(), piece(" a", 1)],
    "ends twice": [start(), piece("", 1, finish_reason=STOP), piece("", finish_reason=LENGTH)],
    "of no choice": [start(), piece(" a", 1, index=3, finish_reason=STOP)],
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", BROKEN)
async def test_answers_that_are_none(
    served: Any, worker: FakeWorker, name: str, stream: bool
) -> None:
    """A worker that breaks the protocol is an error, never half an answer that looks whole."""
    worker.script = lambda _: BROKEN[name]
    body = {"prompt": "hello", "stream": stream}
    response = await served.http.post(COMPLETION, json=body)
    if response.status_code == 200:
        *before, last = events(response.text)
        assert last["error"]["type"] == "server_error"
        assert not any("error" in event for event in before)
    else:
        assert response.status_code in (500, 503)
        assert response.json()["error"]["type"] == "server_error"


async def test_concurrent_streams_do_not_mix(served: Any, worker: FakeWorker) -> None:
    """Answers of many clients at once keep their texts and ids apart."""
    worker.script = of_prompt
    bodies = [{"prompt": f"p{i}", "n": 2} for i in range(20)]
    answers = await asyncio.gather(*(streamed(served, COMPLETION, **body) for body in bodies))
    for i, chunks in enumerate(answers):
        assert {text for text, _ in by_choice(COMPLETION, chunks).values()} == {f"p{i}0", f"p{i}1"}
    assert len({chunks[0]["id"] for chunks in answers}) == 20


async def test_the_official_client_reads_it_all(served: Any, worker: FakeWorker) -> None:
    """OpenAI's client makes objects of choices, log-probabilities and an error in the stream."""
    worker.script = partial_bytes
    ask: Any = {"model": "tiny", "logprobs": True, "top_logprobs": 2, **ROUTES[CHAT]}
    answer = await served.openai.chat.completions.create(**ask)
    assert answer.choices[0].logprobs.content[0].top_logprobs[0].bytes == list(EMOJI[:2])
    worker.script = lambda _: BROKEN["without an end"]
    stream = await served.openai.chat.completions.create(stream=True, **ask)
    with pytest.raises(openai.APIError, match=r"complete|go on"):
        _ = [chunk async for chunk in stream]
