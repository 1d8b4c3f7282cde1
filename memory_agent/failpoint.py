"""Named places at which a test may kill the agent; none is set unless NIGHTJAR_FAILPOINT is."""

from __future__ import annotations

import os
import signal

_NAME = os.environ.get("NIGHTJAR_FAILPOINT", "")


def reached(name: str) -> None:
    """Die here, as by SIGKILL, if NIGHTJAR_FAILPOINT names this place."""
    if name == _NAME:
        os.kill(os.getpid(), signal.SIGKILL)
