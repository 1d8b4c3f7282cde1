"""Helpers for tests that run real commands: output by lines, conditions with a deadline."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import psutil


def eventually(holds: Callable[[], bool], what: str, timeout_s: float = 30) -> None:
    """Wait until `holds()`.

    Raises:
        AssertionError: It did not within `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Command:
    """A command of ours with its output gathered; leaving the block kills what is left of it."""

    def __init__(self, *argv: str, environ: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *argv],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **(environ or {})},
        )
        self.stdout, self.stderr = "", ""
        self._readers = [
            threading.Thread(target=self._read, args=(name,), daemon=True)
            for name in ("stdout", "stderr")
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, name: str) -> None:
        for line in getattr(self.process, name):
            setattr(self, name, getattr(self, name) + line.decode(errors="replace"))

    def __enter__(self) -> Command:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for child in self.children():
            os.kill(child, signal.SIGKILL)
        self.process.kill()
        self.wait()
        if error is not None:
            print(f"--- {self.process.args}\n{self.stdout}\n--- stderr\n{self.stderr[-20_000:]}")

    def children(self) -> list[int]:
        """Every living descendant."""
        try:
            return [
                child.pid for child in psutil.Process(self.process.pid).children(recursive=True)
            ]
        except psutil.NoSuchProcess:
            return []

    def signal(self, number: int) -> None:
        """Send a signal to the command itself."""
        self.process.send_signal(number)

    def wait(self, timeout_s: float = 60) -> int:
        """Exit status, once the command has ended and its output is complete."""
        status = self.process.wait(timeout_s)
        for reader in self._readers:
            reader.join(timeout_s)
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()
        return status

    def shows(self, text: str, timeout_s: float = 30, times: int = 1) -> None:
        """Wait until the output holds `text`, `times` times."""

        def enough() -> bool:
            count = self.stdout.count(text) + self.stderr.count(text)
            if count < times and self.process.poll() is not None:
                raise AssertionError(
                    f"ended with {self.process.returncode} before it said {text!r}"
                )
            return count >= times

        eventually(enough, f"{text!r} in the output", timeout_s)


def shared_memory_files(folder: Path) -> list[str]:
    """Files anywhere below a shared-memory folder."""
    return sorted(str(path) for path in folder.rglob("*") if path.is_file())
