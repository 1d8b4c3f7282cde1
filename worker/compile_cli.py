"""`nightjar compile`: build and cache the compiled forward of a model and its draft."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from nightjar.config import parse
from worker.config import WorkerConfig


def main(argv: Sequence[str]) -> int:
    """Compile what a worker with the same flags would run; returns the exit status."""
    config = parse(
        WorkerConfig,
        argv,
        prog="nightjar compile",
        description="Build and cache the compiled forward of a model; takes about a minute. "
        "A worker with the same model, dtype and threads then starts with it.",
    )
    from worker.engine.limits import check_config
    from worker.model.build import compile_build
    from worker.model.folders import check_folders, folders_of

    check_config(config)
    check_folders(config)
    began = time.monotonic()

    def progress(stage: str, detail: str) -> None:
        print(f"[{time.monotonic() - began:6.1f} s] {stage}: {detail}", file=sys.stderr, flush=True)

    target, draft = folders_of(config, progress)
    arithmetic = compile_build(config, target, draft, progress)
    print(f"compiled build ready in {time.monotonic() - began:.0f} s, arithmetic {arithmetic}")
    return 0
