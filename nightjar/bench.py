"""`nightjar bench <verb>`: measurements, each imported only when used."""

from __future__ import annotations

from collections.abc import Sequence

from nightjar.cli import dispatch

VERBS: dict[str, tuple[str, str]] = {
    "serve": (
        "planner_service.load.cli:main",
        "load a running server, and measure throughput, latencies, goodput and acceptance",
    ),
    "calibrate": (
        "worker.calibration.cli:main",
        "measure steps and draft catch-up, and teach them to the planner",
    ),
}


def main(argv: Sequence[str]) -> int:
    """Run one verb; returns its exit status."""
    return dispatch("nightjar bench", "verb", VERBS, argv)
