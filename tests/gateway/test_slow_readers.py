"""Clients that do not read over HTTP: nothing on the way holds whole answers in their place."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from typing import Any

from conditions import until
from fake_worker import FakeWorker

NUM_CLIENTS = 8
MESSAGE_BYTES, NUM_MESSAGES = 16_000, 120


async def test_the_kernel_holds_no_whole_answers(worker: FakeWorker, served: Any) -> None:
    """What a client leaves unread is bounded in the socket too, which would hold megabytes."""
    worker.padding = "x" * MESSAGE_BYTES
    body = json.dumps({"prompt": "hello", "stream": True, "max_tokens": 2 * NUM_MESSAGES})
    question = (
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n{body}"
    ).encode()
    host, port = served.gateway.http_address.split(":")
    clients = []
    for _ in range(NUM_CLIENTS):
        client = socket.socket()
        clients.append(client)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, (host, int(port)))
        await asyncio.get_running_loop().sock_sendall(client, question)
    last = (0, time.monotonic())

    def stands_still() -> bool:
        nonlocal last
        if worker.num_sent != last[0]:
            last = (worker.num_sent, time.monotonic())
        return worker.num_sent > 0 and time.monotonic() - last[1] > 0.5

    await until(stands_still, "nothing more is taken")
    assert worker.num_active == NUM_CLIENTS
    assert worker.num_sent < NUM_CLIENTS * NUM_MESSAGES / 4
    for client in clients:
        client.close()
    await until(lambda: worker.num_active == 0, "the worker was told")
