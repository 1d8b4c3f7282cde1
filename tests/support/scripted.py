"""Messages of scripted answers, short to write, and events of streams, read."""

from __future__ import annotations

import json
from typing import Any

from nightjar.v1 import generation_pb2 as pb

STOP, LENGTH = pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH


def entry(
    token: bytes, logprob: float = -0.5, top: tuple[tuple[bytes, float], ...] = ()
) -> pb.TokenLogprobs:
    """The log-probabilities of a position."""
    return pb.TokenLogprobs(
        chosen=pb.TokenLogprob(token_id=7, logprob=logprob, token_bytes=token),
        top=[pb.TokenLogprob(token_id=7, logprob=one, token_bytes=raw) for raw, one in top],
    )


def start(
    num_prompt_tokens: int = 5, fingerprint: str = "fake", **more: Any
) -> pb.GenerateResponse:
    """Facts of admission."""
    facts = pb.GenerationStart(
        seed=1,
        arithmetic_fingerprint=fingerprint,
        num_prompt_tokens=num_prompt_tokens,
        **more,
    )
    return pb.GenerateResponse(start=facts)


def piece(text: str, *token_ids: int, **more: Any) -> pb.GenerateResponse:
    """New text and tokens."""
    return pb.GenerateResponse(text=text, token_ids=token_ids, **more)


def end(num_tokens: int, reason: pb.FinishReason = LENGTH, **more: Any) -> pb.GenerateResponse:
    """The end of an answer of one choice, or of the last one."""
    usage = pb.Usage(
        num_prompt_tokens=5,
        num_completion_tokens=num_tokens,
        num_cached_tokens=4,
        num_draft_tokens=6,
        num_accepted_tokens=2,
        num_steps=3,
        gamma_histogram=[1, 0, 2],
        policy_version="fixed-1",
    )
    return pb.GenerateResponse(finish_reason=reason, usage=usage, **more)


def events(body: str) -> list[Any]:
    """The data of all events of a stream; [DONE] as None."""
    assert body.endswith("\n\n")
    lines = body[:-2].split("\n\n")
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    return [None if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]
