"""Answers that were begun elsewhere: what is new follows what the client has, byte by byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
from calls import answer, asked, detail, refusal
from google.rpc import error_details_pb2
from tiny import EOS_TOKEN_ID, byte_tokenizer

from nightjar.v1 import generation_pb2 as pb
from worker.text.detokenizer import Detokenizer
from worker.text.tokenizer import Tokenizer

FrontMaker = Callable[..., Any]
TINY = Tokenizer(byte_tokenizer())
TEXT = "a🦉 the XY日"  # an owl in four tokens, the beginning of a stop string, a cut character
STOP = "XYZ"


def resumed(
    request: pb.GenerateRequest, token_ids: list[int], delivered: int, **fields: Any
) -> pb.GenerateRequest:
    """The request, to be continued after these tokens and so many bytes of text."""
    copy = pb.GenerateRequest()
    copy.CopyFrom(request)
    given = {"seed": 41, "attempt": 1, "arithmetic_fingerprint": "fake", **fields}
    copy.continuation.CopyFrom(
        pb.Continuation(token_ids=token_ids, num_text_bytes_delivered=delivered, **given)
    )
    return copy


def text_of(pieces: list[pb.GenerateResponse]) -> str:
    """What the pieces show."""
    return "".join(piece.text for piece in pieces)


def ids_of(pieces: list[pb.GenerateResponse]) -> list[int]:
    """Their token ids."""
    return [token_id for piece in pieces for token_id in piece.token_ids]


async def test_cut_at_every_token_the_rest_follows_exactly(front: FrontMaker) -> None:
    """Wherever an answer breaks off, in a character or a stop's beginning, ids and text go on."""
    async with front() as worker:
        num_tokens = len(TINY.encode(TEXT))
        request = asked(TEXT, max_tokens=num_tokens * 2, stop=[STOP], logprobs=0, seed=3)
        whole = await answer(worker, request)
        ids, text = ids_of(whole), text_of(whole)
        assert text == TEXT * 2
        shown, detokenizer = "", Detokenizer(TINY, (STOP,))
        for k in range(1, len(ids)):
            shown += detokenizer.push(ids[k - 1])
            rest = await answer(worker, resumed(request, ids[:k], len(shown.encode())))
            assert ids_of(rest) == ids[k:]
            assert shown + text_of(rest) == text
            assert rest[0].start.seed == 41
            assert rest[0].start.num_prompt_tokens == num_tokens
            assert rest[-1].usage.num_completion_tokens == len(ids)
            assert rest[-1].finish_reason == whole[-1].finish_reason
            assert sum(len(piece.logprobs) for piece in rest) == len(ids) - k
        told = worker.told("Submit")[1]
        assert f"prior_token_ids=[{ids[0]}]" in told
        assert "seed=41," in told
        assert f"max_tokens={len(ids)}," in told


async def test_text_that_never_reached_the_client_comes_with_the_next(front: FrontMaker) -> None:
    """Tokens that arrived without all of their text: the missing bytes come first, once."""
    async with front() as worker:
        request = asked("abcdef", max_tokens=6)
        ids = TINY.encode("abcdef")
        for delivered in range(5):
            rest = await answer(worker, resumed(request, ids[:4], delivered))
            assert text_of(rest) == "abcdef"[delivered:]
            assert ids_of(rest) == ids[4:]


async def test_nothing_generated_yet(front: FrontMaker) -> None:
    """Without prior tokens it is the request with that seed, its prompt's entries included."""
    async with front() as worker:
        request = asked("abcdef", max_tokens=6, prompt_logprobs=0)
        rest = await answer(worker, resumed(request, [], 0))
        assert text_of(rest) == "abcdef"
        assert sum(len(piece.prompt_logprobs) for piece in rest) == 5
        rest = await answer(worker, resumed(request, TINY.encode("a"), 1))
        assert text_of(rest) == "bcdef"
        assert not any(piece.prompt_logprobs for piece in rest)


async def test_other_arithmetic_is_a_typed_error(front: FrontMaker) -> None:
    """FAILED_PRECONDITION names the field and both fingerprints; nothing reaches the engine."""
    async with front() as worker:
        request = resumed(asked(max_tokens=6), [70], 0, arithmetic_fingerprint="other")
        error = await refusal(worker, request)
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "begun by arithmetic 'other'; this worker's is 'fake'" in error.details()
        violations = detail(error, error_details_pb2.BadRequest).field_violations
        assert [v.field for v in violations] == ["continuation.arithmetic_fingerprint"]
        assert not worker.told("Submit")


OWL = TINY.encode("🦉")
BEYOND = "token_ids: go on after token 2, which ended the answer"


IMPOSSIBLE: list[tuple[list[int], int, dict[str, Any], str]] = [
    (OWL, 5, {}, "num_text_bytes_delivered: 5; the tokens so far show 4 bytes"),
    (OWL, 2, {}, "num_text_bytes_delivered: 2 lies within a character"),
    (OWL[:3], 1, {}, "num_text_bytes_delivered: 1; the tokens so far show 0 bytes"),
    ([70], 0, {"max_tokens": 1}, "token_ids: the answer has 1 tokens; at most 1"),
    ([70] * 510, 0, {}, "token_ids: the answer has 510 tokens; at most 509"),
    ([320], 0, {}, "token_ids[0]: 320 lies outside"),
    (TINY.encode("aXb"), 1, {"stop": ["X"]}, BEYOND),
    ([70, EOS_TOKEN_ID, 70], 0, {}, BEYOND),
    ([70, 71, 70], 2, {"stop_token_ids": [71]}, BEYOND),
    ([70], 1, {"n": 2}, "sampling.n: must be 1"),
]


async def test_what_no_answer_of_these_parameters_could_be(front: FrontMaker) -> None:
    """Prior tokens and text that contradict each other or the parameters are INVALID_ARGUMENT."""
    async with front() as worker:
        for token_ids, delivered, sampling, said in IMPOSSIBLE:
            error = await refusal(worker, resumed(asked(**sampling), token_ids, delivered))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert said in error.details()
        assert not worker.told("Submit")


async def test_ends_that_did_not_count_are_continued(front: FrontMaker) -> None:
    """A stop string before min_tokens and an end token under ignore_eos are text like any other."""
    async with front() as worker:
        ids = TINY.encode("aXYZbc")
        request = asked("aXYZbc", max_tokens=6, min_tokens=6, stop=[STOP])
        rest = await answer(worker, resumed(request, ids[:5], 5))
        assert text_of(rest) == "c"
        request = asked("abc", max_tokens=3, ignore_eos=True)
        assert len(ids_of(await answer(worker, resumed(request, [EOS_TOKEN_ID], 0)))) == 2
