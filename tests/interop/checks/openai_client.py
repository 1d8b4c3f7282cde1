"""The official Python client: every answer form, and the errors as its own exception classes."""

import os

import openai

MODEL = os.environ["NIGHTJAR_MODEL"]
CHAT = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Name three birds."}],
    "max_tokens": 16,
    "temperature": 0,
}
PLAIN = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 16, "temperature": 0}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}
client = openai.OpenAI(
    base_url=os.environ["NIGHTJAR_HTTP"] + "/v1", api_key="any", max_retries=0, timeout=120
)
done = []


def refused(kind: type[openai.APIStatusError], word: str, call, **arguments) -> None:
    """The call raises that class, and the sentence names what is wrong."""
    caught: openai.APIStatusError | None = None
    try:
        call(**arguments)
    except kind as error:
        caught = error
    assert caught is not None, f"{arguments} was answered; {kind.__name__} was expected"
    assert word in caught.message, f"{word!r} is not in {caught.message!r}"
    assert set(caught.body) >= {"message", "type", "param", "code"}, caught.body


def models() -> None:
    """The list holds the model, which can be asked for alone."""
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL


def chat() -> None:
    """Streamed and whole are the same text and usage; drafts are counted in OpenAI's field."""
    whole = client.chat.completions.create(**CHAT)
    chunks = list(
        client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content != ""
    assert chunks[0].choices[0].delta.role == whole.choices[0].message.role == "assistant"
    ends = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    assert ends == [whole.choices[0].finish_reason], ends
    assert len({chunk.id for chunk in chunks}) == 1
    assert [bool(chunk.usage) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].choices == []
    usage = chunks[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (
        whole.usage.prompt_tokens,
        whole.usage.completion_tokens,
    )
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    details = whole.usage.completion_tokens_details
    assert details.accepted_prediction_tokens + details.rejected_prediction_tokens > 0, details
    assert whole._request_id
    newer = {**CHAT, "max_completion_tokens": 16}
    del newer["max_tokens"]
    assert client.chat.completions.create(**newer).choices[0].message.content == text


def completions() -> None:
    """The same for plain text; a stop string never shows."""
    whole = client.completions.create(**PLAIN)
    chunks = list(client.completions.create(**PLAIN, stream=True))
    text = whole.choices[0].text
    assert text == "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) != ""
    stop = text[5:8]
    cut = client.completions.create(**PLAIN, stop=[stop])
    assert cut.choices[0].text == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


def seeds() -> None:
    """A seed gives the same sampled answer again, another one another."""
    sampled = {**CHAT, "temperature": 1.0}
    first, again, other = (
        client.chat.completions.create(**sampled, seed=seed).choices[0].message.content
        for seed in (7, 7, 8)
    )
    assert first == again != other


def logprobs() -> None:
    """One entry a token, its alternatives best first and the greedy token the best of them."""
    entries = (
        client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=3)
        .choices[0]
        .logprobs.content
    )
    assert len(entries) == 16, len(entries)
    for entry in entries:
        values = [top.logprob for top in entry.top_logprobs]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert entry.logprob == values[0] <= 0
        assert entry.token == entry.top_logprobs[0].token
        assert bytes(entry.bytes).decode(errors="replace") is not None
    old = client.completions.create(**PLAIN, logprobs=2).choices[0].logprobs
    assert len(old.tokens) == len(old.token_logprobs) == len(old.top_logprobs) == 16
    assert old.text_offset == sorted(old.text_offset)


def choices() -> None:
    """Choice 0 of n is the answer of n = 1, and a stream names the choice of every piece."""
    sampled = {**CHAT, "temperature": 1.0, "seed": 3}
    several = client.chat.completions.create(**sampled, n=3)
    texts = [choice.message.content for choice in several.choices]
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    assert len(set(texts)) == 3, texts
    assert client.chat.completions.create(**sampled).choices[0].message.content == texts[0]
    assert several.usage.completion_tokens > 16
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(**sampled, n=3, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


def penalties() -> None:
    """Bias and penalties act: a banned first token is another one, a forced one comes always."""
    free = client.completions.create(**PLAIN, logprobs=1)
    forced = client.completions.create(**PLAIN, logit_bias={"253": 100})
    assert forced.choices[0].text != free.choices[0].text
    apart = client.completions.create(**PLAIN, frequency_penalty=2.0, presence_penalty=2.0)
    assert apart.choices[0].finish_reason in ("stop", "length")


def errors() -> None:
    """Each error is the client's own class, with a body in OpenAI's form."""
    ask = client.chat.completions.create
    refused(openai.BadRequestError, "temperature", ask, **{**CHAT, "temperature": 3e9})
    refused(openai.BadRequestError, "messages", ask, **{**CHAT, "messages": []})
    refused(openai.BadRequestError, "surprise", ask, **CHAT, extra_body={"surprise": 1})
    refused(openai.APIStatusError, "tool", ask, **CHAT, tools=[TOOL])
    refused(openai.NotFoundError, "nothing", ask, **{**CHAT, "model": "nothing"})
    refused(openai.NotFoundError, "nothing", client.models.retrieve, model="nothing")
    refused(openai.APIStatusError, "mbedding", client.embeddings.create, model=MODEL, input="a")


for check in (models, chat, completions, seeds, logprobs, choices, penalties, errors):
    check()
    done.append(check.__name__)
print(", ".join(done))
