"""Answers that go on at another worker: nothing lost and nothing twice, wherever they broke off."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import grpc
import pytest
from conditions import until
from fake_answer import Manner, messages
from fake_worker import FakeWorker

from nightjar.errors import EngineFailure, Overloaded, Unavailable
from nightjar.seeds import choice_seed
from nightjar.v1 import generation_pb2 as pb

NUM_TOKENS = 64
MANNER = Manner(step=1, varied=True, finish_apart=False)
SAMPLED = {"temperature": 0.8, "seed": 2**63 + 11}


def request(**sampling: Any) -> pb.GenerateRequest:
    """A request for 64 tokens."""
    return pb.GenerateRequest(
        text="hello", sampling=pb.SamplingParams(max_tokens=NUM_TOKENS, **sampling)
    )


def joined(parts: list[pb.GenerateResponse], n: int = 1) -> list[tuple[Any, ...]]:
    """What a client has of each choice: ids, text, log-probabilities, finish reasons."""
    choices = []
    for index in range(n):
        own = [part for part in parts if part.index == index]
        choices.append(
            (
                [token_id for part in own for token_id in part.token_ids],
                "".join(part.text for part in own),
                [entry.chosen.token_id for part in own for entry in part.logprobs],
                [part.finish_reason for part in own if part.finish_reason],
            )
        )
    return choices


def prompt_entries(parts: list[pb.GenerateResponse]) -> list[int]:
    """The log-probabilities of the prompt that a client has."""
    return [entry.chosen.token_id for part in parts for entry in part.prompt_logprobs]


async def collect(served: Any, asked: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    """Every message of an answer over gRPC."""
    return [part async for part in served.grpc.Generate(asked, timeout=30)]


async def read_into(parts: list[pb.GenerateResponse], call: Any) -> None:
    """Add every message of a call, also of one that fails."""
    async for part in call:
        parts.append(part)  # noqa: PERF401 - kept although the call fails


def undisturbed(asked: pb.GenerateRequest, manner: Manner = MANNER) -> list[pb.GenerateResponse]:
    """The answer of one worker that nothing happens to."""
    return list(messages(asked, FakeWorker().limits, manner))


def check(parts: list[pb.GenerateResponse], asked: pb.GenerateRequest) -> pb.Usage:
    """The answer is the undisturbed one, told once; returns its usage."""
    n = asked.sampling.n or 1
    expected = undisturbed(asked)
    assert joined(parts, n) == joined(expected, n)
    assert prompt_entries(parts) == prompt_entries(expected)
    assert [part.HasField("start") for part in parts].count(True) == 1
    assert parts[0].start.seed == asked.sampling.seed
    assert [part.HasField("usage") for part in parts[:-1]].count(True) == 0
    usage = parts[-1].usage
    assert usage.num_prompt_tokens == 5
    assert usage.num_completion_tokens == n * NUM_TOKENS
    assert usage.num_accepted_tokens <= min(usage.num_draft_tokens, n * NUM_TOKENS)
    assert sum(usage.gamma_histogram) == usage.num_steps
    return usage


async def two_workers(make_worker: Any, make_gateway: Any, **flags: Any) -> Any:
    """A worker that gets every first call, one that goes on, and their gateway."""
    first = await make_worker(manner=MANNER)
    second = await make_worker(manner=MANNER, status={"num_waiting": 9})
    served = await make_gateway(first, second, routing="least_loaded", **flags)
    return first, second, served


@pytest.mark.parametrize(
    ("sampling", "lag"),
    [
        ({"temperature": 0.0}, 0),
        (SAMPLED, 3),
        ({**SAMPLED, "logprobs": 2, "prompt_logprobs": 1}, 1),
    ],
    ids=["greedy", "sampled", "logprobs"],
)
async def test_lost_at_every_token(
    make_worker: Any, make_gateway: Any, sampling: dict[str, Any], lag: int
) -> None:
    """Lost at every token k of 64: the client reads what it would have read, text late or not."""
    first, second, served = await two_workers(make_worker, make_gateway, probe_interval_ms=10)
    first.manner = second.manner = replace(MANNER, lag=lag)
    for k in range(NUM_TOKENS):
        first.lost_after = k
        known = served.gateway.registry.workers[first.address]
        await until(lambda known=known: not known.not_ready, "the first worker is back")
        asked = request(**sampling)
        before = len(second.requests)
        usage = check(await collect(served, asked), asked)
        assert len(second.requests) == before + 1
        rest = second.requests[-1]
        if k or "prompt_logprobs" in sampling:  # the client has the beginning of the answer
            assert rest.continuation.attempt == 1
            assert len(rest.continuation.token_ids) == k
            assert usage.num_steps == -(-(NUM_TOKENS - k) // 2)
        else:
            assert not rest.HasField("continuation")
    assert first.num_lost == NUM_TOKENS


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {**SAMPLED, "logprobs": 1}])
async def test_several_choices_lost_at_every_token(
    make_worker: Any, make_gateway: Any, sampling: dict[str, Any]
) -> None:
    """With n = 2, each choice that is not finished goes on by itself, under its own seed."""
    first, second, served = await two_workers(make_worker, make_gateway, probe_interval_ms=10)
    known = served.gateway.registry.workers[first.address]
    for k in range(0, 2 * NUM_TOKENS, 7):
        first.lost_after = k
        await until(lambda: not known.not_ready, "the first worker is back")
        asked = request(n=2, prompt_logprobs=0, **sampling)
        before = len(second.requests)
        check(await collect(served, asked), asked)
        rests = second.requests[before:]
        assert len(rests) == (1 if k == 2 * NUM_TOKENS - 1 else 2)
        if k:  # a message of the prompt's log-probabilities came: each goes on by itself
            seeds = {choice_seed(asked.sampling.seed, i) for i in range(2)}
            assert {rest.continuation.seed for rest in rests} <= seeds
            assert {rest.sampling.n for rest in rests} == {0}
            assert not any(rest.sampling.HasField("prompt_logprobs") for rest in rests)


async def test_a_choice_that_finished_is_not_asked_for_again(
    make_worker: Any, make_gateway: Any
) -> None:
    """All choices are finished and only the usage is missing: it is counted from what came."""
    first, second, served = await two_workers(make_worker, make_gateway)

    def without_usage(asked: pb.GenerateRequest) -> list[pb.GenerateResponse]:
        parts = undisturbed(asked)
        parts[-1].ClearField("usage")
        return parts

    first.script = without_usage
    asked = request(n=3)
    parts = await collect(served, asked)
    assert joined(parts, 3) == joined(undisturbed(asked), 3)
    assert parts[-1].usage.num_completion_tokens == 3 * NUM_TOKENS
    assert second.requests == []


async def test_a_stream_that_ends_early_is_resumed(make_worker: Any, make_gateway: Any) -> None:
    """A worker that closes its stream without a finish reason counts as one that left."""
    first, _, served = await two_workers(make_worker, make_gateway)
    first.script = lambda asked: undisturbed(asked)[:20]
    asked = request()
    check(await collect(served, asked), asked)


async def test_a_drain_that_times_out_is_resumed(make_worker: Any, make_gateway: Any) -> None:
    """A worker that draining ends what it has begun with its own words; the client never knows."""
    first, second, served = await two_workers(make_worker, make_gateway)
    first.error_after = 9
    first.late_error = Unavailable("the worker ended the answer before it was complete")
    asked = request(**SAMPLED)
    call = served.grpc.Generate(asked)
    check([part async for part in call], asked)
    assert (await call.trailing_metadata())["nightjar-resumed"] == "exact"
    assert len(second.requests[0].continuation.token_ids) == 9


async def test_an_engine_that_breaks_is_left_once(make_worker: Any, make_gateway: Any) -> None:
    """Answers that had begun on an engine that failed go on, but take no third engine down."""
    first, second, served = await two_workers(make_worker, make_gateway)
    first.error_after, first.late_error = 9, EngineFailure("the engine died")
    asked = request(**SAMPLED)
    check(await collect(served, asked), asked)
    third = await make_worker(manner=MANNER, status={"num_waiting": 18})
    served = await make_gateway(first, second, third, routing="least_loaded")
    second.error_after, second.late_error = 20, EngineFailure("the engine died")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(served, asked)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert caught.value.details() == "the engine died"
    assert third.requests == []


async def test_draining_worker_keeps_what_it_has(make_worker: Any, make_gateway: Any) -> None:
    """While a worker drains its answers go on there, and new requests go elsewhere."""
    first, second, served = await two_workers(make_worker, make_gateway, stall_timeout_ms=100)
    first.pause_after = 5
    asked = request()
    call = asyncio.create_task(collect(served, asked))
    await until(lambda: first.num_active == 1, "it is being answered")
    first.status = {"accepting": False}
    await until(lambda: bool(served.gateway.registry.workers[first.address].not_ready), "it drains")
    check(await collect(served, asked), asked)
    assert (first.num_active, len(second.requests)) == (1, 1)
    first.resume.set()
    check(await call, asked)
    assert len(second.requests) == 1


async def test_other_arithmetic_is_never_used(make_worker: Any, make_gateway: Any) -> None:
    """Where only workers of another fingerprint are left, the answer ends with a sentence."""
    first, second, served = await two_workers(make_worker, make_gateway)
    second.manner = replace(MANNER, fingerprint="other")
    second.fingerprint = "other"
    registry = served.gateway.registry
    await until(
        lambda: {load.fingerprint for load in registry.loads()} == {"fake", "other"}, "it is known"
    )
    first.lost_after = 7
    call = served.grpc.Generate(request())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        _ = [part async for part in call]
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert caught.value.details() == (
        "the worker was lost; no other worker with the same arithmetic can go on with the "
        "answer now"
    )
    assert second.requests == []


async def test_arithmetic_that_changed_unseen_is_refused(
    make_worker: Any, make_gateway: Any
) -> None:
    """A worker whose last status is out of date refuses the rest; a third one gives it."""
    first, second, _ = workers = [
        await make_worker(manner=MANNER, status={"num_waiting": 9 * i}) for i in range(3)
    ]
    served = await make_gateway(*workers, routing="least_loaded", probe_interval_ms=60_000)
    second.manner = replace(MANNER, fingerprint="new")
    first.lost_after = 7
    asked = request()
    check(await collect(served, asked), asked)
    assert [len(worker.requests) for worker in workers] == [1, 1, 1]


async def test_attempts_are_bounded(make_worker: Any, make_gateway: Any) -> None:
    """A third worker that is lost is the last: the client is told, and has every token once."""
    workers = [await make_worker(manner=MANNER, lost_after=10 * i) for i in (1, 2, 3, 4)]
    served = await make_gateway(*workers, routing="least_loaded", probe_interval_ms=60_000)
    for i, worker in enumerate(workers):
        worker.status = {"num_waiting": 9 * i}
    registry = served.gateway.registry
    for worker in registry.workers.values():
        await worker.probe(served.gateway.registry._config)
    call = served.grpc.Generate(request())
    parts: list[pb.GenerateResponse] = []
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_into(parts, call)
    assert caught.value.details() == (
        "the worker was lost; the answer broke off at 3 workers, and no more are asked"
    )
    assert [len(worker.requests) for worker in workers] == [1, 1, 1, 0]
    assert [worker.requests[0].continuation.attempt for worker in workers[:3]] == [0, 1, 2]
    ids, text, _, finished = joined(parts)[0]
    expected = joined(undisturbed(request()))[0]
    assert (ids, finished) == (expected[0][:30], [])
    assert expected[1].startswith(text)


async def test_an_answer_that_began_waits_for_a_full_worker(
    make_worker: Any, make_gateway: Any
) -> None:
    """If all that could go on are full, the answer waits for one instead of failing."""
    first, second, served = await two_workers(make_worker, make_gateway)
    first.lost_after = 5
    second.error = Overloaded("the queue is full", 0.05)
    asked = request()
    call = asyncio.create_task(collect(served, asked))
    await until(lambda: len(second.requests) >= 3, "it was asked more than once")
    second.error = None
    check(await call, asked)
    assert {rest.continuation.attempt for rest in second.requests} == {1}


async def test_a_full_worker_is_not_waited_for_without_end(
    make_worker: Any, make_gateway: Any
) -> None:
    """The wait for full workers ends in its time, with the last one's words."""
    first, second, served = await two_workers(make_worker, make_gateway, resume_timeout_s=0.2)
    first.lost_after = 5
    second.error = Overloaded("the queue is full", 0.05)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(served, request())
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert caught.value.details().startswith("the queue is full; no other worker")  # type: ignore[union-attr]


async def test_free_arithmetic_says_so(make_worker: Any, make_gateway: Any) -> None:
    """Under free arithmetic resuming is best effort, and the trailing metadata say it."""
    first, second, served = await two_workers(make_worker, make_gateway, ready=False)
    first.arithmetic = second.arithmetic = "free"
    registry = served.gateway.registry
    await until(
        lambda: all(w.status.arithmetic.mode == "free" for w in registry.workers.values()),
        "both are known to be free",
    )
    first.lost_after = 7
    asked = request()
    call = served.grpc.Generate(asked)
    check([part async for part in call], asked)
    assert (await call.trailing_metadata())["nightjar-resumed"] == "best-effort"


async def test_a_continuation_goes_to_its_own_arithmetic(
    make_worker: Any, make_gateway: Any
) -> None:
    """A client's own continuation goes to a worker of that fingerprint, and can go on again."""
    first, second, third = [
        await make_worker(manner=MANNER, status={"num_waiting": 9 * i}) for i in range(3)
    ]
    first.fingerprint, first.manner = "other", replace(MANNER, fingerprint="other")
    served = await make_gateway(first, second, third, routing="least_loaded")
    asked = request(**SAMPLED)
    whole = joined(undisturbed(asked))[0]
    asked.continuation.CopyFrom(
        pb.Continuation(
            token_ids=whole[0][:10],
            seed=asked.sampling.seed,
            num_text_bytes_delivered=len(" é".encode()),
            attempt=1,
            arithmetic_fingerprint="fake",
        )
    )
    second.lost_after = 20
    ids, text, _, finished = joined(await collect(served, asked))[0]
    assert ids == whole[0][10:]
    assert (" é" + text, finished) == (whole[1], whole[3])
    assert [len(worker.requests) for worker in (first, second, third)] == [0, 1, 1]
    assert third.requests[0].continuation.attempt == 2
    asked.continuation.arithmetic_fingerprint = "unknown"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(served, asked)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


# ---- stalled workers -------------------------------------------------------------------


@pytest.mark.parametrize("how", ["front", "engine"])
async def test_stalled_worker_is_left_and_fenced(
    make_worker: Any, make_gateway: Any, how: str
) -> None:
    """A worker that stands still is replaced; awake again, it reaches no client and no count."""
    first, second, served = await two_workers(
        make_worker, make_gateway, stall_timeout_ms=100, probe_timeout_ms=500
    )
    first.pause_after = 11
    asked = request(**SAMPLED)
    call = asyncio.create_task(collect(served, asked))
    await until(lambda: first.num_active == 1, "it is being answered")
    if how == "front":
        first.probe_delay_s = 5
    else:
        first.status = {"progress_age_ms": 60_000}
    check(await call, asked)
    assert second.requests[0].continuation.attempt == 1
    first.probe_delay_s, first.status = 0, {}
    first.resume.set()
    await until(lambda: first.num_active == 0, "its own call was cancelled")
    registry = served.gateway.registry
    await until(lambda: registry.ready and all(w.ready for w in registry.loads()), "it is back")
    await until(lambda: all(w.num_dispatched == 0 for w in registry.loads()), "nothing counts")
    await until(
        lambda: [w.num_requests for w in registry.loads()] == [0, 9], "but what a status says"
    )


async def test_a_slow_token_is_no_stall(make_worker: Any, make_gateway: Any) -> None:
    """While a worker's engine makes steps, an answer without a message stays with it."""
    first, second, served = await two_workers(make_worker, make_gateway, stall_timeout_ms=100)
    first.pause_after = 5
    asked = request()
    call = asyncio.create_task(collect(served, asked))
    await until(lambda: first.num_active == 1, "it is being answered")
    known = served.gateway.registry.workers[first.address]
    seen = []

    def probed_for_long() -> bool:
        seen.append(id(known.status))
        return len(set(seen)) > 20

    await until(probed_for_long, "many probes were answered")
    assert second.requests == []
    first.resume.set()
    check(await call, asked)


async def test_a_stalled_worker_is_kept_where_no_other_can_go_on(
    make_worker: Any, make_gateway: Any
) -> None:
    """A stall ends no answer that nobody could go on with: the worker may wake, and it does."""
    worker = await make_worker(manner=MANNER, pause_after=11)
    served = await make_gateway(worker, stall_timeout_ms=100)
    asked = request()
    call = asyncio.create_task(collect(served, asked))
    await until(lambda: worker.num_active == 1, "it is being answered")
    worker.status = {"progress_age_ms": 60_000}
    known = served.gateway.registry.workers[worker.address]
    await until(lambda: known.silent, "it stands still")
    await until(lambda: len(known._streams) == 1, "the call is open")
    worker.status = {}
    worker.resume.set()
    check(await call, asked)


# ---- the other door --------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
async def test_http_clients_see_one_answer(
    make_worker: Any, make_gateway: Any, stream: bool
) -> None:
    """Over HTTP an answer that went on has one role, one finish reason, one end, right usage."""
    first, second, served = await two_workers(make_worker, make_gateway)
    first.lost_after = 20
    body = {
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": NUM_TOKENS,
        "seed": 7,
        "stream": stream,
        **({"stream_options": {"include_usage": True}} if stream else {}),
    }
    response = await served.http.post("/v1/chat/completions", json=body)
    assert len(second.requests) == 1
    asked = pb.GenerateRequest(
        chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="hello")]),
        sampling=pb.SamplingParams(max_tokens=NUM_TOKENS, seed=7),
    )
    ((_, text, _, _),) = joined(undisturbed(asked))
    if not stream:
        choice, usage = response.json()["choices"][0], response.json()["usage"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (text, "length")
    else:
        *events, done, end = response.text.split("\n\n")
        assert (done, end) == ("data: [DONE]", "")
        chunks = [json.loads(event[6:]) for event in events]
        usage = chunks.pop()["usage"]
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert "".join(delta.get("content") or "" for delta in deltas) == text
        assert [delta["role"] for delta in deltas if "role" in delta] == ["assistant"]
        reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
        assert [reason for reason in reasons if reason] == ["length"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, NUM_TOKENS)
