"""Workers that are full, lost, wedged or draining, and clients that leave."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import grpc
import openai
import pytest
from conditions import until
from fake_worker import FakeWorker, words
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from nightjar.errors import EngineFailure, Overloaded, Unavailable
from nightjar.v1 import generation_pb2 as pb

COMPLETION = "/v1/completions"


def request(max_tokens: int = 4) -> pb.GenerateRequest:
    """A plain request."""
    return pb.GenerateRequest(text="hello", sampling=pb.SamplingParams(max_tokens=max_tokens))


async def answer(served: Any, max_tokens: int = 4) -> str:
    """The text of an answer over gRPC."""
    parts = [part async for part in served.grpc.Generate(request(max_tokens))]
    return "".join(part.text for part in parts)


async def failure(call: Any) -> grpc.aio.AioRpcError:
    """The error that ends a call."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return caught.value


def body(**fields: Any) -> dict[str, Any]:
    """A plain completion."""
    return {"prompt": "hello", "max_tokens": 4, **fields}


async def health(served: Any) -> Any:
    """What gRPC's health service says of the gateway."""
    stub = health_pb2_grpc.HealthStub(served.channel)
    return (await stub.Check(health_pb2.HealthCheckRequest())).status


# ---- routing ---------------------------------------------------------------------------


async def test_burst_is_spread(make_worker: Any, make_gateway: Any) -> None:
    """Requests sent together go to all workers alike, whatever the last probe said."""
    workers = [await make_worker(pause_after=0) for _ in range(3)]
    served = await make_gateway(*workers, probe_interval_ms=60_000)
    calls = [asyncio.create_task(answer(served)) for _ in range(12)]
    await until(lambda: sum(w.num_active for w in workers) == 12, "all are being answered")
    assert [w.num_active for w in workers] == [4, 4, 4]
    for worker in workers:
        worker.resume.set()
    assert await asyncio.gather(*calls) == [words(4)] * 12


async def test_least_loaded_gets_the_request(make_worker: Any, make_gateway: Any) -> None:
    """A worker that reports waiting requests is passed over."""
    busy = await make_worker(status={"num_waiting": 5})
    idle = await make_worker()
    served = await make_gateway(busy, idle)
    for _ in range(4):
        await answer(served)
    assert (len(busy.requests), len(idle.requests)) == (0, 4)


async def test_counts_settle(make_worker: Any, make_gateway: Any) -> None:
    """After requests have come and gone, and probes with them, no worker looks loaded."""
    workers = [await make_worker() for _ in range(2)]
    served = await make_gateway(*workers)
    await asyncio.gather(*(answer(served) for _ in range(30)))
    registry = served.gateway.registry
    await until(lambda: all(load.load == 0 for load in registry.loads()), "no load is left")
    await until(lambda: all(load.num_dispatched == 0 for load in registry.loads()), "nor a count")


async def test_several_models(make_worker: Any, make_gateway: Any) -> None:
    """With several models a request goes where its model is, and must name it."""
    workers = [await make_worker(model=name) for name in ("one", "two")]
    served = await make_gateway(*workers)
    assert sorted([m.id async for m in served.openai.models.list()]) == ["one", "two"]
    for _ in range(2):
        reply = await served.openai.completions.create(model="two", prompt="hello")
        assert reply.model == "two"
    assert (len(workers[0].requests), len(workers[1].requests)) == (0, 2)
    for model, status, sentence in [
        ("", 400, "model: is required"),
        ("three", 404, "model: unknown model 'three'"),
    ]:
        response = await served.http.post(COMPLETION, json=body(model=model))
        assert response.status_code == status
        assert response.json()["error"]["message"] == f"{sentence}; this server has one, two"


# ---- workers that fail -----------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "error", [Unavailable("the worker is draining"), Overloaded("the queue is full", 2.5)]
)
async def test_another_worker_takes_over_before_the_first_token(
    make_worker: Any, make_gateway: Any, error: Any, stream: bool
) -> None:
    """A worker that is draining or full is replaced unseen, even after it said it starts."""
    first = await make_worker(error=error)
    second = await make_worker(status={"num_waiting": 1})
    served = await make_gateway(first, second, probe_interval_ms=60_000)
    response = await served.http.post(COMPLETION, json=body(stream=stream))
    assert response.status_code == 200
    assert (len(first.requests), len(second.requests)) == (1, 1)
    parts = [part async for part in served.grpc.Generate(request())]
    assert "".join(part.text for part in parts) == words(4)
    assert [part.HasField("start") for part in parts].count(True) == 1


async def test_dead_worker_is_replaced(make_worker: Any, make_gateway: Any) -> None:
    """One worker dies: no request fails, and the other serves; it returns: both serve."""
    first, second = await make_worker(), await make_worker()
    served = await make_gateway(first, second)
    await first.kill()
    assert await asyncio.gather(*(answer(served) for _ in range(8))) == [words(4)] * 8
    assert len(second.requests) >= 8 - len(first.requests)
    gone = served.gateway.registry.workers[first.address]
    await until(lambda: bool(gone.not_ready), "the dead worker left")
    assert await health(served) == health_pb2.HealthCheckResponse.SERVING
    before = len(first.requests)
    await first.start()
    await until(lambda: not gone.not_ready, "the worker is back")
    await asyncio.gather(*(answer(served) for _ in range(4)))
    assert len(first.requests) > before


async def test_at_most_three_workers_are_tried(make_worker: Any, make_gateway: Any) -> None:
    """A request that no worker takes ends with the last one's words, after three."""
    workers = [await make_worker(error=Overloaded("the queue is full", 2.5)) for _ in range(4)]
    served = await make_gateway(*workers, probe_interval_ms=60_000)
    error = await failure(served.grpc.Generate(request()))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    retry = error_details_pb2.RetryInfo()
    assert rpc_status.from_call(error).details[0].Unpack(retry)
    assert retry.retry_delay.ToTimedelta().total_seconds() == 2.5
    assert sum(len(worker.requests) for worker in workers) == 3
    response = await served.http.post(COMPLETION, json=body())
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")
    assert response.json()["error"]["message"] == "the queue is full"


async def test_a_single_worker_speaks_for_itself(worker: FakeWorker, served: Any) -> None:
    """Where there is no other worker, the client reads why this one declined."""
    worker.error = Unavailable("the worker is draining")
    error = await failure(served.grpc.Generate(request()))
    assert (error.code(), error.details()) == (
        grpc.StatusCode.UNAVAILABLE,
        "the worker is draining",
    )
    response = await served.http.post(COMPLETION, json=body())
    assert response.status_code == 503
    assert response.json()["error"]["message"] == "the worker is draining"
    assert len(worker.requests) == 2


async def test_a_request_that_breaks_an_engine_is_not_carried_on(
    make_worker: Any, make_gateway: Any
) -> None:
    """INTERNAL is handed on with the worker's words; no second engine sees the request."""
    workers = [await make_worker(error=EngineFailure("a row was not a number")) for _ in range(2)]
    served = await make_gateway(*workers)
    error = await failure(served.grpc.Generate(request()))
    assert (error.code(), error.details()) == (
        grpc.StatusCode.INTERNAL,
        "a row was not a number",
    )
    assert sum(len(worker.requests) for worker in workers) == 1
    response = await served.http.post(COMPLETION, json=body(stream=True))
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "a row was not a number"


async def test_error_in_mid_stream(worker: FakeWorker, served: Any) -> None:
    """After the first token an error is one event, then the end; gRPC gets the code."""
    worker.error_after, worker.late_error = 2, EngineFailure("the engine died")
    response = await served.http.post(COMPLETION, json=body(stream=True))
    assert response.status_code == 200
    events = [json.loads(event[6:]) for event in response.text[:-2].split("\n\n")]
    assert ["error" in event for event in events] == [False, True]
    assert events[1]["error"]["message"] == "the engine died"
    stream = await served.openai.completions.create(
        model="tiny", prompt="hello", max_tokens=4, stream=True
    )
    with pytest.raises(openai.APIError, match="the engine died"):
        _ = [chunk async for chunk in stream]
    error = await failure(served.grpc.Generate(request()))
    assert (error.code(), error.details()) == (grpc.StatusCode.INTERNAL, "the engine died")
    whole = await served.http.post(COMPLETION, json=body())
    assert whole.status_code == 500


async def test_cancelled_inside_the_worker(worker: FakeWorker, served: Any) -> None:
    """A worker's own cancellation, whoever caused it, ends the client's call with a status."""
    worker.error_after, worker.late_error = 2, asyncio.CancelledError()
    error = await failure(served.grpc.Generate(request(), timeout=10))
    assert error.code() is grpc.StatusCode.ABORTED
    assert error.details() == "the call was cancelled inside the service"
    response = await served.http.post(COMPLETION, json=body(stream=True))
    assert response.text.count("the call was cancelled inside the service") == 1


async def test_worker_lost_in_mid_stream(
    make_worker: Any, make_gateway: Any, worker: FakeWorker
) -> None:
    """Lost after the first token, with none to go on: UNAVAILABLE in words without addresses."""
    worker.pause_after = 2
    served = await make_gateway(worker)
    lines: list[str] = []

    async def read() -> None:
        async with served.http.stream("POST", COMPLETION, json=body(stream=True)) as response:
            async for line in response.aiter_lines():
                lines.append(line)  # noqa: PERF401 - the test looks at it as it grows

    reading = asyncio.create_task(read())
    call = aiter(served.grpc.Generate(request()))
    assert (await anext(call)).text == words(2)
    await until(lambda: len(lines) > 0, "the first chunk came")
    await worker.kill()
    error = await failure(call)
    sentence = (
        "the worker was lost; "
        "no other worker with the same arithmetic can go on with the answer now"
    )
    assert (error.code(), error.details()) == (grpc.StatusCode.UNAVAILABLE, sentence)
    await reading
    last = json.loads([line for line in lines if line][-1][6:])
    assert last["error"]["message"] == sentence


# ---- readiness -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        ({"accepting": False}, "admits no requests: it starts, drains or stands still"),
        ({"progress_age_ms": 10_001}, "its engine made no step for 10001 ms"),
    ],
)
async def test_readiness_follows_the_worker(
    worker: FakeWorker, served: Any, status: dict[str, Any], reason: str
) -> None:
    """Draining, or an engine without progress, makes the gateway not ready; it stays live."""
    assert (await served.http.get("/health/ready")).status_code == 200
    assert await health(served) == health_pb2.HealthCheckResponse.SERVING
    worker.status = status
    await until(lambda: not served.gateway.registry.ready, "not ready")
    for route in ("/health", "/health/ready"):
        response = await served.http.get(route)
        assert (response.status_code, response.json()["reasons"]) == (503, [reason])
    assert (await served.http.get("/health/live")).status_code == 200
    assert await health(served) == health_pb2.HealthCheckResponse.NOT_SERVING
    response = await served.http.post(COMPLETION, json=body(stream=True))
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    error = await failure(served.grpc.Generate(request()))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert response.json()["error"]["message"] == error.details()
    bad = await served.http.post(COMPLETION, json=body(temperature=-1.0))
    assert bad.status_code == 400
    assert (await served.http.get("/v1/models")).status_code == 503
    worker.status = {}
    await until(lambda: served.gateway.registry.ready, "ready again")
    assert await answer(served) == words(4)


async def test_a_worker_that_does_not_answer_probes_leaves(
    worker: FakeWorker, make_gateway: Any
) -> None:
    """A worker that hangs, as a stopped process does, leaves after the set number of probes."""
    served = await make_gateway(worker, probe_timeout_ms=50, probe_failures=3)
    worker.probe_delay_s = 5
    known = served.gateway.registry.workers[worker.address]
    await until(lambda: bool(known.not_ready), "the worker left")
    assert known.num_failures == 3
    health = (await served.http.get("/health")).json()
    assert health["reasons"] == ["does not answer"]
    worker.probe_delay_s = 0
    await until(lambda: served.gateway.registry.ready, "ready again")


async def test_gateway_starts_before_its_worker(make_worker: Any, make_gateway: Any) -> None:
    """A gateway whose worker is not up yet is live and not ready, and ready once it is."""
    worker = await make_worker()
    await worker.kill()
    served = await make_gateway(worker, ready=False)
    assert (await served.http.get("/health/ready")).status_code == 503
    await worker.start()
    await until(lambda: served.gateway.registry.ready, "ready")
    assert await answer(served) == words(4)


# ---- clients that leave ----------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("pause_after", [0, 2])
async def test_http_disconnect_cancels(
    worker: FakeWorker, served: Any, stream: bool, pause_after: int
) -> None:
    """A client that hangs up, before or in its answer, streamed or not, frees its worker."""
    worker.pause_after = pause_after
    host, port = served.gateway.http_address.split(":")
    content = json.dumps(body(stream=stream)).encode()
    head = (
        f"POST {COMPLETION} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\n\r\n"
    )
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(head.encode() + content)
    await writer.drain()
    await until(lambda: worker.num_active == 1, "it is being answered")
    writer.transport.abort()
    await until(lambda: worker.num_active == 0, "the worker was told", timeout_s=1)
    assert worker.num_cancelled == 1
    worker.pause_after = -1
    assert await answer(served) == words(4)


async def test_hanging_up_in_the_body_is_nothing(worker: FakeWorker, served: Any) -> None:
    """A client that leaves before its request is complete costs nothing."""
    host, port = served.gateway.http_address.split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b'content-length: 100\r\n\r\n{"prompt": '
    )
    await writer.drain()
    writer.transport.abort()
    assert await answer(served) == words(4)
    assert len(worker.requests) == 1


async def test_grpc_cancel_reaches_the_worker(worker: FakeWorker, served: Any) -> None:
    """Twenty streams cancelled at once all end at the worker, and health still answers."""
    worker.pause_after = 2
    calls = [served.grpc.Generate(request()) for _ in range(20)]
    await until(lambda: worker.num_active == 20, "all are being answered")
    for call in calls:
        call.cancel()
    await until(lambda: worker.num_active == 0, "the worker was told", timeout_s=2)
    assert await health(served) == health_pb2.HealthCheckResponse.SERVING
    await until(
        lambda: all(load.load == 0 for load in served.gateway.registry.loads()), "no load is left"
    )


async def test_deadline_reaches_the_worker(worker: FakeWorker, served: Any) -> None:
    """A deadline ends the call with its code, the worker knew it, and stops."""
    worker.pause_after = 2
    error = await failure(served.grpc.Generate(request(), timeout=0.3))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    # A gRPC deadline travels as a whole number of units, rounded up.
    assert worker.remaining[0] is not None
    assert worker.remaining[0] <= 0.31
    await until(lambda: worker.num_active == 0, "the worker stopped", timeout_s=2)


async def test_slow_reader_is_not_buffered(worker: FakeWorker, served: Any) -> None:
    """A client that does not read stops its own answer at the worker, and no other."""
    worker.padding = "x" * 400_000
    host, port = served.gateway.http_address.split(":")
    content = json.dumps(body(stream=True, max_tokens=240)).encode()
    _, writer = await asyncio.open_connection(host, int(port), limit=1024)
    writer.write(
        f"POST {COMPLETION} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\n\r\n".encode()
        + content
    )
    last = (0, time.monotonic())

    def stands_still() -> bool:
        nonlocal last
        if worker.num_sent != last[0]:
            last = (worker.num_sent, time.monotonic())
        return worker.num_sent > 0 and time.monotonic() - last[1] > 0.5

    await until(stands_still, "nothing more is taken")
    assert worker.num_active == 1
    assert worker.num_sent < 100
    worker.padding = ""
    assert await answer(served, 100) == words(100)
    writer.transport.abort()
    await until(lambda: worker.num_active == 0, "nothing is left")
