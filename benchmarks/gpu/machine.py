"""What figures were measured on, and progress on the terminal."""

from __future__ import annotations

import platform
import subprocess
import sys
from typing import Any


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for name, command in (
        ("gpu", ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv"]),
        ("commit", ["git", "rev-parse", "--short", "HEAD"]),
    ):
        try:
            ran = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError:
            continue
        if ran.returncode == 0:
            found[name] = ran.stdout.strip().splitlines()[-1]
    return found


def say(text: str) -> None:
    """Progress."""
    print(text, file=sys.stderr, flush=True)
