"""Clients that vanish, hang, repeat themselves or never read: each harms its own request alone."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from calls import answer, asked, health, refusal
from conditions import until
from grpc_health.v1 import health_pb2

import worker as product
from nightjar import rpc
from worker.front.state import WorkerState

FrontMaker = Callable[..., Any]


async def test_cancelled_in_every_phase_nothing_is_left(front: FrontMaker) -> None:
    """After k messages, for every k, with choices or not: aborted, and the neighbour is whole."""
    async with front("--tick-ms=5", max_num_seqs=4) as worker:
        canary = asyncio.create_task(answer(worker, asked("xyz", max_tokens=500)))
        for n in (1, 3):
            for k in range(6):
                call = worker.generation.Generate(asked("abc", max_tokens=400, n=n))
                for _ in range(k):
                    await call.read()
                call.cancel()
        await until(lambda: _live(worker, 1), "only the canary is left")
        pieces = await canary
        assert "".join(piece.text for piece in pieces) == ("xyz" * 167)[:500]
        await until(lambda: _live(worker, 0), "nothing is left")


async def _live(worker: Any, number: int) -> bool:
    status = await worker.status()
    return bool(
        status.num_running + status.num_waiting == number and status.num_free_blocks == 100 - number
    )


async def test_twenty_cancelled_streams_leave_health_answering(front: FrontMaker) -> None:
    """Handlers of calls that are cancelled end: health answers, and so does the next request."""
    async with front("--tick-ms=5", max_num_seqs=32) as worker:
        await until(lambda: _healthy(worker), "ready")
        calls = [worker.generation.Generate(asked(max_tokens=500)) for _ in range(20)]
        for call in calls:
            await call.read()
        for call in calls:
            call.cancel()
        assert await _healthy(worker)
        assert (await answer(worker, asked(max_tokens=3)))[-1].usage.num_completion_tokens == 3
        await until(lambda: len(worker.told("Abort")) == 20, "all are aborted")


async def _healthy(worker: Any) -> bool:
    return await health(worker) == health_pb2.HealthCheckResponse.SERVING


async def test_one_request_id_twice(front: FrontMaker) -> None:
    """Ids of clients are for logs: two live requests of one id get two whole answers."""
    async with front("--tick-ms=5") as worker:
        requests = [asked("abc", max_tokens=30), asked("xy", max_tokens=30)]
        for request in requests:
            request.request_id = "twice"
        first, second = await asyncio.gather(*(answer(worker, one) for one in requests))
        assert "".join(piece.text for piece in first) == "abc" * 10
        assert "".join(piece.text for piece in second) == "xy" * 15


async def test_something_inside_is_cancelled(
    front: FrontMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CancelledError that no client asked for ends the call with ABORTED, and frees its place."""

    async def cancelled(*_: object) -> None:
        raise asyncio.CancelledError

    async with front() as worker:
        monkeypatch.setattr(WorkerState, "encode", cancelled)
        error = await asyncio.wait_for(refusal(worker, asked()), 10)
        assert error.code() is grpc.StatusCode.ABORTED
        monkeypatch.undo()
        assert (await answer(worker, asked(max_tokens=2)))[-1].usage.num_completion_tokens == 2


async def test_pings_during_a_silent_prefill_cut_nothing(
    front: FrontMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a 25th of all intervals a client pings four times while no byte comes, then the answer.

    Servers that tolerate fewer pings than clients send would have cut it after the third.
    """
    for side in ("SERVER_OPTIONS", "CHANNEL_OPTIONS"):
        options = [
            (name, value // 25 if "interval" in name or name.endswith("_time_ms") else value)
            for name, value in getattr(rpc, side)
        ]
        monkeypatch.setattr(rpc, side, options)
    assert dict(rpc.CHANNEL_OPTIONS)["grpc.keepalive_time_ms"] == 1200  # 1,000 is gRPC's least
    async with front("--prefill-s=5.5") as worker:
        pieces = await answer(worker, asked(max_tokens=1))
        assert pieces[-1].usage.num_completion_tokens == 1


def test_processes_are_spawned() -> None:
    """Nobody who speaks gRPC forks: a process of its own begins with a new interpreter."""
    root = Path(product.__file__).parents[1]
    paths = [
        p for name in ("worker", "gateway", "memory_agent") for p in (root / name).rglob("*.py")
    ]
    assert len(paths) > 100
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute | ast.Name | ast.alias):
                name = getattr(node, "attr", None) or getattr(node, "id", None) or node.name  # type: ignore[union-attr]
                assert name not in ("fork", "forkpty", "multiprocessing", "preexec_fn"), path


async def test_slow_readers_cost_little_and_delay_nobody(front: FrontMaker) -> None:
    """Fifty clients leave most of their answers unread; a neighbour streams, and each gets its own.

    With log-probabilities an answer is larger than what the transport takes from the worker.
    """
    async with front("--num-tokens=40", "--context=8000", max_num_seqs=64) as worker:
        before = psutil.Process().memory_info().rss
        slow = [
            worker.generation.Generate(asked("abcd", max_tokens=1000, logprobs=5))
            for _ in range(50)
        ]
        for call in slow:
            await call.read()
        neighbour = await answer(worker, asked("xyz", max_tokens=400))
        assert "".join(piece.text for piece in neighbour) == ("xyz" * 134)[:400]
        # Complete for the engine, though nobody has read them: no place is taken any more.
        await until(lambda: _live(worker, 0), "the engine is done")
        assert psutil.Process().memory_info().rss - before < 64 * 1024 * 1024
        for call in slow:
            last = piece = await call.read()
            while piece is not grpc.aio.EOF:
                last, piece = piece, await call.read()
            assert last.usage.num_completion_tokens == 1000
