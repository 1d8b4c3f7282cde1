"""Bounds that a figure must keep: which were met, and which of those that were not fail a run."""

from __future__ import annotations

import argparse
from typing import Any

Found = dict[str, Any]


def check(
    found: Found,
    options: argparse.Namespace,
    what: str,
    value: float | None,
    *,
    least: float | None = None,
    most: float | None = None,
    of_time: bool = False,
) -> None:
    """Note whether a figure keeps its bound; a miss goes into the section's `failed`.

    Args:
        found: The section's figures; gets `floors` and `failed`.
        options: Of the run; under `tiny` figures of time measure nothing, and fail nothing.
        what: The figure, in words.
        value: The figure; None, for it could not be had, is a miss.
        least: What it must reach, or None.
        most: What it must not exceed, or None.
        of_time: Whether it says how fast something is.
    """
    met = value is not None
    if value is not None:
        met = (least is None or value >= least) and (most is None or value <= most)
    bound = f"at least {least:g}" if most is None else f"at most {most:g}"
    counts = not (of_time and options.tiny)
    floor = {"what": what, "found": value, "bound": bound, "met": met, "counts": counts}
    found.setdefault("floors", []).append(floor)
    failed: list[str] = found.setdefault("failed", [])
    if counts and not met:
        failed.append(f"{what}: {_in_words(value)}, {bound}")


def lines(found: Found) -> list[str]:
    """A line for each bound, with the figure, then what has failed."""
    shown = []
    for floor in found.get("floors", []):
        state = "met   " if floor["met"] else "MISSED"
        note = "" if floor["counts"] else "; measures nothing when tiny"
        shown.append(
            f"  {state} {floor['what']}: {_in_words(floor['found'])} ({floor['bound']}{note})"
        )
    return shown + [f"  FAILED: {reason}" for reason in found.get("failed", [])]


def _in_words(value: float | None) -> str:
    return "nothing" if value is None else f"{value:g}"
