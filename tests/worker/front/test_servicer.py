"""The servicers over real gRPC, with a fake engine process at the channel's end."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from calls import answer, asked, chat, detail, refusal
from conditions import until
from google.rpc import error_details_pb2

from nightjar.v1 import generation_pb2 as pb

FrontMaker = Callable[..., Any]


async def test_an_answer_streams_with_its_start_first_and_its_usage_last(front: FrontMaker) -> None:
    """The first message carries the start, the last the reason and the usage, none in between."""
    async with front("--tick-ms=20") as worker:
        pieces = await answer(worker, asked("abc", max_tokens=6, seed=7))
        assert "".join(piece.text for piece in pieces) == "abcabc"
        assert sum(len(piece.token_ids) for piece in pieces) == 6
        assert len(pieces) > 2
        assert [piece.HasField("start") for piece in pieces] == [True] + [False] * (len(pieces) - 1)
        assert pieces[0].start.seed == 7
        assert pieces[0].start.arithmetic_fingerprint == "fake"
        assert pieces[0].start.num_prompt_tokens == 3
        assert [piece.HasField("usage") for piece in pieces][-2:] == [False, True]
        last = pieces[-1]
        assert last.finish_reason == pb.FINISH_REASON_LENGTH
        assert last.usage.num_completion_tokens == 6
        assert (last.usage.num_draft_tokens, last.usage.num_accepted_tokens) == (4, 3)
        assert list(last.usage.gamma_histogram) == [6, 2]
        assert last.usage.policy_version == "1-fixed"


async def test_every_form_of_prompt_reaches_the_engine(front: FrontMaker) -> None:
    """Text, chat and token ids arrive as the ids that the tokenizer gives."""
    async with front() as worker:
        ids = pb.GenerateRequest(tokens=pb.TokenPrompt(token_ids=[70, 71]))
        ids.sampling.max_tokens = 2
        assert (await answer(worker, ids))[-1].usage.num_completion_tokens == 2
        chat = pb.GenerateRequest()
        chat.chat.messages.add(role="user", content="hello")
        chat.sampling.max_tokens = 1
        await answer(worker, chat)
        first, second = worker.told("Submit")
        assert "prompt_token_ids=[70, 71]" in first
        assert "prompt_token_ids=[1, " in second  # <|im_start|>


async def test_defaults_are_filled_in_and_a_seed_is_drawn(front: FrontMaker) -> None:
    """Two requests without a seed get two, which their clients are told."""
    async with front() as worker:
        seeds = [(await answer(worker, asked(max_tokens=1)))[0].start.seed for _ in range(2)]
        assert seeds[0] != seeds[1]
        told = worker.told("Submit")[0]
        assert f"seed={seeds[0]}" in told
        assert "temperature=1.0, top_p=1.0, top_k=0, min_p=0.0" in told
        assert "max_gamma=None" in told
        request = asked(top_k=-1, temperature=0, seed=2**64 - 1)
        request.speculation.max_gamma = 0
        pieces = await answer(worker, request)
        assert pieces[-1].usage.num_completion_tokens == 512 - 3  # what the context still held
        told = worker.told("Submit")[2]
        assert f"seed={2**64 - 1}" in told
        assert "temperature=0.0" in told
        assert "top_k=0" in told
        assert "max_gamma=0" in told


async def test_no_part_of_a_stop_string_is_shown(front: FrontMaker) -> None:
    """A stop string over three tokens ends the text before it, and no message shows its start."""
    async with front("--tick-ms=10") as worker:
        request = asked("abcXYZ", max_tokens=6, stop=["XYZ"])
        pieces = await answer(worker, request)
        assert "".join(piece.text for piece in pieces) == "abc"
        assert pieces[-1].finish_reason == pb.FINISH_REASON_STOP


async def test_text_that_only_looked_like_a_stop_is_shown_at_the_end(front: FrontMaker) -> None:
    """What was held back for a stop string that never came is flushed."""
    async with front() as worker:
        pieces = await answer(worker, asked("abcXY", max_tokens=5, stop=["XYZ"]))
        assert "".join(piece.text for piece in pieces) == "abcXY"


async def test_a_character_is_never_split(front: FrontMaker) -> None:
    """A character of four byte tokens comes whole, and its tokens come at once."""
    async with front("--tick-ms=10") as worker:
        pieces = await answer(worker, asked("a🦉", max_tokens=10))
        assert "".join(piece.text for piece in pieces) == "a🦉a🦉"
        assert all("\ufffd" not in piece.text for piece in pieces)
        assert any(piece.token_ids and not piece.text for piece in pieces)


async def test_special_tokens_have_no_text(front: FrontMaker) -> None:
    """Ids of special tokens are delivered, their text is not."""
    async with front() as worker:
        request = pb.GenerateRequest(tokens=pb.TokenPrompt(token_ids=[2, 70]))
        request.sampling.max_tokens = 4
        pieces = await answer(worker, request)
        assert [i for piece in pieces for i in piece.token_ids] == [2, 70, 2, 70]
        assert len("".join(piece.text for piece in pieces)) == 2


BAD_FIELDS: list[tuple[dict[str, object], str]] = [
    ({"temperature": float("nan")}, "sampling.temperature"),
    ({"top_p": 0.0}, "sampling.top_p"),
    ({"max_tokens": 0}, "sampling.max_tokens"),
    ({"max_tokens": 512}, "sampling.max_tokens"),
    ({"min_tokens": 10**8}, "sampling.min_tokens"),
    ({"min_tokens": 511}, "sampling.min_tokens"),  # with the prompt beyond the context
    ({"stop": ["x"] * 17}, "sampling.stop"),
    ({"stop_token_ids": [320]}, "sampling.stop_token_ids[0]"),
    ({"logit_bias": {320: 1.0}}, "sampling.logit_bias[320]"),
    ({"n": 10**9}, "sampling.n"),
    ({"logprobs": 10**6}, "sampling.logprobs"),
]


async def test_bad_fields_are_named(front: FrontMaker) -> None:
    """INVALID_ARGUMENT names the field in its sentence and in its details; the next call works."""
    async with front() as worker:
        for fields, named in BAD_FIELDS:
            error = await refusal(worker, asked(**fields))
            assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
            violations = detail(error, error_details_pb2.BadRequest).field_violations
            assert [violation.field for violation in violations] == [named]
            assert named in error.details()
        assert not worker.told("Submit")
        assert (await worker.status()).num_waiting == 0
        assert (await answer(worker, asked(max_tokens=1)))[-1].usage.num_completion_tokens == 1


async def test_bad_prompts_are_named(front: FrontMaker) -> None:
    """Empty, too long and unknown: each refusal says what and where."""
    async with front() as worker:
        for request, words in (
            (pb.GenerateRequest(), "prompt"),
            (pb.GenerateRequest(text=""), "text"),
            (asked("x" * 5000), "5000 tokens; the context is 512"),
            (asked("x" * 3_900_000), "text: 3900000 characters can never fit"),
            (chat("y" * 3_900_000), "chat.messages: 3900000 characters can never fit"),
            (pb.GenerateRequest(tokens=pb.TokenPrompt(token_ids=[-1])), "tokens.token_ids[0]"),
            (pb.GenerateRequest(text="a", model="other"), "unknown model 'other'"),
        ):
            error = await refusal(worker, request)
            assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert words in error.details()


async def test_a_cancelled_call_is_aborted_in_the_engine(front: FrontMaker) -> None:
    """The abort arrives while tokens stream, and also while the request is queued."""
    async with front("--tick-ms=20") as worker:
        call = worker.generation.Generate(asked(max_tokens=500))
        await call.read()
        call.cancel()
        await until(lambda: len(worker.told("Abort")) == 1, "the abort arrived")
        await until(lambda: _num_free(worker, 100), "the blocks are free")
    async with front("--hold") as worker:
        before = len(worker.told("Abort"))
        call = worker.generation.Generate(asked(max_tokens=500))
        reading = asyncio.create_task(call.read())
        await until(lambda: len(worker.told("Submit")) == 2, "the request arrived")
        call.cancel()
        await until(lambda: len(worker.told("Abort")) == before + 1, "the abort arrived")
        await asyncio.gather(reading, return_exceptions=True)


async def _num_free(worker: Any, number: int) -> bool:
    return bool((await worker.status()).num_free_blocks == number)


async def test_a_deadline_aborts_in_the_engine(front: FrontMaker) -> None:
    """A call that runs out of time ends with DEADLINE_EXCEEDED, and its request is aborted."""
    async with front("--hold") as worker:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await worker.generation.Generate(asked(), timeout=0.3).read()
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: len(worker.told("Abort")) == 1, "the abort arrived")


async def test_a_client_that_vanishes_is_aborted(front: FrontMaker) -> None:
    """Closing the connection under a stream aborts its request."""
    async with front("--tick-ms=20") as worker:
        code = (
            "import grpc, os\n"
            "from nightjar.v1 import generation_pb2 as pb, generation_pb2_grpc as rpc\n"
            f"stub = rpc.GenerationServiceStub(grpc.insecure_channel({worker.address!r}))\n"
            "next(iter(stub.Generate(pb.GenerateRequest(text='abc'))))\n"
            "os._exit(0)\n"
        )
        run = [sys.executable, "-c", code]
        assert (await asyncio.to_thread(subprocess.run, run, check=False)).returncode == 0
        await until(lambda: len(worker.told("Abort")) == 1, "the abort arrived")


async def test_a_full_queue_refuses_with_a_hint(front: FrontMaker) -> None:
    """Beyond batch and queue a request gets RESOURCE_EXHAUSTED and a time to retry after."""
    async with front("--hold", max_num_seqs=1, max_waiting=1) as worker:
        calls = [worker.generation.Generate(asked()) for _ in range(2)]
        await until(lambda: len(worker.told("Submit")) == 2, "two requests are inside")
        error = await refusal(worker, asked())
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        delay = detail(error, error_details_pb2.RetryInfo).retry_delay
        assert delay.seconds + delay.nanos / 1e9 > 0
        assert (await worker.status()).num_running == 2
        calls[0].cancel()
        await until(lambda: len(worker.told("Abort")) == 1, "one left")
        calls.append(worker.generation.Generate(asked()))
        await until(lambda: len(worker.told("Submit")) == 3, "another is let in")
        for call in calls:
            call.cancel()


async def test_streams_are_joined_under_load_alone(front: FrontMaker) -> None:
    """With many streams an answer comes in fewer messages than steps; with one, step by step."""
    async with front("--tick-ms=4", stream_interval_ms=100, max_num_seqs=16) as worker:
        alone = await answer(worker, asked(max_tokens=40))
        others = [worker.generation.Generate(asked(max_tokens=500)) for _ in range(10)]
        for call in others:  # they outlast the four
            await call.read()
        many = await asyncio.gather(*(answer(worker, asked(max_tokens=40)) for _ in range(4)))
        for call in others:
            call.cancel()
        assert len(alone) > 20
        for pieces in many:
            assert sum(len(piece.token_ids) for piece in pieces) == 40
            assert len(pieces) < 15
            assert len(pieces[0].token_ids) < 10  # the first token waits for nothing
