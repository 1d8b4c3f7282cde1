"""One validator, one queue and one stream behind both of a worker's services."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Callable
from typing import Any

import grpc
import pytest
from calls import refusal
from smg_grpc_proto import vllm_engine_pb2 as vllm_pb
from smg_grpc_proto import vllm_engine_pb2_grpc
from worker_process import PROMPT, Worker, ids

import worker.server
import worker.vllm.server
from nightjar import validation
from nightjar.v1 import generation_pb2 as pb
from worker.front.answers import answer
from worker.front.pieces import Request

FrontMaker = Callable[..., Any]
PENALIZED: dict[str, Any] = {
    "temperature": 0.75,
    "top_p": 0.5,
    "top_k": 9,
    "min_p": 0.125,
    "seed": 7,
    "max_tokens": 12,
    "min_tokens": 2,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.25,
    "logit_bias": {80: -1.5, 7: 2.0},
    "stop": ["QQ"],
    "stop_token_ids": [99],
    "ignore_eos": True,
}


def theirs(text: str, stream: bool = False, **sampling: Any) -> vllm_pb.GenerateRequest:
    """A request of the public protocol."""
    params = vllm_pb.SamplingParams(skip_special_tokens=True, **sampling)
    return vllm_pb.GenerateRequest(text=text, sampling_params=params, stream=stream)


def ours(text: str, **sampling: Any) -> pb.GenerateRequest:
    """The same in our own."""
    return pb.GenerateRequest(text=text, sampling=pb.SamplingParams(**sampling))


async def test_both_judge_and_answer_by_the_same(
    front: FrontMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The validator gets one message from both, and one function makes both answers."""
    judged: list[bytes] = []
    asked: list[Request] = []
    validate = validation.validate

    def noted(request: pb.GenerateRequest, *limits: Any) -> None:
        judged.append(request.SerializeToString(deterministic=True))
        validate(request, *limits)

    def noting(state: Any, request: Request, on_end: Any) -> AsyncGenerator[Any]:
        asked.append(request)
        return answer(state, request, on_end)

    monkeypatch.setattr(validation, "validate", noted)
    for module in (worker.server, worker.vllm.server):
        monkeypatch.setattr(module, "answer", noting)
    fields = {**PENALIZED, "n": 2, "logprobs": 2}
    async with front("--tick-ms=5") as one:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(one.channel)
        told = [message async for message in stub.Generate(theirs("abc", **fields))]
        pieces = [piece async for piece in one.generation.Generate(ours("abc", **fields))]
    assert judged[0] == judged[1] == ours("abc", **fields).SerializeToString(deterministic=True)
    assert asked[0] == asked[1]
    for index, message in enumerate(told):
        own = [piece for piece in pieces if piece.index == index]
        assert list(message.complete.output_ids) == ids(own)
        scored = [entry.chosen.logprob for piece in own for entry in piece.logprobs]
        assert list(message.complete.output_logprobs.token_logprobs) == scored


BAD: list[dict[str, Any]] = [
    {"temperature": math.nan},
    {"temperature": -0.5},
    {"temperature": 101.0},
    {"top_p": 1.5},
    {"min_p": 2.0},
    {"max_tokens": 0},
    {"max_tokens": 512},
    {"min_tokens": 10**8},
    {"min_tokens": 5, "max_tokens": 4},
    {"n": 129},
    {"n": 10**9},
    {"logprobs": 21},
    {"prompt_logprobs": 21},
    {"repetition_penalty": 2.5},
    {"presence_penalty": -3.0},
    {"frequency_penalty": math.inf},
    {"stop": ["x"] * 17},
    {"stop": ["x" * 257]},
    {"stop": [""]},
    {"stop_token_ids": [1] * 65},
    {"stop_token_ids": [325], "min_tokens": 1},
    {"logit_bias": {320: 1.0}},
    {"logit_bias": {-1: 1.0}},
    {"logit_bias": {1: 101.0}},
    {"logit_bias": dict.fromkeys(range(301), 1.0)},
]


async def test_both_refuse_with_one_sentence(front: FrontMaker) -> None:
    """Each value that can never work is INVALID_ARGUMENT in the same words, and no work."""
    async with front() as one:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(one.channel)
        for fields in BAD:
            error = await refusal(one, ours("abc", **fields))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                _ = [message async for message in stub.Generate(theirs("abc", **fields))]
            assert error.code() is caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert error.details() == caught.value.details()
        assert not one.told("Submit")


async def test_an_engine_that_dies_ends_both(front: FrontMaker) -> None:
    """In the middle of an answer, each client is told INTERNAL, and by the same words."""
    async with front("--tick-ms=20", "--die-at=10") as one:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(one.channel)
        call = stub.Generate(theirs("abc", stream=True, max_tokens=400))
        first = await call.read()
        error = await refusal(one, ours("abc", max_tokens=400))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _rest(call)
        assert await one.task == 1  # cancelled while it ends, it would leave its port open
    assert len(first.chunk.token_ids) > 0
    assert error.code() is caught.value.code() is grpc.StatusCode.INTERNAL
    assert error.details() == caught.value.details()


async def _rest(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


def choices(pieces: list[pb.GenerateResponse]) -> dict[int, tuple[Any, ...]]:
    """Ids, log-probabilities and reason of each choice."""
    names = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}
    found = {}
    for index in {piece.index for piece in pieces}:
        own = [piece for piece in pieces if piece.index == index]
        scored = [entry.chosen.logprob for piece in own for entry in piece.logprobs]
        found[index] = ids(own), scored, names[own[-1].finish_reason]
    return found


def their_choices(messages: list[Any]) -> dict[int, tuple[Any, ...]]:
    """The same of the public protocol's messages, streamed or not."""
    scored: dict[int, list[float]] = {}
    ends = {}
    for message in messages:
        body = getattr(message, message.WhichOneof("response"))
        scored.setdefault(body.index, []).extend(body.output_logprobs.token_logprobs)
        if message.HasField("complete"):
            assert body.index not in ends
            ends[body.index] = list(body.output_ids), body.finish_reason
    return {i: (token_ids, scored[i], reason) for i, (token_ids, reason) in ends.items()}


def test_a_drafted_answer_is_plain_decodings_at_both(worker: Worker) -> None:
    """With choices, stops, limits, penalties and scores, streamed or not: what gamma 0 gives."""
    plain = ids(list(worker.generate(max_tokens=12)))
    greedy = {"temperature": 0.0, "max_tokens": 12}
    cases: list[dict[str, Any]] = [
        {**PENALIZED, "n": 3, "stop": ["e", " t"], "logprobs": 2, "prompt_logprobs": 0},
        *({**greedy, "max_tokens": k, "logprobs": 0} for k in (1, 2, 3)),
        *({**greedy, "stop_token_ids": [plain[k]]} for k in (0, 3, 6)),
        {**greedy, "stop_token_ids": [plain[4]], "min_tokens": 8},
    ]
    with grpc.insecure_channel(f"unix:{worker.shm.parent}/worker.sock") as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        for case in cases:
            fields = {"ignore_eos": True, **case}
            expected = choices(list(worker.generate(max_gamma=0, **fields)))
            assert choices(list(worker.generate(**fields))) == expected
            for stream in (False, True):
                told = stub.Generate(theirs(PROMPT, stream, **fields), timeout=60)
                assert their_choices(list(told)) == expected
