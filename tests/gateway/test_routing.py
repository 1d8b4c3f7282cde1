"""Routing policies in a running gateway, over workers that a test scripts."""

from __future__ import annotations

import asyncio
from typing import Any

from conditions import until

from nightjar.v1 import generation_pb2 as pb

SYSTEM = "You are a bird that answers in few words. " * 7  # more than the shortest key


def chat(question: str) -> pb.GenerateRequest:
    """A short question after a long system prompt."""
    messages = [
        pb.ChatMessage(role="system", content=SYSTEM[:240]),
        pb.ChatMessage(role="user", content=question),
    ]
    return pb.GenerateRequest(
        chat=pb.ChatPrompt(messages=messages), sampling=pb.SamplingParams(max_tokens=2)
    )


def tokens(group: int, last: int) -> pb.GenerateRequest:
    """A prompt of 65 token ids; those of a group differ in the last alone."""
    ids = [group] * 64 + [last]
    sampling = pb.SamplingParams(max_tokens=2)
    return pb.GenerateRequest(tokens=pb.TokenPrompt(token_ids=ids), sampling=sampling)


async def ask(served: Any, request: pb.GenerateRequest) -> None:
    """Read an answer to its end."""
    assert [part async for part in served.grpc.Generate(request)][-1].HasField("usage")


async def test_prompts_that_begin_alike_share_a_worker(make_worker: Any, make_gateway: Any) -> None:
    """By default one system prompt means one worker, over gRPC and HTTP; the others spread."""
    workers = [await make_worker() for _ in range(3)]
    served = await make_gateway(*workers)
    for question in "abcd":
        await ask(served, chat(question))
    messages = [
        {"role": "system", "content": SYSTEM[:240]},
        {"role": "user", "content": "e"},
    ]
    body = {"messages": messages, "max_tokens": 2}
    assert (await served.http.post("/v1/chat/completions", json=body)).status_code == 200
    assert sorted(len(worker.requests) for worker in workers) == [0, 0, 5]
    for group in range(24):
        await ask(served, tokens(group, 0))
    assert all(len(worker.requests) > 0 for worker in workers)


async def test_a_lost_worker_moves_its_own_prompts_alone(
    make_worker: Any, make_gateway: Any
) -> None:
    """When a worker dies its groups find another, no request fails, and the rest stay."""
    workers = [await make_worker() for _ in range(3)]
    served = await make_gateway(*workers)

    async def homes(last: int) -> list[int]:
        found = []
        for group in range(16):
            before = [len(worker.requests) for worker in workers]
            await ask(served, tokens(group, last))
            after = [len(worker.requests) for worker in workers]
            found += [i for i in range(3) if after[i] > before[i]]
        return found

    first = await homes(1)
    lost = first[0]
    await workers[lost].kill()
    second = await homes(2)
    assert lost not in second
    assert [b for a, b in zip(first, second, strict=True) if a != lost] == [
        a for a in first if a != lost
    ]


async def test_affinity_is_bounded(make_worker: Any, make_gateway: Any) -> None:
    """A burst that begins alike fills its worker to the factor's share, and no further."""
    workers = [await make_worker(pause_after=0) for _ in range(2)]
    served = await make_gateway(*workers, probe_interval_ms=60_000, routing_load_factor=1.5)
    calls = [asyncio.create_task(ask(served, tokens(7, i))) for i in range(16)]
    await until(lambda: sum(w.num_active for w in workers) == 16, "all are being answered")
    assert sorted(w.num_active for w in workers) == [4, 12]
    for worker in workers:
        worker.resume.set()
    await asyncio.gather(*calls)


async def test_speculation_aware_reads_the_statuses(make_worker: Any, make_gateway: Any) -> None:
    """The worker at gamma 0 gets requests while a planner says so; without one, load decides."""
    busy = {"num_running": 10, "planner_connected": True}
    plain = await make_worker(status=busy)
    drafting = await make_worker(status={**busy, "num_running": 9, "gamma": 1})
    served = await make_gateway(plain, drafting, routing="speculation_aware")
    for _ in range(3):
        await ask(served, tokens(1, 1))
    assert (len(plain.requests), len(drafting.requests)) == (3, 0)
    plain.status = {**busy, "planner_connected": False}
    registry = served.gateway.registry
    known = registry.workers[plain.address]
    await until(lambda: not known.load.planner_connected, "the planner is gone")
    await ask(served, tokens(1, 1))
    assert (len(plain.requests), len(drafting.requests)) == (3, 1)
