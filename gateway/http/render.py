"""GenerateResponse messages become the JSON of OpenAI's answers: whole, or chunk by chunk."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from gateway.http.schema import Route
from nightjar.errors import EngineFailure, Unavailable
from nightjar.v1 import generation_pb2 as pb

_OBJECTS = {
    "chat": ("chat.completion", "chat.completion.chunk", "chatcmpl-"),
    "completion": ("text_completion", "text_completion", "cmpl-"),
}
_FINISH = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}


@dataclass(kw_only=True)
class Answer:
    """What arrived of one answer so far, and how it looks to the client."""

    route: Route
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    model: str = ""
    fingerprint: str = ""
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    finish_reason: str = ""
    usage: pb.Usage | None = None

    def __post_init__(self) -> None:
        self.id = _OBJECTS[self.route][2] + uuid.uuid4().hex

    def take(self, response: pb.GenerateResponse) -> str:
        """Take over one message; returns its text.

        Raises:
            Unavailable: The worker gave the request up.
        """
        if response.HasField("start"):
            self.fingerprint = response.start.arithmetic_fingerprint
            self.num_prompt_tokens = response.start.num_prompt_tokens
        self.num_completion_tokens += len(response.token_ids)
        if response.finish_reason == pb.FINISH_REASON_ABORT:
            raise Unavailable("the worker stopped the request before its end")
        if response.finish_reason:
            self.finish_reason = _FINISH[response.finish_reason]
        if response.HasField("usage"):
            self.usage = response.usage
        return response.text

    def ended(self) -> pb.Usage:
        """The usage of an answer that is complete.

        Raises:
            EngineFailure: The stream ended, but the answer did not.
        """
        if self.usage is None or not self.finish_reason:
            raise EngineFailure("the worker ended the stream before the answer was complete")
        return self.usage

    def whole(self, text: str) -> dict[str, Any]:
        """The answer of a request without streaming."""
        usage = self.ended()
        piece = (
            {"message": {"role": "assistant", "content": text}}
            if self.route == "chat"
            else {"text": text}
        )
        choice = {"index": 0, **piece, "logprobs": None, "finish_reason": self.finish_reason}
        return {
            **self._head(_OBJECTS[self.route][0]),
            "choices": [choice],
            "usage": usage_json(usage),
            "nightjar": speculation_json(usage),
        }

    def chunk(self, text: str, *, first: bool = False, last: bool = False) -> dict[str, Any]:
        """One chunk of a stream; the first of a chat names the role, the last how it ended."""
        if self.route == "chat":
            delta = {"role": "assistant", "content": text} if first else {"content": text}
            piece: dict[str, Any] = {"delta": {} if last else delta}
        else:
            piece = {"text": text}
        finish = self.finish_reason if last else None
        choice = {"index": 0, **piece, "logprobs": None, "finish_reason": finish}
        chunk = {**self._head(_OBJECTS[self.route][1]), "choices": [choice]}
        if last:
            chunk["nightjar"] = speculation_json(self.ended())
        return chunk

    def usage_chunk(self) -> dict[str, Any]:
        """The chunk that `include_usage` asks for: no choices, the usage."""
        usage = usage_json(self.ended())
        return {**self._head(_OBJECTS[self.route][1]), "choices": [], "usage": usage}

    def usage_so_far(self) -> dict[str, Any]:
        """Token counts in the middle of a stream."""
        prompt, completion = self.num_prompt_tokens, self.num_completion_tokens
        return _counts(prompt, completion)

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint or None,
        }


def usage_json(usage: pb.Usage) -> dict[str, Any]:
    """OpenAI's usage object; draft tokens are its predictions."""
    rejected = usage.num_draft_tokens - usage.num_accepted_tokens
    return {
        **_counts(usage.num_prompt_tokens, usage.num_completion_tokens),
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
        "completion_tokens_details": {
            "accepted_prediction_tokens": usage.num_accepted_tokens,
            "rejected_prediction_tokens": rejected,
        },
    }


def speculation_json(usage: pb.Usage) -> dict[str, Any]:
    """How the answer was drafted.

    `mean_accepted_length` is tokens per step with a draft, the target's own token included:
    1 + accepted / steps with gamma > 0; null without such steps.
    """
    num_drafts = sum(usage.gamma_histogram[1:])
    length = 1 + usage.num_accepted_tokens / num_drafts if num_drafts else None
    return {
        "gamma_histogram": list(usage.gamma_histogram),
        "mean_accepted_length": length,
        "num_steps": usage.num_steps,
        "num_preemptions": usage.num_preemptions,
        "policy_version": usage.policy_version,
    }


def _counts(prompt: int, completion: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
