"""The gateway as a process of its own: ports, signals, what it loads."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from conditions import until
from fake_worker import FakeWorker, words
from processes import Command

COMMAND = ("-m", "nightjar", "gateway")


@pytest.fixture
def taken() -> Iterator[str]:
    """The address of a port that somebody else listens on."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield f"127.0.0.1:{other.getsockname()[1]}"


def refused(*flags: str) -> str:
    """What a gateway says that cannot start; it exits with status 2 and starts nothing."""
    ended = subprocess.run(
        [sys.executable, *COMMAND, *flags], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 2
    assert ended.stdout == ""
    return ended.stderr


FREE = ("--grpc-listen=127.0.0.1:0", "--http-listen=127.0.0.1:0", "--workers=127.0.0.1:1")


@pytest.mark.parametrize("flag", ["--grpc-listen", "--http-listen"])
def test_taken_port_is_a_clear_error(taken: str, flag: str) -> None:
    """A taken port stops the process with one sentence that names flag and address."""
    assert (
        refused(*FREE, f"{flag}={taken}")
        .splitlines()[-1]
        .startswith(f"nightjar gateway: {flag}='{taken}': cannot bind")
    )


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (FREE[:2], "--workers: needs the address of one worker or more"),
        ((*FREE, "--workers=a:1,a:1"), "--workers='a:1,a:1': must be one address or more"),
        ((*FREE, "--workers=a"), "--workers='a': must be one address or more"),
        ((*FREE, "--workers=http://a:1"), "each once: HOST:PORT or unix:PATH"),
        ((*FREE, "--http-listen=nonsense"), "--http-listen='nonsense': must be host:port"),
        ((*FREE, "--http-listen=127.0.0.1:99999"), "must be host:port"),
        ((*FREE, "--probe-interval-ms=0"), "--probe-interval-ms='0': must be at least 10"),
        ((*FREE, "--frobnicate=1"), "unrecognized arguments: --frobnicate=1"),
    ],
)
def test_bad_flags(flags: tuple[str, ...], sentence: str) -> None:
    """A flag that cannot be is refused by name and value, with status 2."""
    assert sentence in refused(*flags)


def test_never_loads_torch() -> None:
    """The gateway's code needs neither torch nor transformers nor a tokenizer."""
    code = (
        "import sys, gateway.main; "
        "print({'torch', 'transformers', 'tokenizers', 'numpy'} & set(sys.modules))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout.strip() == "set()"


async def test_drains_on_sigterm(worker: FakeWorker) -> None:
    """SIGTERM: open answers finish whole, new ones find nobody, the process exits with 0."""
    worker.pause_after = 2
    with Command(*COMMAND, *FREE[:2], f"--workers={worker.address}") as gateway:
        await asyncio.to_thread(gateway.shows, "http listening on ")
        await asyncio.to_thread(gateway.shows, "worker ready")
        lines = gateway.stdout.splitlines()
        assert [line.rpartition(" ")[0] for line in lines] == [
            "grpc listening on",
            "http listening on",
        ]
        address = lines[1].rpartition(" ")[2]
        async with httpx.AsyncClient(base_url=f"http://{address}", timeout=20) as client:
            body = {"prompt": "hello", "max_tokens": 9}
            streamed = client.post("/v1/completions", json={**body, "stream": True})
            calls = [
                asyncio.create_task(c)
                for c in (streamed, client.post("/v1/completions", json=body))
            ]
            await until(lambda: worker.num_active == 2, "both are being answered")
            gateway.signal(signal.SIGTERM)

            async def closed() -> bool:
                try:
                    await client.get("/health/ready")
                except httpx.ConnectError:
                    return True
                except httpx.TransportError:  # it was in the queue of the socket as that closed
                    return False
                return False

            await until(closed, "nothing more is accepted")
            worker.resume.set()
            first, second = await asyncio.gather(*calls)
        assert await asyncio.to_thread(gateway.wait) == 0
    assert first.text.endswith("data: [DONE]\n\n")
    events = [json.loads(e[6:]) for e in first.text[:-2].split("\n\n")[:-1]]
    assert "".join(event["choices"][0]["text"] for event in events) == words(9)
    assert second.json()["choices"][0]["text"] == words(9)


async def test_drain_ends_in_time(worker: FakeWorker) -> None:
    """An answer that does not end is cut when the drain's time is over; the worker is freed."""
    worker.pause_after = 2
    flags = (*FREE[:2], f"--workers={worker.address}", "--drain-timeout-s=0.3")
    with Command(*COMMAND, *flags) as gateway:
        await asyncio.to_thread(gateway.shows, "worker ready")
        address = gateway.stdout.split()[-1]
        async with httpx.AsyncClient(base_url=f"http://{address}", timeout=20) as client:
            body = {"prompt": "hello", "stream": True}
            call = asyncio.create_task(client.post("/v1/completions", json=body))
            await until(lambda: worker.num_active == 1, "it is being answered")
            gateway.signal(signal.SIGTERM)
            assert await asyncio.to_thread(gateway.wait, 10) == 0
            result: Any = (await asyncio.gather(call, return_exceptions=True))[0]
    assert isinstance(result, httpx.HTTPError) or "[DONE]" not in result.text
    await until(lambda: worker.num_active == 0, "the worker was told")
