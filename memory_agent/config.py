"""Configuration of the memory agent; flags and variables derive from the fields."""

from __future__ import annotations

import dataclasses
from typing import Any

from nightjar.config import option

_MAX_SHARE, _MAX_BLOCKS = 0.999, 1_000_000


def _threshold(default: float, help: str) -> Any:
    return option(
        default,
        help,
        check=lambda value: (
            0 <= value <= _MAX_SHARE or (1 <= value <= _MAX_BLOCKS and value.is_integer())
        ),
        limit=f"a share from 0 to {_MAX_SHARE} or a whole number of blocks from 1 to {_MAX_BLOCKS}",
    )


def _between(low: float, high: float, default: float, help: str) -> Any:
    return option(
        default,
        help,
        check=lambda value: low <= value <= high,  # false for NaN
        limit=f"{low:g} to {high:g}",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """Everything a memory agent can be told."""

    listen: str = option("127.0.0.1:0", "address to serve on; port 0 takes a free one")
    tau_low: float = _threshold(
        0.10,
        "free blocks below which pressure builds up: below 1 a share of the blocks that hold KV "
        "while the draft is at home, from 1 on a number of blocks",
    )
    tau_high: float = _threshold(
        0.30,
        "free blocks that must stay above when the draft takes its memory back, a share or a "
        "number as above; what is below tau-low counts as tau-low",
    )
    t_persist: int = _between(
        1, 1000, 3, "pressure reports in a row that must agree before a transition is asked for"
    )
    hold_s: float = _between(
        0, 3600, 5.0, "seconds that the draft stays away at least, so that it does not come and go"
    )
    backoff_s: float = _between(
        0.01, 60, 1.0, "seconds without a new request after a refusal; doubles up to 30 times that"
    )
    reload_share: float = _between(
        0.01, 1, 0.5, "part of the time in which a reload on a GPU copies; it pauses in between"
    )
    shm_dir: str = option(
        "/dev/shm",  # noqa: S108 - shared memory lives there; nothing secret, nothing predictable
        "the folder in which the worker keeps its pool; pools elsewhere are refused",
    )
