"""The memory agent's command, and waiting for what it says of itself."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from pathlib import Path

from memory_worker import MemoryWorker
from processes import Command

from nightjar.v1 import memory_pb2


def start_agent(folder: Path, failpoint: str = "", *flags: str) -> tuple[Command, str]:
    """An agent that accepts pools in `folder`, and its address."""
    command = Command(
        "-m", "nightjar", "memory-agent", f"--shm-dir={folder}", "--hold-s=0", *flags,
        environ={"NIGHTJAR_FAILPOINT": failpoint},
    )  # fmt: skip
    command.shows("listening on ")
    found = re.search(r"^listening on (\S+)$", command.stdout, re.MULTILINE)
    assert found is not None
    return command, found.group(1)


async def until(
    worker: MemoryWorker, holds: Callable[[memory_pb2.GetMemoryStatusResponse], bool]
) -> memory_pb2.GetMemoryStatusResponse:
    """Wait for a status; what is sent on the stream is not ordered with calls beside it."""
    deadline = time.monotonic() + 30
    while not holds(status := await worker.status()):
        assert time.monotonic() < deadline, status
        await asyncio.sleep(0.005)
    return status


async def is_detached(worker: MemoryWorker) -> None:
    """Wait until the agent has let go of its worker."""
    await until(worker, lambda status: not status.worker_id)
