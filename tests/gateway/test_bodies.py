"""Headers and bodies that arrive slowly, or never whole: bounded, and others are served."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import pytest
from conditions import until
from fake_worker import FakeWorker

from gateway.http import app, server
from gateway.http.body import Bodies

COMPLETION = "/v1/completions"
MAX_BYTES = 256 * 1024
JSON_TYPE = {"content-type": "application/json"}
HEAD = (
    f"POST {COMPLETION} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    f"content-length: {MAX_BYTES}\r\n\r\n"
).encode()
SMALL = b'{"prompt": "hello", "max_tokens": 2}'
LARGE = SMALL.ljust(MAX_BYTES)


async def begun(served: Any, content: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that has sent a header and a part of its body."""
    host, port = served.gateway.http_address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(HEAD + content)
    await writer.drain()
    return reader, writer


async def test_unfinished_bodies_hold_a_bounded_part_of_memory(
    worker: FakeWorker, make_gateway: Any
) -> None:
    """Large bodies beyond the room are refused, small ones never, and those that go make room."""
    served = await make_gateway(worker, max_body_bytes=MAX_BYTES)

    async def status_of_a_large_one() -> int:
        response = await served.http.post(COMPLETION, content=LARGE, headers=JSON_TYPE)
        if response.status_code == 429:
            assert response.headers["retry-after"] == "1"
            assert "too many large ones" in response.json()["error"]["message"]
        return int(response.status_code)

    assert await status_of_a_large_one() == 200
    clients = [await begun(served, LARGE[:-1]) for _ in range(30)]

    async def full() -> bool:
        clients.append(await begun(served, LARGE[:-1]))
        return await status_of_a_large_one() == 429

    await until(full, "no more large bodies are read")
    for _ in range(3):
        small = await served.http.post(COMPLETION, content=SMALL, headers=JSON_TYPE)
        assert small.status_code == 200
    answers = []
    for reader, writer in clients:
        writer.write(b" ")
        answers.append((await reader.readline()).split()[1])
        writer.close()
    # 16 of the largest, whose first 64 KiB each are counted for nobody, make 21 of these.
    assert set(answers) == {b"200", b"429"}
    assert answers.count(b"200") <= 21
    assert await status_of_a_large_one() == 200
    clients = [await begun(served, LARGE[:-1]) for _ in range(30)]
    await until(full, "no more large bodies are read")
    for _, writer in clients:
        writer.close()

    async def roomy() -> bool:
        return await status_of_a_large_one() == 200

    await until(roomy, "clients that left hold nothing")


async def test_a_body_has_to_arrive_in_time(
    worker: FakeWorker, make_gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body that does not end is refused with 408, and its connection closed."""
    monkeypatch.setattr(app, "Bodies", functools.partial(Bodies, timeout_s=0.2))
    served = await make_gateway(worker)
    for part in (b"", SMALL):
        reader, writer = await begun(served, part)
        answer = await asyncio.wait_for(reader.read(), 10)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"body: must arrive within 0.2 s" in answer
        writer.close()
    assert worker.requests == []


async def test_a_header_has_to_arrive_in_time(
    worker: FakeWorker, make_gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A header, or a body after its answer, that comes bit by bit or never ends its connection."""
    monkeypatch.setattr(server, "_KEEP_ALIVE_S", 1)
    served = await make_gateway(worker)
    host, port = served.gateway.http_address.split(":")
    live = b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n"
    body = b'{"prompt": "hello", "max_tokens": 8}'
    whole = HEAD.replace(str(MAX_BYTES).encode(), str(len(body)).encode()) + body

    async def end_of(first: bytes, drips: bool) -> bytes:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(first)
        answer = asyncio.create_task(reader.read())
        while drips and not answer.done():
            writer.write(b"x")
            await asyncio.wait([answer], timeout=0.1)
        await asyncio.wait_for(answer, 10)
        writer.close()
        return answer.result()

    worker.pause_after = 2
    slow_answers = asyncio.create_task(end_of(live + whole + whole, drips=False))
    await until(lambda: worker.num_active == 1, "an answer that takes its time has begun")
    refused = HEAD.replace(b"application/json", b"text/plain")  # before its body is here
    endless = [(b"", False), (b"GET /he", False), (b"GET /", True), (live, True), (refused, True)]
    answers = await asyncio.gather(*(end_of(first, drips) for first, drips in endless))
    assert [answer[9:12] for answer in answers] == [b"", b"", b"", b"200", b"415"]
    assert not slow_answers.done()
    worker.resume.set()
    assert (await slow_answers).count(b"HTTP/1.1 200 ") == 3
