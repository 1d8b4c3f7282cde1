"""Named places at which a test may kill or stop a process; off unless NIGHTJAR_FAILPOINT is set.

`NIGHTJAR_FAILPOINT=agent.mid_copy` kills as by SIGKILL; with `:stop` behind the name the process
stops as by SIGSTOP, each time that it comes there. Names that begin with `worker.` are reached in
the worker's engine process.
"""

from __future__ import annotations

import os
import signal

_NAME, _, _ACTION = os.environ.get("NIGHTJAR_FAILPOINT", "").partition(":")


def reached(name: str) -> None:
    """Die or stop here if NIGHTJAR_FAILPOINT names this place."""
    if name == _NAME:
        os.kill(os.getpid(), signal.SIGSTOP if _ACTION == "stop" else signal.SIGKILL)
