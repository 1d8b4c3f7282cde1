"""Answers without a model: functions of prompt and parameters alone, and resumable anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nightjar.errors import InvalidRequest, OtherArithmetic
from nightjar.seeds import choice_seed
from nightjar.v1 import generation_pb2 as pb
from nightjar.validation import Limits, check_length


@dataclass(frozen=True, kw_only=True)
class Manner:
    """How answers look and come."""

    step: int = 2  # tokens of a message
    varied: bool = False  # ids and words depend on the seed; words hold characters of two bytes
    lag: int = 0  # tokens by which text comes later than ids
    start_first: bool = True  # facts of admission in a message of their own
    finish_apart: bool = True  # the finish reason in a message of its own
    fingerprint: str = "fake"
    padding: str = ""  # added to the text of every message


def messages(
    request: pb.GenerateRequest, limits: Limits, manner: Manner
) -> Iterator[pb.GenerateResponse]:
    """The whole answer, or what a continuation asks for; choices take turns.

    Raises:
        InvalidRequest: Its length, or what it says of an answer that is not this one.
        OtherArithmetic: A continuation of other arithmetic.
    """
    sampling, begun = request.sampling, request.continuation
    num_prompt_tokens = {
        "text": len(request.text.encode()),
        "chat": sum(len(m.content.encode()) for m in request.chat.messages),
        "tokens": len(request.tokens.token_ids),
    }[request.WhichOneof("prompt") or "text"]
    num_tokens = check_length(
        num_prompt_tokens,
        limits,
        max_tokens=sampling.max_tokens if sampling.HasField("max_tokens") else None,
        min_tokens=sampling.min_tokens,
        num_prior_tokens=len(begun.token_ids),
    )
    resumed = request.HasField("continuation")
    if resumed and begun.arithmetic_fingerprint != manner.fingerprint:
        raise OtherArithmetic("continuation.arithmetic_fingerprint", "another one")
    seed = begun.seed if resumed else sampling.seed
    choices = [
        _Choice(i, choice_seed(seed, i), num_tokens, request, limits.vocab_size, manner)
        for i in range(sampling.n or 1)
    ]
    start = pb.GenerationStart(
        seed=seed, arithmetic_fingerprint=manner.fingerprint, num_prompt_tokens=num_prompt_tokens
    )
    if manner.start_first:
        yield pb.GenerateResponse(start=start)
    if sampling.HasField("prompt_logprobs") and not begun.token_ids:
        for i in range(1, num_prompt_tokens, 2):
            entries = [_logprob(j) for j in range(i, min(i + 2, num_prompt_tokens))]
            yield pb.GenerateResponse(prompt_logprobs=entries)
    num_new = num_tokens - len(begun.token_ids)
    num_steps = -(-num_new // 2) * len(choices)
    usage = pb.Usage(
        num_prompt_tokens=num_prompt_tokens,
        num_completion_tokens=num_tokens * len(choices),
        num_draft_tokens=2 * num_steps,
        num_accepted_tokens=num_new * len(choices) - num_steps,
        num_steps=num_steps,
        gamma_histogram=[0, 0, num_steps],
        policy_version="fixed-1",
    )
    live, first = list(choices), not manner.start_first
    while live:
        for choice in list(live):
            response = choice.next_message()
            if response.finish_reason:
                live.remove(choice)
            if not live:
                response.usage.CopyFrom(usage)
            if first:
                response.start.CopyFrom(start)
                first = False
            yield response


class _Choice:
    def __init__(
        self,
        index: int,
        seed: int,
        num_tokens: int,
        request: pb.GenerateRequest,
        vocab_size: int,
        manner: Manner,
    ) -> None:
        self._index, self._manner, self._sampling = index, manner, request.sampling
        self._ids = [
            (31 * i + seed if manner.varied else i) % vocab_size for i in range(num_tokens)
        ]
        self._words = [f" é{id}" if manner.varied else f" w{i}" for i, id in enumerate(self._ids)]
        begun = request.continuation
        self._done = len(begun.token_ids)
        if list(begun.token_ids) != self._ids[: self._done]:
            raise InvalidRequest("continuation.token_ids", "not of this answer")
        shown = self._shown().encode()
        if begun.num_text_bytes_delivered > len(shown):
            raise InvalidRequest("continuation.num_text_bytes_delivered", "more than there is")
        self._num_sent_bytes = begun.num_text_bytes_delivered

    def _shown(self) -> str:
        lag = self._manner.lag if self._done < len(self._ids) else 0
        return "".join(self._words[: max(0, self._done - lag)])

    def next_message(self) -> pb.GenerateResponse:
        before, after = self._done, min(self._done + self._manner.step, len(self._ids))
        self._done = after
        text = self._shown().encode()
        response = pb.GenerateResponse(index=self._index, token_ids=self._ids[before:after])
        if response.token_ids:
            response.text = text[self._num_sent_bytes :].decode() + self._manner.padding
        self._num_sent_bytes = len(text)
        if self._sampling.HasField("logprobs"):
            response.logprobs.extend(_logprob(id) for id in response.token_ids)
        if after == len(self._ids) and (before == after or not self._manner.finish_apart):
            stopped = bool(self._sampling.stop)
            response.finish_reason = pb.FINISH_REASON_STOP if stopped else pb.FINISH_REASON_LENGTH
        return response


def _logprob(token_id: int) -> pb.TokenLogprobs:
    chosen = pb.TokenLogprob(token_id=token_id, logprob=-float(token_id), token_bytes=b"x")
    return pb.TokenLogprobs(chosen=chosen, top=[chosen])
