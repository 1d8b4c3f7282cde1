"""What of an answer is remembered, and what is asked for from it: messages in, messages out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from gateway.continuity import Answer, NotTheSame
from gateway.merging import merged
from nightjar.seeds import choice_seed
from nightjar.v1 import generation_pb2 as pb
from nightjar.validation import MAX_ATTEMPTS

START = pb.GenerationStart(seed=5, arithmetic_fingerprint="f", num_prompt_tokens=4)


def piece(*token_ids: int, **fields: Any) -> pb.GenerateResponse:
    """A message."""
    return pb.GenerateResponse(token_ids=token_ids, **fields)


def begun(*pieces: pb.GenerateResponse, **sampling: Any) -> Answer:
    """An answer whose first worker had a context of 50 tokens and sent these."""
    answer = Answer(pb.GenerateRequest(text="abcd", sampling=pb.SamplingParams(**sampling)))
    call = answer.whole(50)
    for one in (pb.GenerateResponse(start=START), *pieces):
        answer.take(call, one)
    return answer


def test_facts_of_admission_wait_for_content() -> None:
    """A start alone binds nobody; it goes out with the first content of its own worker."""
    answer = Answer(pb.GenerateRequest(text="abcd"))
    other = pb.GenerationStart(seed=1, arithmetic_fingerprint="g", num_prompt_tokens=4)
    assert answer.take(answer.whole(50), pb.GenerateResponse(start=other)) is None
    assert (answer.begun, answer.fingerprint) == (False, "")
    call = answer.whole(50)
    assert answer.take(call, pb.GenerateResponse(start=START)) is None
    first = answer.take(call, piece(7, text="x"))
    assert first == piece(7, text="x", start=START)
    assert (answer.begun, answer.fingerprint) == (True, "f")


def test_the_rest_says_what_the_client_has() -> None:
    """Ids, bytes of text and the seed go along, and so does the length that the context allowed."""
    answer = begun(piece(7, text="é"), piece(8, 9), temperature=0.5)
    rest = answer.rest(0, 2).request
    assert rest.continuation == pb.Continuation(
        token_ids=[7, 8, 9],
        seed=5,
        num_text_bytes_delivered=2,
        attempt=2,
        arithmetic_fingerprint="f",
    )
    assert rest.sampling == pb.SamplingParams(temperature=0.5, seed=5, max_tokens=46)
    assert answer.rest(0, 100).request.continuation.attempt == MAX_ATTEMPTS


def test_each_choice_has_a_request_of_its_own() -> None:
    """A choice that lacks something is asked for with its own seed, tokens and index."""
    answer = begun(
        piece(7, text="a"),
        piece(3, text="b", index=2),
        piece(4, index=2, finish_reason=pb.FINISH_REASON_STOP),
        n=3,
        max_tokens=9,
    )
    assert answer.unfinished(None) == [0, 1]
    call = answer.rest(1, 1)
    assert list(call.request.continuation.token_ids) == []
    assert call.request.sampling == pb.SamplingParams(seed=choice_seed(5, 1), max_tokens=9)
    start = pb.GenerationStart(
        seed=choice_seed(5, 1), arithmetic_fingerprint="f", num_prompt_tokens=4
    )
    usage = pb.Usage(num_draft_tokens=2)
    taken = answer.take(call, piece(1, start=start, usage=usage))
    assert taken == piece(1, index=1)


def test_entries_of_the_prompt_come_once() -> None:
    """Log-probabilities of the prompt that were told before the break are not told again."""
    entries = [pb.TokenLogprobs(chosen=pb.TokenLogprob(token_id=i)) for i in range(3)]
    answer = begun(piece(prompt_logprobs=entries[:2]), prompt_logprobs=0)
    call = answer.rest(0, 1)
    assert call.request.sampling.HasField("prompt_logprobs")
    assert answer.take(call, piece(prompt_logprobs=entries[:1], start=START)) is None
    assert answer.take(call, piece(prompt_logprobs=entries[1:])) == piece(
        prompt_logprobs=entries[2:]
    )
    assert not answer.rest(0, 2).request.sampling.HasField("prompt_logprobs")


@pytest.mark.parametrize(
    "change", [{"seed": 6}, {"arithmetic_fingerprint": "g"}, {"num_prompt_tokens": 5}]
)
def test_another_answer_is_refused(change: dict[str, Any]) -> None:
    """A worker that would go on with other arithmetic, seed or prompt is found by its start."""
    answer = begun(piece(7))
    start = pb.GenerationStart()
    start.CopyFrom(START)
    for name, value in change.items():
        setattr(start, name, value)
    with pytest.raises(NotTheSame):
        answer.take(answer.rest(0, 1), piece(8, start=start))


def test_usage_counts_what_was_delivered() -> None:
    """Tokens are those the client has; of drafts and steps, what the finished calls told."""
    answer = begun(piece(7, 8), piece(1, index=1), n=2)
    told = pb.Usage(
        num_prompt_tokens=4,
        num_completion_tokens=99,
        num_cached_tokens=6,
        num_draft_tokens=4,
        num_accepted_tokens=1,
        num_steps=3,
        gamma_histogram=[1, 0, 2],
        policy_version="p1",
    )
    for choice, histogram in ((0, [1, 0, 2]), (1, [3])):
        del told.gamma_histogram[:]
        told.gamma_histogram.extend(histogram)
        call = answer.rest(choice, 1)
        last = piece(5, finish_reason=pb.FINISH_REASON_LENGTH, usage=told)
        taken = answer.take(call, last)
        assert taken is not None
        assert not taken.HasField("usage")
    assert answer.usage() == pb.Usage(
        num_prompt_tokens=4,
        num_completion_tokens=5,
        num_cached_tokens=4,
        num_draft_tokens=8,
        num_accepted_tokens=2,
        num_steps=6,
        gamma_histogram=[4, 0, 2],
        policy_version="p1",
    )


async def test_merged_streams_read_one_ahead_and_close_together() -> None:
    """What nobody takes is not read on; an error of one stream ends and closes the others."""
    read = [0, 0]
    closed = []

    async def stream(i: int, count: int) -> AsyncGenerator[int]:
        try:
            for _ in range(count):
                read[i] += 1
                yield i
            raise RuntimeError(f"stream {i}")
        finally:
            closed.append(i)

    both = merged([stream(0, 5), stream(1, 10_000)])
    assert await anext(both) in (0, 1)
    for _ in range(50):
        await asyncio.sleep(0)
    assert sum(read) <= 5
    with pytest.raises(RuntimeError, match="stream 0"):
        _ = [item async for item in both]
    assert sorted(closed) == [0, 1]
    assert read[1] < 100
