"""Several answers to one prompt: requests of their own to the engine, one answer to the client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
from calls import answer, asked, detail, refusal
from conditions import until
from google.rpc import error_details_pb2

from nightjar.seeds import choice_seed
from nightjar.v1 import generation_pb2 as pb

FrontMaker = Callable[..., Any]


async def test_choices_stream_beside_each_other_with_one_usage(front: FrontMaker) -> None:
    """Each choice has its text, its seed and one reason; the last message alone has the sum."""
    async with front("--tick-ms=10") as worker:
        pieces = await answer(worker, asked("abc", max_tokens=6, seed=7, n=3))
        for index in range(3):
            own = [piece for piece in pieces if piece.index == index]
            assert "".join(piece.text for piece in own) == "abcabc"
            reasons = [piece.finish_reason for piece in own]
            assert reasons == [0] * (len(own) - 1) + [pb.FINISH_REASON_LENGTH]
        assert {piece.index for piece in pieces} == {0, 1, 2}
        assert [piece.HasField("start") for piece in pieces] == [True] + [False] * (len(pieces) - 1)
        assert [piece.HasField("usage") for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        usage = pieces[-1].usage
        assert usage.num_prompt_tokens == 1  # what the engine says of each
        assert usage.num_completion_tokens == 3 * 6
        assert (usage.num_draft_tokens, usage.num_accepted_tokens) == (12, 9)
        assert list(usage.gamma_histogram) == [18, 6]
        told = worker.told("Submit")
        assert [f"seed={choice_seed(7, i)}," in told[i] for i in range(3)] == [True] * 3
        assert len({choice_seed(7, i) for i in range(3)}) == 3


async def test_other_choices_wait_for_the_first_token(front: FrontMaker) -> None:
    """They find the prompt cached: a later request reaches the engine before them."""
    async with front("--hold") as worker:
        call = worker.generation.Generate(asked("abc", n=3))
        reading = asyncio.create_task(call.read())
        await until(lambda: len(worker.told("Submit")) == 1, "choice 0 is there")
        other = worker.generation.Generate(asked("later", seed=99))
        also = asyncio.create_task(other.read())
        await until(lambda: len(worker.told("Submit")) == 2, "another request is there")
        assert "seed=99," in worker.told("Submit")[1]
        call.cancel()
        other.cancel()
        await asyncio.gather(reading, also, return_exceptions=True)


async def test_cancelling_ends_every_choice(front: FrontMaker) -> None:
    """One client's cancellation aborts all that its request became."""
    async with front("--tick-ms=10") as worker:
        call = worker.generation.Generate(asked(max_tokens=500, n=4))
        await call.read()
        await until(lambda: len(worker.told("Submit")) == 4, "all have begun")
        call.cancel()
        await until(lambda: len(worker.told("Abort")) == 4, "all are aborted")


async def test_each_choice_takes_a_place(front: FrontMaker) -> None:
    """Every answer needs a place: too few are RESOURCE_EXHAUSTED, never enough INVALID_ARGUMENT."""
    async with front("--hold", max_num_seqs=1, max_waiting=2) as worker:
        error = await refusal(worker, asked(n=4))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert error.details() == "sampling.n: 4; this worker admits at most 3 answers"
        call = worker.generation.Generate(asked(n=2))
        reading = asyncio.create_task(call.read())
        await until(lambda: len(worker.told("Submit")) == 1, "two places are taken")
        error = await refusal(worker, asked(n=2))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        delay = detail(error, error_details_pb2.RetryInfo).retry_delay
        assert delay.seconds + delay.nanos / 1e9 > 0
        third = worker.generation.Generate(asked())
        also = asyncio.create_task(third.read())
        await until(lambda: len(worker.told("Submit")) == 2, "the third place is taken")
        call.cancel()
        third.cancel()
        await asyncio.gather(reading, also, return_exceptions=True)


async def test_prompts_that_wait_are_bounded_in_tokens(front: FrontMaker) -> None:
    """Each choice counts its prompt until its first token; whatever finds none waiting enters."""
    async with front("--hold", max_waiting_tokens=10) as worker:
        first = worker.generation.Generate(asked("abcdefghijkl"))  # alone, it may exceed the bound
        reading = asyncio.create_task(first.read())
        await until(lambda: len(worker.told("Submit")) == 1, "it is inside")
        error = await refusal(worker, asked("x"))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "prompts of 12 tokens are waiting; 1 more would exceed 10" in error.details()
        assert detail(error, error_details_pb2.RetryInfo).retry_delay.ByteSize() > 0
        first.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await until(lambda: len(worker.told("Abort")) == 1, "it has left")
        calls = [worker.generation.Generate(asked("xyz"))]
        await until(lambda: len(worker.told("Submit")) == 2, "three tokens wait")
        error = await refusal(worker, asked("xyzv", n=2))
        assert "prompts of 3 tokens are waiting; 8 more would exceed 10" in error.details()
        calls.append(worker.generation.Generate(asked("xyz", n=2)))
        await until(lambda: len(worker.told("Submit")) == 3, "nine tokens wait")
        for call in calls:
            call.cancel()
    async with front("--tick-ms=10", max_waiting_tokens=10) as worker:
        call = worker.generation.Generate(asked("abcdefghijkl", max_tokens=400))
        await call.read()  # its prompt waits no more
        assert len(await answer(worker, asked("abcdefghij", max_tokens=2))) > 0
        call.cancel()
