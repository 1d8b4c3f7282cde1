"""`nightjar memory-agent` that notes when it passes each failpoint: nothing else tells its phases.

    python -m gpu.memory_marks memory-agent FLAGS

Lines of seconds and a name are appended to the file that MARKS names. Seconds are those of
`time.perf_counter`, which all processes of a Linux machine share.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from memory_agent import failpoint
from nightjar.cli import main

MARKS = "GPU_MEMORY_MARKS"
Marks = list[tuple[float, str]]


def read(file: Path) -> Marks:
    """What was noted so far, in order."""
    pairs = (line.split() for line in file.read_text().splitlines())
    return sorted((float(at), name) for at, name in pairs)


def copying(marks: Marks) -> tuple[float, float]:
    """Seconds at which the last load's copies to the device began and had ended.

    Raises:
        LookupError: There was no load, or it did not come so far.
    """
    names = [name for _, name in marks]
    if "agent.before_verify" not in names:
        raise LookupError("no load has ended its copies")
    end = len(names) - 1 - names[::-1].index("agent.before_verify")
    begin = max(i for i, name in enumerate(names[:end]) if name == "agent.before_work")
    return marks[begin][0], marks[end][0]


def _note() -> None:
    file = os.open(os.environ[MARKS], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    reached = failpoint.reached

    def noted(name: str) -> None:
        os.write(file, f"{time.perf_counter()!r} {name}\n".encode())
        reached(name)

    setattr(failpoint, "reached", noted)  # noqa: B010


if __name__ == "__main__":
    _note()
    sys.exit(main())
