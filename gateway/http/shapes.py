"""The JSON of answers, as types: by them it is made, tested, and published as OpenAPI document."""

from __future__ import annotations

from typing import Literal, NotRequired

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

_whole = with_config(ConfigDict(extra="forbid"))  # a shape names all that an answer has
Finish = Literal["stop", "length"]


@_whole
class PromptDetails(TypedDict):
    """Of the tokens of the prompt."""

    cached_tokens: int


@_whole
class CompletionDetails(TypedDict):
    """Of the tokens of the answer: drafted ones that were accepted, and that were not."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


@_whole
class Usage(TypedDict):
    """What an answer cost, over all of its prompts and choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: NotRequired[PromptDetails]
    completion_tokens_details: NotRequired[CompletionDetails]


@_whole
class Speculation(TypedDict):
    """How an answer was drafted, and whether a lost worker's was resumed by another."""

    gamma_histogram: list[int]
    mean_accepted_length: float | None
    num_steps: int
    num_preemptions: int
    policy_version: str
    speculation_limit: str
    resumed: Literal["exact", "best-effort"] | None


@_whole
class TopLogprob(TypedDict):
    """One of the most likely tokens at a position."""

    token: str
    logprob: float
    bytes: list[int]


@_whole
class TokenLogprob(TopLogprob):
    """The token that was taken at a position."""

    top_logprobs: list[TopLogprob]


@_whole
class ChatLogprobs(TypedDict):
    """Log-probabilities of a chat answer; the bytes of its tokens make its text."""

    content: list[TokenLogprob]
    refusal: None


@_whole
class TextLogprobs(TypedDict):
    """Log-probabilities of a completion, in lists of equal length."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


@_whole
class AssistantMessage(TypedDict):
    """What the model said."""

    role: Literal["assistant"]
    content: str
    refusal: None


@_whole
class ChatChoice(TypedDict):
    """One answer to a chat."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish


@_whole
class ChatCompletion(TypedDict):
    """The answers to a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[ChatChoice]
    usage: Usage
    nightjar: Speculation


@_whole
class Delta(TypedDict):
    """What is new of a chat answer: first the role, then text, at last nothing."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    refusal: NotRequired[None]


@_whole
class ChunkChoice(TypedDict):
    """What is new of one answer to a chat."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None


@_whole
class ChatCompletionChunk(TypedDict):
    """One event of a streamed chat answer."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[ChunkChoice]
    usage: NotRequired[Usage | None]
    nightjar: NotRequired[Speculation]


@_whole
class TextChoice(TypedDict):
    """One completion, or what is new of it."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Finish | None


@_whole
class Completion(TypedDict):
    """The completions of the prompts; also one event of them, streamed."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[TextChoice]
    usage: NotRequired[Usage | None]
    nightjar: NotRequired[Speculation]


@_whole
class Model(TypedDict):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


@_whole
class ModelList(TypedDict):
    """The models that are served."""

    object: Literal["list"]
    data: list[Model]


@_whole
class Live(TypedDict):
    """The process runs."""

    live: Literal[True]


@_whole
class Ready(TypedDict):
    """Whether requests are wanted, and why workers are not ready."""

    ready: bool
    num_workers: int
    num_ready: int
    reasons: list[str]


@_whole
class ErrorFacts(TypedDict):
    """What was wrong; `param` names the field where it was one."""

    message: str
    type: str
    param: str | None
    code: str | None


@_whole
class Error(TypedDict):
    """Every error: of HTTP, and the last event of a stream that broke off."""

    error: ErrorFacts
