"""`vllm.grpc.engine.VllmEngine` over real gRPC, with a fake engine that repeats the prompt."""

from __future__ import annotations

import asyncio
import hashlib
import io
import zipfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
import tokenizers
from calls import asked, detail, refusal
from conditions import until
from google.rpc import error_details_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

FrontMaker = Callable[..., Any]


@asynccontextmanager
async def served(front: FrontMaker, *flags: str, **fields: object) -> AsyncIterator[tuple]:
    """A worker, and a stub of the service."""
    async with front(*flags, **fields) as worker:
        yield worker, vllm_engine_pb2_grpc.VllmEngineStub(worker.channel)


def request(
    *token_ids: int, stream: bool = False, name: str = "", **sampling: Any
) -> pb.GenerateRequest:
    """A request of tokens, as a gateway that tokenizes sends it."""
    params = pb.SamplingParams(**{"skip_special_tokens": True, **sampling})
    tokenized = pb.TokenizedInput(input_ids=token_ids, original_text="shown to nobody")
    return pb.GenerateRequest(
        request_id=name, tokenized=tokenized, sampling_params=params, stream=stream
    )


async def told(stub: Any, asked: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    """Every message of an answer."""
    return [message async for message in stub.Generate(asked)]


async def error_of(stub: Any, asked: pb.GenerateRequest) -> grpc.aio.AioRpcError:
    """The error that a request ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await told(stub, asked)
    return caught.value


async def test_a_whole_answer_is_one_complete_with_everything(front: FrontMaker) -> None:
    """Without `stream`: all ids, the reason, the counts of prompt, answer and drafts."""
    async with served(front) as (_, stub):
        (message,) = await told(stub, request(70, 71, 72, max_tokens=5))
        complete = message.complete
        assert list(complete.output_ids) == [70, 71, 72, 70, 71]
        assert complete.finish_reason == "length"
        assert (complete.prompt_tokens, complete.completion_tokens) == (3, 5)
        assert (complete.spec_draft_tokens, complete.spec_accepted_tokens) == (4, 3)
        assert complete.WhichOneof("matched_stop") is None
        assert complete.index == 0


async def test_a_streamed_answer_is_chunks_of_what_is_new_then_the_totals(
    front: FrontMaker,
) -> None:
    """The chunks' ids join to the complete's, and each chunk counts its own."""
    async with served(front, "--tick-ms=10") as (_, stub):
        messages = await told(stub, request(70, 71, 72, max_tokens=7, stream=True))
        *chunks, last = messages
        assert len(chunks) > 1
        joined = [token_id for message in chunks for token_id in message.chunk.token_ids]
        assert joined == list(last.complete.output_ids) == [70, 71, 72, 70, 71, 72, 70]
        for message in chunks:
            assert message.chunk.completion_tokens == len(message.chunk.token_ids) > 0
            assert message.chunk.prompt_tokens == 3
        assert (last.complete.prompt_tokens, last.complete.completion_tokens) == (3, 7)
        assert (last.complete.spec_draft_tokens, last.complete.spec_accepted_tokens) == (4, 3)


async def test_text_is_tokenized_here(front: FrontMaker) -> None:
    """A text prompt gives the ids that `GenerationService` gives."""
    async with served(front) as (worker, stub):
        (message,) = await told(
            stub, pb.GenerateRequest(text="abc", sampling_params={"max_tokens": 3})
        )
        reply = [piece async for piece in worker.generation.Generate(asked("abc", max_tokens=3))]
        assert list(message.complete.output_ids) == [i for p in reply for i in p.token_ids]


async def test_every_parameter_reaches_the_engine(front: FrontMaker) -> None:
    """Each sampling field arrives under our name and meaning; 0 stands for what was left out."""
    async with served(front) as (worker, stub):
        await told(stub, request(70, max_tokens=1))
        plain = worker.told("Submit")[0]
        assert "temperature=1.0, top_p=1.0, top_k=0, min_p=0.0" in plain
        await told(
            stub,
            request(
                70,
                max_tokens=2,
                temperature=0.5,
                top_p=0.25,
                top_k=9,
                min_p=0.125,
                seed=-1,
                stop=["QQ"],
                stop_token_ids=[99],
                ignore_eos=True,
                n=2,
                min_tokens=1,
                repetition_penalty=1.5,
                presence_penalty=0.5,
                frequency_penalty=-0.25,
                logit_bias={80: -1.5, 7: 2},
                logprobs=2,
                prompt_logprobs=0,
                include_stop_str_in_output=True,
                spaces_between_special_tokens=True,
            ),
        )
        full = worker.told("Submit")[1]
        for part in (
            "temperature=0.5, top_p=0.25, top_k=9, min_p=0.125",
            f"seed={2**64 - 1}",
            "stop=('QQ',)",
            "stop_token_ids=(99,)",
            "ignore_eos=True",
            "min_tokens=1, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=-0.25",
            "logit_bias=((7, 2.0), (80, -1.5)), num_logprobs=2, num_prompt_logprobs=0",
        ):
            assert part in full
        assert len(worker.told("Submit")) == 3  # two choices


@pytest.mark.parametrize("stream", [True, False])
async def test_log_probabilities_of_prompt_and_answer(front: FrontMaker, stream: bool) -> None:
    """Each token of a text prompt, the first one without a value, and each token of the answer."""
    async with served(front) as (worker, stub):
        params = {"max_tokens": 4, "logprobs": 2, "prompt_logprobs": 1}
        asking = pb.GenerateRequest(text="abcde", sampling_params=params, stream=stream)
        messages = await told(stub, asking)
        prompt = worker.told("Submit")[0].split("prompt_token_ids=[")[1].split("]")[0]
        bodies = [getattr(one, one.WhichOneof("response")) for one in messages]
        assert [str(i) for i in bodies[0].input_logprobs.token_ids] == prompt.split(", ")
        values = [one.HasField("value") for one in bodies[0].input_logprobs.token_logprobs]
        assert values == [False, True, True, True, True]
        assert [body.HasField("input_logprobs") for body in bodies[1:]] == [False] * len(bodies[1:])
        scored = [i for body in bodies for i in body.output_logprobs.token_ids]
        assert scored == list(bodies[-1].output_ids)
        tops = [top for body in bodies for top in body.output_logprobs.top_logprobs]
        assert [len(top.values) for top in tops] == [2] * 4


async def test_the_match_that_ended_an_answer_is_named(front: FrontMaker) -> None:
    """A stop string or a stop id stands in `matched_stop`, and the ids hold it."""
    async with served(front) as (_, stub):
        ids = [70, 71, 72]
        text = await _text_of(stub, ids)
        (message,) = await told(stub, request(*ids, max_tokens=3, stop=["#", text[1:3]]))
        assert message.complete.finish_reason == "stop"
        assert message.complete.matched_stop_str == text[1:3]
        assert list(message.complete.output_ids) == ids
        (message,) = await told(stub, request(*ids, max_tokens=3, stop=["#"], stop_token_ids=[72]))
        assert message.complete.matched_token_id == 72


async def _text_of(stub: Any, ids: list[int]) -> str:
    tokenizer = await _tokenizer(stub)
    return str(tokenizer.decode(ids))


async def _tokenizer(stub: Any) -> tokenizers.Tokenizer:
    call = stub.GetTokenizer(common_pb2.GetTokenizerRequest())
    chunks = [chunk async for chunk in call]
    data = b"".join(chunk.data for chunk in chunks)
    assert [bool(chunk.sha256) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
    archive = zipfile.ZipFile(io.BytesIO(data))
    assert not [name for name in archive.namelist() if "safetensors" in name]
    return tokenizers.Tokenizer.from_str(archive.read("tokenizer.json").decode())


async def test_bad_and_unserved_fields_are_named(front: FrontMaker) -> None:
    """A sentence names the field, in the details too, and the engine hears of nothing."""
    unknown = pb.GenerateRequest.FromString(request(70).SerializeToString() + b"\x98\x06\x01")
    params = "sampling_params"
    cases = [
        (request(70, temperature=float("nan")), "INVALID_ARGUMENT", "sampling.temperature"),
        (request(70, top_p=1.5), "INVALID_ARGUMENT", "sampling.top_p"),
        (request(70, max_tokens=512), "INVALID_ARGUMENT", "sampling.max_tokens"),
        (request(70, max_tokens=2**31), "INVALID_ARGUMENT", f"{params}.max_tokens"),
        (request(70, stop_token_ids=[2**32 - 1]), "INVALID_ARGUMENT", f"{params}.stop_token_ids"),
        (request(70, json_schema="{}"), "UNIMPLEMENTED", f"{params}.json_schema"),
        (request(70, json_object=True), "UNIMPLEMENTED", f"{params}.json_object"),
        (
            request(70, truncate_prompt_tokens=-1),
            "UNIMPLEMENTED",
            f"{params}.truncate_prompt_tokens",
        ),
        (
            request(70, stop=["a"], skip_special_tokens=False),
            "UNIMPLEMENTED",
            f"{params}.skip_special_tokens",
        ),
        (pb.GenerateRequest(text="a", mm_inputs={}), "UNIMPLEMENTED", "mm_inputs"),
        (pb.GenerateRequest(text="a", media_refs={}), "UNIMPLEMENTED", "media_refs"),
        (
            pb.GenerateRequest(text="a", kv_transfer_params_json="{}"),
            "UNIMPLEMENTED",
            "kv_transfer_params_json",
        ),
        (
            pb.GenerateRequest(text="a", data_parallel_rank=1),
            "INVALID_ARGUMENT",
            "data_parallel_rank",
        ),
        (pb.GenerateRequest(), "INVALID_ARGUMENT", "input"),
        (pb.GenerateRequest(tokenized={}), "INVALID_ARGUMENT", "tokens.token_ids"),
        (request(320), "INVALID_ARGUMENT", "tokens.token_ids[0]"),
        (request(2**32 - 1), "INVALID_ARGUMENT", "tokenized.input_ids"),
        (unknown, "INVALID_ARGUMENT", "99"),
    ]
    async with served(front) as (worker, stub):
        for asking, code, field in cases:
            error = await error_of(stub, asking)
            assert error.code().name == code, error.details()
            violations = detail(error, error_details_pb2.BadRequest).field_violations
            assert [violation.field for violation in violations] == [field]
            assert field in error.details()
        assert not worker.told("Submit")


async def test_abort_ends_an_answer_with_what_there_is(front: FrontMaker) -> None:
    """The reason is "abort", the ids are those streamed, and the engine's row is gone."""
    async with served(front, "--tick-ms=10") as (worker, stub):
        call = stub.Generate(request(70, 71, max_tokens=500, stream=True, name="one"))
        seen = [await call.read()]
        await stub.Abort(pb.AbortRequest(request_ids=["unknown", "one"]))
        while (message := await call.read()) is not grpc.aio.EOF:
            seen.append(message)
        ids = [token_id for message in seen for token_id in message.chunk.token_ids]
        assert seen[-1].complete.finish_reason == "abort"
        assert list(seen[-1].complete.output_ids) == ids
        assert 0 < len(ids) < 500
        await until(lambda: len(worker.told("Abort")) == 1, "the abort arrived")
        assert await _num_open(stub) == 0
    async with served(front, "--hold") as (worker, stub):
        reading = asyncio.create_task(told(stub, request(70, max_tokens=9, name="two")))
        await until(lambda: len(worker.told("Submit")) == 2, "the request arrived")
        await stub.Abort(pb.AbortRequest(request_ids=["two"]))
        (message,) = await reading
        assert message.complete.finish_reason == "abort"
        assert list(message.complete.output_ids) == []


async def _num_open(stub: Any) -> int:
    return int((await stub.GetServerInfo(pb.GetServerInfoRequest())).active_requests)


async def test_a_cancelled_call_is_aborted_in_the_engine(front: FrontMaker) -> None:
    """A gateway that hangs up frees the row and the place."""
    async with served(front, "--tick-ms=10") as (worker, stub):
        call = stub.Generate(request(70, max_tokens=500, stream=True, name="one"))
        await call.read()
        call.cancel()
        await until(lambda: len(worker.told("Abort")) == 1, "the abort arrived")
        assert await _num_open(stub) == 0


async def test_a_full_queue_refuses_at_this_door_too(front: FrontMaker) -> None:
    """Both services count in one queue."""
    async with served(front, "--hold", max_num_seqs=1, max_waiting=1) as (worker, stub):
        calls = [stub.Generate(request(70)), worker.generation.Generate(asked())]
        await until(lambda: len(worker.told("Submit")) == 2, "two requests are inside")
        error = await error_of(stub, request(70))
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await refusal(worker, asked())).code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        for call in calls:
            call.cancel()


async def test_facts_and_load(front: FrontMaker, tiny: Any) -> None:
    """The model's and the worker's facts are what the worker's own status says."""
    async with served(front, max_num_seqs=7) as (worker, stub):
        model = await stub.GetModelInfo(pb.GetModelInfoRequest())
        status = await worker.status()
        assert model.served_model_name == status.model.name == "tiny"
        assert model.model_path == model.tokenizer_path == str(tiny.target)
        assert model.is_generation
        assert not model.supports_vision
        assert model.max_context_length == status.model.max_model_len
        assert model.vocab_size == status.model.vocab_size
        assert list(model.eos_token_ids)
        assert model.architectures
        server = await stub.GetServerInfo(pb.GetServerInfoRequest())
        assert (server.server_type, server.data_parallel_size) == ("nightjar", 1)
        assert not server.is_paused
        loads = (await stub.GetLoads(pb.GetLoadsRequest())).loads
        assert [load.num_total_reqs for load in loads] == [0]
        assert loads[0].max_total_num_tokens == 100 * 16
        assert loads[0].token_usage == 0
        assert (await stub.HealthCheck(pb.HealthCheckRequest())).healthy


async def test_calls_that_are_not_served_say_why(front: FrontMaker) -> None:
    """UNIMPLEMENTED with a sentence, for single answers and for streams."""
    async with served(front) as (_, stub):
        for call, words in (
            (stub.Embed(pb.EmbedRequest()), "embeddings are not served"),
            (stub.FlushCache(common_pb2.FlushCacheRequest()), "not flushed"),
            (stub.StartProfile(common_pb2.StartProfileRequest()), "no profiler"),
            (stub.StopProfile(common_pb2.StopProfileRequest()), "no profiler"),
            (stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest()).read(), "KV events"),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match=words) as caught:
                await call
            assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_a_starting_worker_is_not_taken_for_one_that_serves(front: FrontMaker) -> None:
    """Whatever a gateway decides by is UNAVAILABLE until the model is there: it asks again."""
    async with served(front, "--start-s=60", until_ready=False) as (_, stub):
        for call in (
            stub.HealthCheck(pb.HealthCheckRequest(), wait_for_ready=True),
            stub.GetModelInfo(pb.GetModelInfoRequest()),
            stub.GetTokenizer(common_pb2.GetTokenizerRequest()).read(),
            stub.Generate(request(70)).read(),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match="starting") as caught:
                await call
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        server = await stub.GetServerInfo(pb.GetServerInfoRequest())
        assert server.max_num_seqs == 0


async def test_reflection_lists_the_service(front: FrontMaker) -> None:
    """A tool that knows no proto file finds it beside our own."""
    async with served(front) as (worker, _):
        stub = reflection_pb2_grpc.ServerReflectionStub(worker.channel)
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        call = stub.ServerReflectionInfo(iter([ask]))
        names = [one.name for one in (await call.read()).list_services_response.service]
        assert {"vllm.grpc.engine.VllmEngine", "nightjar.v1.GenerationService"} <= set(names)
