"""litellm, which many applications call instead of a provider: two of its providers fit."""

import asyncio
import os

import litellm

BASE, MODEL = os.environ["NIGHTJAR_HTTP"] + "/v1", os.environ["NIGHTJAR_MODEL"]
ASK = {
    "messages": [{"role": "user", "content": "Name three birds."}],
    "api_base": BASE,
    "api_key": "any",
    "max_tokens": 16,
    "temperature": 0,
    "timeout": 120,
    "num_retries": 0,
}
litellm.suppress_debug_info = True


def streamed(provider: str) -> str:
    """A streamed answer, joined; the usage comes with it."""
    stream = litellm.completion(
        model=f"{provider}/{MODEL}", stream=True, stream_options={"include_usage": True}, **ASK
    )
    chunks = list(stream)
    usages = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)]
    assert usages[-1].completion_tokens == 16, usages
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


texts = set()
for name in ("openai", "hosted_vllm"):
    answer = litellm.completion(model=f"{name}/{MODEL}", **ASK)
    assert answer.usage.completion_tokens == 16
    assert answer.choices[0].finish_reason == "length"
    texts |= {answer.choices[0].message.content, streamed(name)}
later = asyncio.run(litellm.acompletion(model=f"openai/{MODEL}", **ASK))
texts.add(later.choices[0].message.content)
assert len(texts) == 1, texts
assert texts != {""}
plain = litellm.text_completion(
    model=f"text-completion-openai/{MODEL}",
    prompt="Once upon a time",
    api_base=BASE,
    api_key="any",
    max_tokens=8,
)
assert plain.choices[0].text
for wrong, kind in (
    ({"temperature": 3e9}, litellm.BadRequestError),
    ({"model": "openai/nothing"}, litellm.NotFoundError),
):
    try:
        litellm.completion(**{"model": f"openai/{MODEL}", **ASK, **wrong})
    except kind:
        continue
    raise AssertionError(f"{wrong} was answered; {kind.__name__} was expected")
print("openai and hosted_vllm, whole, streamed and asynchronous, text completion, two errors")
