"""The processes of `gateway.py`, and what they take: an echo worker, a gateway, a relay."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, kw_only=True)
class Services:
    """A gateway before an echo worker, and a bare relay before the same."""

    worker: psutil.Process
    gateway: psutil.Process
    worker_address: str
    grpc_address: str
    http_address: str
    relay_address: str


@contextlib.contextmanager
def system() -> Iterator[Services]:
    """All of them, ready; ended with the block."""
    with contextlib.ExitStack() as stack:
        script = str(Path(__file__).with_name("gateway_echo.py"))
        worker, [echo] = stack.enter_context(started([script], 1))
        _, [relay] = stack.enter_context(started([script, f"--relay-of={echo}"], 1))
        flags = ["--grpc-listen=127.0.0.1:0", "--http-listen=127.0.0.1:0", f"--workers={echo}"]
        command = ["-m", "nightjar", "gateway", *flags]
        gateway, [door, http] = stack.enter_context(started(command, 2))
        command = [sys.executable, "-m", "nightjar", "healthcheck", "--wait", "60", door]
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        yield Services(
            worker=psutil.Process(worker),
            gateway=psutil.Process(gateway),
            worker_address=echo,
            grpc_address=door,
            http_address=http,
            relay_address=relay,
        )


@contextlib.contextmanager
def started(command: list[str], num_addresses: int) -> Iterator[tuple[int, list[str]]]:
    """A server process and the addresses that it prints."""
    argv = [sys.executable, *command]
    # Started elsewhere, -m might find this folder's gateway.py for the gateway.
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT
    ) as process:
        try:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(num_addresses)]
            if not all(lines):
                raise SystemExit(f"did not start: {' '.join(command)}")
            yield process.pid, [line.split()[-1] for line in lines]
        finally:
            process.terminate()


def cpu_s(process: psutil.Process) -> float:
    """Processor time of all threads so far, in seconds."""
    return float(sum(process.cpu_times()[:2]))


def rss_mib(process: psutil.Process) -> float:
    """Resident memory."""
    return round(process.memory_info().rss / 2**20, 2)
