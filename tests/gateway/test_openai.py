"""OpenAI's own client against the gateway: chat and completions, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from fake_worker import CONTEXT, FakeWorker, words

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


HELLO: Any = [{"role": "user", "content": "hello"}]


async def test_chat_whole(served: Any, worker: FakeWorker) -> None:
    """A chat answer has its text, its reason, its usage and how it was drafted."""
    answer = await served.openai.chat.completions.create(
        model="tiny", messages=HELLO, max_completion_tokens=5
    )
    assert answer.object == "chat.completion"
    assert answer.model == "tiny"
    assert answer.system_fingerprint == "fake"
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", words(5))
    assert choice.finish_reason == "length"
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 5, 10)
    details = usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (2, 4)
    assert answer.nightjar == {
        "gamma_histogram": [0, 0, 3],
        "mean_accepted_length": pytest.approx(1 + 2 / 3),
        "num_steps": 3,
        "num_preemptions": 0,
        "policy_version": "fixed-1",
        "speculation_limit": "",
        "resumed": None,
    }
    assert [(m.role, m.content) for m in worker.requests[0].chat.messages] == [("user", "hello")]


async def test_chat_without_a_limit_gets_the_context(served: Any) -> None:
    """Without max_tokens a chat answer may fill the context, as OpenAI's may."""
    answer = await served.openai.chat.completions.create(model="tiny", messages=HELLO)
    assert answer.usage.completion_tokens == CONTEXT - 5


async def test_chat_streamed(served: Any) -> None:
    """Chunks of a chat: the role once, the text in order, one finish reason, no usage unasked."""
    stream = await served.openai.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=5, stream=True
    )
    chunks = [chunk async for chunk in stream]
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(chunks) - 1)
    assert "".join(delta.content or "" for delta in deltas) == words(5)
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]
    assert all(chunk.usage is None for chunk in chunks)
    assert chunks[-1].nightjar["gamma_histogram"] == [0, 0, 3]


@pytest.mark.parametrize("route", ["chat", "completion"])
async def test_include_usage(served: Any, route: str) -> None:
    """When asked for, the usage comes in one last chunk without choices, equal to the whole's."""
    create = served.openai.completions.create
    prompt: dict[str, Any] = {"prompt": "hello"}
    if route == "chat":
        create, prompt = served.openai.chat.completions.create, {"messages": HELLO}
    whole = await create(model="tiny", max_tokens=5, **prompt)
    options = {"include_usage": True}
    stream = await create(model="tiny", max_tokens=5, stream=True, stream_options=options, **prompt)
    chunks = [chunk async for chunk in stream]
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage


async def test_continuous_usage(served: Any) -> None:
    """With continuous_usage_stats every chunk carries the counts so far."""
    stream = await served.openai.completions.create(
        model="tiny",
        prompt="hello",
        max_tokens=5,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )
    counts = [chunk.usage.completion_tokens async for chunk in stream]
    assert counts == [2, 4, 5, 5, 5]


@pytest.mark.parametrize(
    "prompt", ["hello", ["hello"], [104, 101, 108, 108, 111], [[104, 101, 108.0, 108, 111]]]
)
async def test_completion_prompts(served: Any, prompt: Any) -> None:
    """A prompt is a string, a list of one string, or token ids; 16 tokens are the default."""
    answer = await served.openai.completions.create(model="tiny", prompt=prompt)
    assert answer.object == "text_completion"
    assert answer.choices[0].text == words(16)
    assert answer.usage.prompt_tokens == 5


async def test_parameters_reach_the_worker(served: Any, worker: FakeWorker) -> None:
    """Every parameter that is served arrives in GenerateRequest as it was given."""
    await served.openai.completions.create(
        model="tiny",
        prompt="hello",
        max_tokens=3,
        temperature=0.5,
        top_p=0.9,
        seed=2**63 + 7,
        stop=["x", "y"],
        n=1,
        presence_penalty=0,
        logit_bias={},
        echo=False,
        user="someone",
        extra_headers={"x-request-id": "mine"},
        extra_body={
            "top_k": 4,
            "min_p": 0.1,
            "stop_token_ids": [1, 2],
            "ignore_eos": True,
            "repetition_penalty": 1.0,
            "nightjar": {"max_gamma": 2},
            "min_tokens": None,
        },
    )
    (request,) = worker.requests
    sampling = request.sampling
    assert (request.model, request.text, request.request_id) == ("tiny", "hello", "mine")
    assert (sampling.temperature, sampling.top_p, sampling.min_p) == (0.5, 0.9, 0.1)
    assert (sampling.top_k, sampling.seed, sampling.max_tokens) == (4, 2**63 + 7, 3)
    assert (list(sampling.stop), list(sampling.stop_token_ids)) == (["x", "y"], [1, 2])
    assert sampling.ignore_eos
    assert request.speculation.max_gamma == 2
    assert not sampling.HasField("min_tokens")


async def test_chat_content_and_roles(served: Any, worker: FakeWorker) -> None:
    """Text parts are joined, and `developer` is `system`; a message may be sent back as it came."""
    await served.http.post(
        "/v1/chat/completions",
        json={
            "max_tokens": 1,
            "messages": [
                {"role": "developer", "content": "be brief"},
                {"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "b")]},
                {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None},
            ],
        },
    )
    assert [(m.role, m.content) for m in worker.requests[0].chat.messages] == [
        ("system", "be brief"),
        ("user", "a\nb"),
        ("assistant", "c"),
    ]


async def test_models(served: Any) -> None:
    """The served model is listed and can be asked for; another is 404."""
    assert [model.id async for model in served.openai.models.list()] == ["tiny"]
    assert (await served.openai.models.retrieve("tiny")).id == "tiny"
    with pytest.raises(openai.NotFoundError):
        await served.openai.models.retrieve("other")


async def test_framing(served: Any) -> None:
    """Events are `data:` lines with one blank line between them, and [DONE] is the last."""
    body = {"prompt": "héllo", "max_tokens": 2, "stream": True}
    response = await served.http.post("/v1/completions", json=body)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.text.endswith("\n\n")
    events = response.text[:-2].split("\n\n")
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    assert events[-1] == "data: [DONE]"
    assert json.loads(events[0][6:])["choices"][0]["text"] == words(2)


async def test_unknown_routes_and_methods(served: Any) -> None:
    """What is not served is refused in the shape of all errors."""
    missing = await served.http.get("/v1/engines")
    wrong = await served.http.get("/v1/completions")
    assert (missing.status_code, wrong.status_code) == (404, 405)
    assert missing.json()["error"]["message"] == "no such route"
    assert wrong.headers["allow"] == "POST"
