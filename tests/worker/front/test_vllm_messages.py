"""What goes out at `vllm.grpc.engine` for the pieces of an answer, piece by piece."""

from __future__ import annotations

import itertools

import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb

from worker.front.pieces import Piece, PositionLogprobs, Start, TokenLogprob
from worker.messages import RowUsage
from worker.vllm.response import Messages

START = Start(seed=1, fingerprint="", num_prompt_tokens=3)
USAGE = RowUsage(
    num_prompt_tokens=3,
    num_completion_tokens=5,
    num_cached_tokens=2,
    num_draft_tokens=8,
    num_accepted_tokens=6,
    num_steps=3,
    gamma_histogram=(1, 0, 2),
    policy_version="1",
    num_preemptions=0,
)


def position(token_id: int, num_top: int) -> PositionLogprobs:
    """An entry whose values tell its token."""
    tops = [TokenLogprob(100 + k, -0.25 * k, b"") for k in range(num_top)]
    return PositionLogprobs(TokenLogprob(token_id, -float(token_id), b""), tops)


def sent(messages: Messages, *pieces: Piece) -> list[pb.GenerateResponse]:
    """Everything that goes out for them."""
    return list(itertools.chain.from_iterable(map(messages.take, pieces)))


def made(stream: bool, n: int = 1, ends: tuple[int, ...] = ()) -> Messages:
    """Of a request with its parameters."""
    return Messages(stream=stream, num_choices=n, ends=frozenset(ends), first_token_id=9)


def two_choices() -> list[Piece]:
    """Interleaved; choice 1 ends first."""
    return [
        Piece(index=0, token_ids=[1], start=START),
        Piece(index=1, token_ids=[5, 6], finish_reason="stop", stop_string="x"),
        Piece(index=0, token_ids=[2, 3], finish_reason="length", usage=USAGE),
    ]


def test_choices_are_streamed_as_they_come_and_end_one_by_one() -> None:
    """Each message names its choice; the last of all carries what is known at the end."""
    out = sent(made(True, 2), *two_choices())
    kinds = [message.WhichOneof("response") for message in out]
    assert kinds == ["chunk", "chunk", "complete", "chunk", "complete"]
    bodies = [getattr(message, kind) for message, kind in zip(out, kinds, strict=True)]
    assert [body.index for body in bodies] == [0, 1, 1, 0, 0]
    assert [body.completion_tokens for body in bodies] == [1, 2, 2, 2, 3]
    assert {body.prompt_tokens for body in bodies} == {3}
    assert list(bodies[2].output_ids) == [5, 6]
    assert (bodies[2].finish_reason, bodies[2].matched_stop_str) == ("stop", "x")
    assert (bodies[2].spec_draft_tokens, bodies[2].cached_tokens) == (0, 0)
    assert list(bodies[4].output_ids) == [1, 2, 3]
    assert (bodies[4].spec_draft_tokens, bodies[4].spec_accepted_tokens) == (8, 6)
    assert bodies[4].cached_tokens == 2


def test_choices_of_a_whole_answer_come_together_in_order() -> None:
    """One complete for each choice, by index, when the last has ended."""
    messages = made(False, 2)
    *before, last = two_choices()
    assert sent(messages, *before) == []
    out = [message.complete for message in messages.take(last)]
    assert [(one.index, list(one.output_ids)) for one in out] == [(0, [1, 2, 3]), (1, [5, 6])]
    assert sum(one.spec_draft_tokens for one in out) == 8
    assert max(one.cached_tokens for one in out) == 2


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("num_top", [0, 2])
def test_log_probabilities_stand_by_their_tokens(stream: bool, num_top: int) -> None:
    """Of every token once, in order; the prompt's first token has none, and no list is empty."""
    out = sent(
        made(stream),
        Piece(index=0, prompt_logprobs=[position(7, num_top)], start=START),
        Piece(index=0, prompt_logprobs=[position(8, num_top)]),
        Piece(index=0, token_ids=[1, 2], logprobs=[position(1, num_top), position(2, num_top)]),
        Piece(
            index=0,
            token_ids=[3],
            logprobs=[position(3, num_top)],
            finish_reason="length",
            usage=USAGE,
        ),
    )
    bodies = [getattr(message, message.WhichOneof("response")) for message in out]
    scored = [body.output_logprobs for body in bodies if body.HasField("output_logprobs")]
    assert len(scored) == (2 if stream else 1)
    assert [i for one in scored for i in one.token_ids] == [1, 2, 3]
    assert [x for one in scored for x in one.token_logprobs] == [-1.0, -2.0, -3.0]
    tops = [top for one in scored for top in one.top_logprobs]
    assert [list(top.token_ids) for top in tops] == ([[100, 101]] * 3 if num_top else [])
    prompts = [body.input_logprobs for body in bodies if body.HasField("input_logprobs")]
    assert [body.HasField("input_logprobs") for body in bodies].index(True) == 0
    (prompt,) = prompts
    assert list(prompt.token_ids) == [9, 7, 8]
    assert [one.HasField("value") for one in prompt.token_logprobs] == [False, True, True]
    assert [one.value for one in prompt.token_logprobs] == [0.0, -7.0, -8.0]
    assert [len(top.values) for top in prompt.top_logprobs] == ([0, 2, 2] if num_top else [])


def test_the_id_that_stopped_is_named_unless_it_is_an_end_of_the_model() -> None:
    """Only ids that the request gave are a match."""
    for ends, named in (((4,), 4), ((), 0)):
        piece = Piece(index=0, token_ids=[4], start=START, finish_reason="stop", usage=USAGE)
        complete = made(False, ends=ends).take(piece)[0].complete
        assert complete.WhichOneof("matched_stop") == ("matched_token_id" if named else None)
        assert complete.matched_token_id == named


@pytest.mark.parametrize("stream", [True, False])
def test_an_aborted_answer_ends_every_choice(stream: bool) -> None:
    """Choices that had ended keep their reason; the others have what came, or nothing."""
    messages = made(stream, 3)
    sent(messages, *two_choices()[:2])
    out = [message.complete for message in messages.aborted()]
    ends = [(one.index, one.finish_reason, list(one.output_ids)) for one in out]
    aborted = [(0, "abort", [1]), (2, "abort", [])]
    assert ends == (aborted if stream else [aborted[0], (1, "stop", [5, 6]), aborted[1]])
