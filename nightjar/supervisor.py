"""Keeps a table of processes alive, each at the address it first got, and stops them in order."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import Any

from nightjar.errors import Unavailable

NIGHTJAR = (sys.executable, "-m", "nightjar")
FIRST_DELAY_S, LONGEST_DELAY_S, STEADY_S = 0.5, 10.0, 30.0
MAX_EARLY_DEATHS, MAX_LINE_BYTES = 3, 1 << 20
LISTENING = re.compile(r"(?:(\w+) )?listening on (\S+)$")
LIBC, PR_SET_PDEATHSIG = ctypes.CDLL(None), 1
Process = Popen[bytes]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Child:
    """A process to keep alive; it prints `[label] listening on ADDRESS` for each address."""

    name: str
    argv: tuple[str, ...]
    # Label -> (flag that sets the address, name under which others find it).
    listens: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    # Flag -> names of the addresses that it takes, joined by commas.
    peers: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    scratch: Path | None = None  # emptied before each start: what a killed process left
    keep_fds: tuple[int, ...] = ()


def say(text: str) -> None:
    """Tell the person at the terminal."""
    print(f"nightjar up: {text}", file=sys.stderr, flush=True)


class Supervisor:
    """Children of one table; once `ready` is set, whatever ends is started again."""

    def __init__(
        self, children: Sequence[Child], given: Mapping[str, str], stop_timeout_s: float
    ) -> None:
        """`given` are addresses by name; others are free-chosen."""
        self.ready = False
        self.addresses: dict[str, asyncio.Future[str]] = {}  # known once first bound
        self._children, self._given, self._stop_timeout_s = children, given, stop_timeout_s
        self._processes: dict[str, Process] = {}

    async def run(self, use: Callable[[], Coroutine[Any, Any, int]]) -> int:
        """Keep the children alive while `use` runs, then stop them; returns what it returned.

        A signal ends `use`: status 0 once `ready`, else 130. A second one kills the children.

        Raises:
            Unavailable: A child ended before the system was ready.
        """
        loop = asyncio.get_running_loop()
        names = [name for child in self._children for _, name in child.listens.values()]
        self.addresses.update({name: loop.create_future() for name in names})
        keepers = [loop.create_task(self._keep(child)) for child in self._children]
        user = loop.create_task(use())
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal, user)
        await asyncio.wait([user, *keepers], return_when=asyncio.FIRST_COMPLETED)
        failed = [task for task in keepers if task.done() and not task.cancelled()]
        for task in (user, *keepers):
            task.cancel()
        await asyncio.wait([user, *keepers])
        for child in reversed(self._children):
            await self._stop(child.name)
        for task in failed:
            task.result()
        return user.result() if not user.cancelled() else 0 if self.ready else 130

    async def command(self, *argv: str) -> int:
        """Run another nightjar command to its end; returns its exit status."""
        process = self._spawn([*NIGHTJAR, *argv], stdout=None)
        try:
            return await _ended(process)
        finally:
            process.kill()  # nothing happens once it has ended
            process.wait()

    def _on_signal(self, user: asyncio.Task[int]) -> None:
        if not user.done():
            say("stopping; once more kills")
            user.cancel()
            return
        for process in self._processes.values():
            _kill_group(process)

    async def _keep(self, child: Child) -> None:
        """Start `child`, and again whenever it ends; leaves by an error or by cancellation."""
        peers = [
            f"{flag}={','.join([await self.addresses[name] for name in names])}"
            for flag, names in child.peers.items()
        ]
        delay_s, deaths = FIRST_DELAY_S, 0
        while True:
            if child.scratch is not None:
                shutil.rmtree(child.scratch, ignore_errors=True)
                child.scratch.mkdir(mode=0o700)
            listen = [f"{flag}={self._address(name)}" for flag, name in child.listens.values()]
            began, argv = time.monotonic(), [*child.argv, *listen, *peers]
            process = self._spawn(argv, stdout=PIPE, keep_fds=child.keep_fds)
            self._processes[child.name] = process
            reader = asyncio.create_task(self._read(child, process))
            try:
                status = await _ended(process)
            finally:
                reader.cancel()
            _kill_group(process)  # what it started ends with it
            deaths += 1
            how = f"exit status {status}" if status >= 0 else signal.Signals(-status).name
            if not self.ready and (status >= 0 or deaths == MAX_EARLY_DEATHS):
                raise Unavailable(f"{child.name} ended ({how}) before the system was ready")
            delay_s = FIRST_DELAY_S if time.monotonic() - began > STEADY_S else delay_s
            say(f"{child.name} ended ({how}); starting it again in {delay_s:g} s")
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, LONGEST_DELAY_S)

    def _spawn(
        self, argv: Sequence[str], *, stdout: int | None, keep_fds: Sequence[int] = ()
    ) -> Process:
        parent = os.getpid()

        def die_with_parent() -> None:  # the signal follows the thread that forks: the main one
            LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:
                os._exit(1)

        # A group of its own: the terminal's Ctrl-C reaches the supervisor alone.
        return Popen(
            argv, stdin=DEVNULL, stdout=stdout, pass_fds=keep_fds, process_group=0,
            preexec_fn=die_with_parent,  # noqa: PLW1509 - two system calls, and no threads here
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip

    async def _read(self, child: Child, process: Process) -> None:
        """Learn addresses from the child's standard output; show what else it says."""
        lines = asyncio.StreamReader(MAX_LINE_BYTES)
        protocol = asyncio.StreamReaderProtocol(lines)
        pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: protocol, process.stdout
        )
        with contextlib.closing(pipe):
            async for line in lines:
                text = line.decode(errors="replace").rstrip()
                match = LISTENING.match(text)
                if match is None or (match[1] or "") not in child.listens:
                    print(f"{child.name} | {text}", file=sys.stderr, flush=True)
                elif not (address := self.addresses[child.listens[match[1] or ""][1]]).done():
                    address.set_result(match[2])

    def _address(self, name: str) -> str:
        """Where to listen: as before, as given, or anywhere."""
        known = self.addresses[name]
        return known.result() if known.done() else self._given.get(name, "127.0.0.1:0")

    async def _stop(self, name: str) -> None:
        process = self._processes.get(name)
        if process is None:
            return
        process.terminate()
        try:
            await asyncio.wait_for(_ended(process), self._stop_timeout_s)
        except TimeoutError:
            say(f"{name} did not stop within {self._stop_timeout_s:g} s; killing it")
        _kill_group(process)
        process.wait()


async def _ended(process: Process) -> int:
    """Exit status, whoever else still holds the process's pipes."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    if process.returncode is None:
        pidfd = os.pidfd_open(process.pid)
        loop.add_reader(pidfd, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
    return process.wait()


def _kill_group(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
