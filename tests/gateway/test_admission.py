"""What the gateway takes on: bounds on open answers and waiting prompts, hints, slow readers."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from typing import Any

import grpc
import psutil
import pytest
from calls import chat
from conditions import until
from fake_answer import Manner
from fake_worker import FakeWorker, words
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from gateway.admission import Admission, num_prompt_tokens
from nightjar import rpc
from nightjar.errors import InvalidRequest, Overloaded
from nightjar.v1 import generation_pb2 as pb
from nightjar.v1 import generation_pb2_grpc

COMPLETION = "/v1/completions"


def request(text: str = "hello", **sampling: Any) -> pb.GenerateRequest:
    """A plain request."""
    fields = {"max_tokens": 4, **sampling}
    return pb.GenerateRequest(text=text, sampling=pb.SamplingParams(**fields))


async def answer(served: Any, asked: pb.GenerateRequest) -> str:
    """The text of an answer over gRPC."""
    return "".join([part.text async for part in served.grpc.Generate(asked, timeout=20)])


async def refusal(served: Any, asked: pb.GenerateRequest) -> grpc.aio.AioRpcError:
    """The error that a call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer(served, asked)
    return caught.value


# ---- the counts ------------------------------------------------------------------------


def test_choices_count_each() -> None:
    """A request takes a place for each of its choices, and gives all of them back."""
    admission = Admission(4, 1000)
    with admission.enter(3, 1):
        assert admission.num_open == 3
        with pytest.raises(Overloaded, match="3 answers are open; at most 4 are"):
            admission.enter(2, 1)
        with admission.enter(1, 1):
            assert admission.num_open == 4
    assert admission.num_open == 0
    with pytest.raises(InvalidRequest, match=r"sampling\.n: 5; this server has at most 4"):
        admission.enter(5, 1)


def test_prompts_wait_until_their_answer_begins() -> None:
    """Tokens count until the first token, once a choice; alone, a prompt of any length may wait."""
    admission = Admission(10, 100)
    with admission.enter(1, 5000) as long:
        with pytest.raises(Overloaded, match="about 5000 tokens are waiting; about 20 more"):
            admission.enter(2, 10)
        long.begun()
        long.begun()
        assert admission.num_queued_tokens == 0
        with admission.enter(2, 10):
            assert admission.num_queued_tokens == 20
    assert (admission.num_open, admission.num_queued_tokens) == (0, 0)


def test_failed_requests_give_back_all() -> None:
    """A request that ends in an error leaves nothing behind, and no mean time."""
    admission = Admission(10, 100)
    with pytest.raises(RuntimeError), admission.enter(2, 10):
        raise RuntimeError
    assert (admission.num_open, admission.num_queued_tokens) == (0, 0)
    assert admission.retry_after_s() == 1.0


def test_the_hint_follows_the_answers() -> None:
    """The hint is a request's mean time over those that are open, within its bounds."""
    admission = Admission(10, 100)
    for _ in range(100):
        admission.ended(200.0)
    assert admission.retry_after_s() == 30.0
    with admission.enter(10, 1):
        assert admission.retry_after_s() == pytest.approx(20.0, rel=0.01)
    for _ in range(100):
        admission.ended(0.0)
    assert admission.retry_after_s() == 0.1


@pytest.mark.parametrize(
    ("asked", "num_tokens"),
    [
        (pb.GenerateRequest(tokens=pb.TokenPrompt(token_ids=range(1000))), 1000),
        (pb.GenerateRequest(text="é" * 2000), 1000),
        (chat("a" * 4000), 1002),
        (pb.GenerateRequest(text="a"), 1),
    ],
)
def test_prompts_are_measured_before_they_are_tokenized(
    asked: pb.GenerateRequest, num_tokens: int
) -> None:
    """Ids count as they are, text by its bytes."""
    assert abs(num_prompt_tokens(asked) - num_tokens) <= 2


# ---- refusals --------------------------------------------------------------------------


async def test_too_many_answers(worker: FakeWorker, make_gateway: Any) -> None:
    """Over the bound both doors refuse at once, with a hint, and take on again what leaves."""
    served = await make_gateway(worker, max_open_requests=4)
    worker.pause_after = 2
    calls = [asyncio.create_task(answer(served, request(n=2))) for _ in range(2)]
    await until(lambda: worker.num_active == 2, "both are being answered")
    error = await refusal(served, request())
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error.details() == "4 answers are open; at most 4 are"
    status = rpc_status.from_call(error)
    retry = error_details_pb2.RetryInfo()
    assert status is not None
    assert status.details[0].Unpack(retry)
    hint_ms = retry.retry_delay.ToMilliseconds()
    assert hint_ms >= 100
    trailing = dict(error.trailing_metadata() or ())
    assert trailing["grpc-retry-pushback-ms"] == str(hint_ms)
    response = await served.http.post(COMPLETION, json={"prompt": "hello", "stream": True})
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")
    assert response.json()["error"]["message"] == error.details()
    bad = await served.http.post(COMPLETION, json={"prompt": "hello", "n": 5})
    assert bad.status_code == 400
    assert len(worker.requests) == 2
    worker.resume.set()
    assert [len(text) for text in await asyncio.gather(*calls)] == [2 * len(words(4))] * 2
    await answer(served, request())


async def test_too_many_waiting_tokens(worker: FakeWorker, make_gateway: Any) -> None:
    """Long prompts are refused while others wait, not once those are answered."""
    served = await make_gateway(worker, max_queued_tokens=100)
    worker.pause_after = 0
    first = asyncio.create_task(answer(served, request("x" * 200)))
    await until(lambda: worker.num_active == 1, "it waits for its first token")
    error = await refusal(served, request("x" * 240))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "more would exceed 100" in str(error.details())
    second = asyncio.create_task(answer(served, request("x" * 40)))
    await until(lambda: worker.num_active == 2, "a short one fits")
    worker.pause_after = 2
    worker.resume.set()
    assert await asyncio.gather(first, second) == [words(4)] * 2
    assert await answer(served, request("x" * 240)) == words(4)


async def test_a_grpc_client_retries_by_the_hint(worker: FakeWorker, make_gateway: Any) -> None:
    """The retries of gRPC itself wait as long as the gateway says, and then succeed."""
    served = await make_gateway(worker, max_open_requests=1)
    worker.pause_after = 2
    holder = asyncio.create_task(answer(served, request()))
    await until(lambda: worker.num_active == 1, "it is being answered")
    service = {"service": "nightjar.v1.GenerationService"}
    retries = {
        "maxAttempts": 5,
        "initialBackoff": "60s",
        "maxBackoff": "60s",
        "backoffMultiplier": 1,
        "retryableStatusCodes": ["RESOURCE_EXHAUSTED"],
    }
    config = json.dumps({"methodConfig": [{"name": [service], "retryPolicy": retries}]})
    options = [("grpc.service_config", config)]
    async with grpc.aio.insecure_channel(served.gateway.grpc_address, options=options) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        call = stub.Generate(request(), timeout=20)
        loop = asyncio.get_running_loop()
        loop.call_later(0.2, worker.resume.set)
        assert "".join([part.text async for part in call]) == words(4)
    assert await holder == words(4)


async def test_a_worker_s_hint_is_handed_on(worker: FakeWorker, served: Any) -> None:
    """A full worker's own hint reaches gRPC's retries as the gateway's does."""
    worker.error = Overloaded("the queue is full", 2.5)
    error = await refusal(served, request())
    assert dict(error.trailing_metadata() or ())["grpc-retry-pushback-ms"] == "2500"


async def test_a_request_of_too_many_bytes_is_never_parsed(worker: FakeWorker, served: Any) -> None:
    """A message over gRPC's limit is refused before the service sees it; the connection lives."""
    error = await refusal(served, request("x" * (rpc.MAX_MESSAGE_BYTES + 1)))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert worker.requests == []
    assert await answer(served, request()) == words(4)


# ---- clients that leave or do not read -------------------------------------------------


async def test_cancelled_while_it_connects(make_worker: Any, make_gateway: Any) -> None:
    """A call whose worker takes the connection and says nothing ends with its client."""
    worker = await make_worker()
    served = await make_gateway(worker, probe_interval_ms=60_000)
    await worker.kill()
    host, port = worker.address.split(":")
    with socket.create_server((host, int(port))):
        call = served.grpc.Generate(request())
        known = served.gateway.registry.workers[worker.address]
        await until(lambda: len(known._streams) == 1, "it is on its way")
        call.cancel()
        await until(lambda: known.load.num_dispatched == 0, "it was given up", timeout_s=1)
        response = asyncio.create_task(
            served.http.post(COMPLETION, json={"prompt": "hello"}, timeout=0.3)
        )
        await asyncio.gather(response, return_exceptions=True)
        await until(lambda: known.load.num_dispatched == 0, "so was this", timeout_s=1)


async def test_places_come_back_from_clients_that_leave(
    worker: FakeWorker, make_gateway: Any
) -> None:
    """Calls cancelled before and in their answers give all places back."""
    served = await make_gateway(worker, max_open_requests=6)
    for pause_after in (0, 2):
        worker.pause_after = pause_after
        calls = [served.grpc.Generate(request(n=3)) for _ in range(2)]
        await until(lambda: worker.num_active == 2, "both are being answered")
        for call in calls:
            call.cancel()
        await until(lambda: worker.num_active == 0, "the worker was told")
    worker.pause_after = -1
    texts = await asyncio.gather(*(answer(served, request(n=3)) for _ in range(2)))
    assert len(texts) == 2


async def test_deadline_covers_all_attempts(make_worker: Any, make_gateway: Any) -> None:
    """A worker that goes on with an answer is told of the time that is left, not of the whole."""
    manner = Manner(step=1, finish_apart=False)
    first = await make_worker(manner=manner, pause_after=2)
    second = await make_worker(manner=manner, pause_after=2, status={"num_waiting": 9})
    served = await make_gateway(first, second, routing="least_loaded")
    begun = time.monotonic()
    call = served.grpc.Generate(request(), timeout=9)  # which is sent to 10 ms, more to 100 and up
    await until(lambda: first.num_active == 1, "it is being answered")
    await asyncio.wait_for(aiter(call).__anext__(), 5)
    await until(lambda: time.monotonic() > begun + 0.5, "some of the time has passed")
    await first.kill()
    await until(lambda: second.num_active == 1, "it goes on")
    assert 0 < second.remaining[0] <= 9 - 0.5 + 0.02
    call.cancel()
    await until(lambda: second.num_active == 0, "the worker stopped")


async def test_slow_readers_cost_no_memory(worker: FakeWorker, make_gateway: Any) -> None:
    """Clients that do not read stop their own answers at the worker, and harm no one else."""
    served = await make_gateway(worker)
    worker.padding = "x" * 50_000
    # Small windows, so that what the transport may hold is little beside what is held back.
    options = [("grpc.http2.lookahead_bytes", 65_536), ("grpc.http2.bdp_probe", 0)]
    process = psutil.Process()
    async with grpc.aio.insecure_channel(served.gateway.grpc_address, options=options) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        calls = [stub.Generate(request(max_tokens=240)) for _ in range(50)]
        for call in calls:
            await aiter(call).__anext__()
        sent = -1

        async def stands_still() -> bool:
            nonlocal sent
            before, sent = sent, worker.num_sent
            await asyncio.sleep(0.2)
            return worker.num_sent == before

        await until(stands_still, "nothing more is taken")
        assert worker.num_active == 50
        whole = 50 * 120
        assert worker.num_sent < whole / 8
        rss = process.memory_info().rss
        worker.padding = ""
        assert await answer(served, request(max_tokens=100)) == words(100)
        health = health_pb2_grpc.HealthStub(served.channel)
        checked = await health.Check(health_pb2.HealthCheckRequest())
        assert checked.status == health_pb2.HealthCheckResponse.SERVING
        assert process.memory_info().rss - rss < 32 * 1024 * 1024
        for call in calls:
            call.cancel()
    await until(lambda: worker.num_active == 0, "the worker was told")
