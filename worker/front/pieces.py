"""A request and the pieces of its answer, in no protocol's terms: services translate to and fro."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from worker.messages import RowUsage, SamplingParams
from worker.text.chat_template import Chat


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """What is there of an answer that was begun elsewhere."""

    token_ids: list[int]
    num_text_bytes_delivered: int  # of the UTF-8 text; the client has them
    fingerprint: str  # of the arithmetic that produced the tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request that `nightjar.validation.validate` has let pass."""

    prompt: str | Chat | list[int]  # text, a chat for the model's template, or token ids
    sampling: SamplingParams  # of choice 0; max_tokens 0 stands for what the context still holds
    n: int = 1
    resumed: Resumed | None = None  # with n = 1; the sampling's seed is then the first worker's


class TokenLogprob(NamedTuple):
    """One token with the natural logarithm of its probability."""

    token_id: int
    logprob: float
    token_bytes: bytes  # the token's own, which may hold but part of a character


class PositionLogprobs(NamedTuple):
    """The token that stands at a position, and the likeliest there, best first."""

    chosen: TokenLogprob
    top: list[TokenLogprob]


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Facts fixed at admission; with the seed and the fingerprint the answer can be resumed."""

    seed: int
    fingerprint: str
    num_prompt_tokens: int
    first_prompt_token: bytes = b""  # its own bytes, where entries of the prompt were asked for


@dataclass(slots=True, kw_only=True)
class Piece:
    """What is new of one choice."""

    index: int  # of the choice
    token_ids: list[int] = field(default_factory=list)
    text: str = ""  # whole characters, nothing of a stop string; may lag behind token_ids
    logprobs: list[PositionLogprobs] = field(default_factory=list)  # as token_ids, where asked for
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list)  # from its second token
    finish_reason: Literal["", "stop", "length"] = ""  # set on the choice's last piece
    stop_string: str = ""  # that ended the choice, if one did; with the finish reason
    start: Start | None = None  # on the first piece of the answer
    usage: RowUsage | None = None  # on the last piece of the answer, over all choices
