"""One process that plug-ins run in, from its start to its end, and what is made in it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from planner_service.plugins.wire import Closed, Link, Nonsense
from planner_service.policies.policy import ParameterValue


class Child:
    """The process and the connection to it; one thread at a time may use them."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "planner_service.plugins.host", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2,  # standard output is the planner's own
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # so that what a plug-in started ends with it
            )
        self.link = Link(ours)
        self.pid = self._process.pid
        self._started_at = time.monotonic()

    def told(self, message: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """The answer, or the problem; a process that gives none is killed.

        Returns:
            "answer" or "problem".
        """
        try:
            self.link.send(message, timeout_s)
            return dict(self.link.receive(timeout_s))
        except TimeoutError:
            problem = f"gave no answer within {timeout_s:g} s"
        except (Closed, Nonsense) as error:
            problem = f"ended the process of the plug-ins ({error})"
        self.kill()
        return {"problem": problem}

    def ended(self) -> bool:
        """Whether `kill` was called."""
        return self.link.closed

    def kill(self) -> None:
        """End it at once, whatever it does; does not wait."""
        self.link.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def was_killed(self, timeout_s: float) -> bool:
        """Whether a signal that it could not send by accident ended it, or is about to."""
        try:
            return self._process.wait(timeout_s) in (-signal.SIGKILL, -signal.SIGTERM)
        except subprocess.TimeoutExpired:
            return True

    def reap(self) -> float:
        """Wait until it has ended; returns how many seconds it lasted."""
        self._process.wait()
        return time.monotonic() - self._started_at


@dataclass(eq=False, slots=True)
class Made:
    """One policy in the process."""

    number: int
    plugin: str
    values: Mapping[str, ParameterValue]
    failure: str = ""  # why it will not be asked again, in words
    child: Child | None = None  # that it was made in
    learns: bool = True  # whether it has an update of its own
    lateness: float = 0.0  # late answers, less what was forgiven
    num_killed: int = 0  # calls during which somebody killed the process
    settled: threading.Event = field(default_factory=threading.Event)  # made, or failed
