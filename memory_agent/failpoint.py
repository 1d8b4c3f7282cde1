"""Named places at which a test may kill or stop a process; off unless NIGHTJAR_FAILPOINT is set.

`NIGHTJAR_FAILPOINT=agent.mid_copy` kills as by SIGKILL; with `:stop` behind a name the process
stops as by SIGSTOP, once. Several are separated by commas. Names that begin with `worker.` are
reached in the worker's engine process.
"""

from __future__ import annotations

import os
import signal
import time

_SIGNALS = {"": signal.SIGKILL, "stop": signal.SIGSTOP}


def _parsed(text: str) -> dict[str, signal.Signals]:
    places = [place.partition(":") for place in text.split(",") if place]
    return {name: _SIGNALS[action] for name, _, action in places}


_SET = _parsed(os.environ.get("NIGHTJAR_FAILPOINT", ""))


def reached(name: str) -> None:
    """Say so on stderr, and die or stop here, if NIGHTJAR_FAILPOINT names this place."""
    if name in _SET:
        os.write(2, f"failpoint {name}\n".encode())
        os.kill(os.getpid(), _SET.pop(name))
        time.sleep(0.1)  # a thread that did not take the signal itself may stop a little later
