"""How the tiers of `ema_tiers` are written: candidates for gamma from a batch size on."""

from __future__ import annotations

import re
from typing import NamedTuple

from planner_service.context import MAX_BATCH_SIZE, MAX_GAMMA

DEFAULT_TIERS = "1:1/3/5/7:-0.25,8:0/1/3,32:0/1,64:0"
MAX_TIERS = 16


class Tier(NamedTuple):
    """Batch sizes from `first` on, up to the next tier."""

    first: int
    gammas: tuple[int, ...]  # candidates, ascending
    hysteresis: float  # added to the thresholds on the way down


def parse(text: str) -> tuple[Tier, ...]:
    """Read tiers such as "1:1/3/5:-0.25,8:0/1": first batch size, candidates, hysteresis (or 0).

    Raises:
        ValueError: Says in words what is wrong.
    """
    tiers: list[Tier] = []
    for part in text.replace(" ", "").split(","):
        match = re.fullmatch(
            r"([0-9]{1,6}):([0-9]{1,3}(?:/[0-9]{1,3})*)(?::(-?[0-9](?:\.[0-9]{1,6})?))?", part
        )
        if match is None:
            raise ValueError(f"{part[:40]!r} is not of the form first:gamma/gamma/...")
        first, gammas = int(match[1]), tuple(map(int, match[2].split("/")))
        low = tiers[-1].first + 1 if tiers else 1
        if not tiers and first != 1:
            raise ValueError(f"the first tier starts at {first}, not at batch size 1")
        if not low <= first <= MAX_BATCH_SIZE:
            raise ValueError(f"tier {first} does not start in [{low}, {MAX_BATCH_SIZE}]")
        if list(gammas) != sorted(set(gammas)) or gammas[-1] > MAX_GAMMA:
            raise ValueError(f"candidates {match[2]} do not ascend within [0, {MAX_GAMMA}]")
        tiers.append(Tier(first, gammas, float(match[3] or 0)))
    if len(tiers) > MAX_TIERS:
        raise ValueError(f"at most {MAX_TIERS} tiers, got {len(tiers)}")
    return tuple(tiers)


def problem(text: str) -> str:
    """What is wrong with a text of tiers, in words; empty if nothing is."""
    try:
        parse(text)
    except ValueError as error:
        return str(error)
    return ""
