"""`nightjar bench <verb>`: measurements on this machine, each imported only when used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence

VERBS: dict[str, tuple[str, str]] = {
    "calibrate": (
        "worker.calibration.cli:main",
        "measure steps and draft catch-up, and teach them to the planner",
    ),
}


def main(argv: Sequence[str]) -> int:
    """Run one verb; returns its exit status."""
    if not argv or argv[0] in ("-h", "--help"):
        print(_usage())
        return 0 if argv else 2
    verb, rest = argv[0], argv[1:]
    if verb not in VERBS:
        print(f"nightjar bench: unknown verb {verb!r}\n\n{_usage()}", file=sys.stderr)
        return 2
    module, _, function = VERBS[verb][0].partition(":")
    run: Callable[[Sequence[str]], int] = getattr(importlib.import_module(module), function)
    return run(rest)


def _usage() -> str:
    rows = "\n".join(f"  {name:<13} {text}" for name, (_, text) in VERBS.items())
    end = "`nightjar bench VERB --help` explains a verb."
    return f"usage: nightjar bench VERB [flags]\n\n{rows}\n\n{end}"
