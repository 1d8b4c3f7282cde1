"""Configuration of the memory agent; flags and variables derive from the fields."""

from __future__ import annotations

import dataclasses

from nightjar.config import at_least, option


def _is_threshold(value: float) -> bool:
    return 0 <= value < 1 or (value >= 1 and value == int(value))


@dataclasses.dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """Everything a memory agent can be told."""

    listen: str = option("127.0.0.1:0", "address to serve on; port 0 takes a free one")
    tau_low: float = option(
        0.10,
        "free blocks below which pressure builds up: below 1 a share of the blocks that can hold "
        "KV, from 1 on a number of blocks",
        check=_is_threshold,
        limit="a share in [0, 1) or a whole number of blocks",
    )
    tau_high: float = option(
        0.30,
        "free blocks that must stay above when the draft takes its memory back, a share or a "
        "number as above; what is below tau-low counts as tau-low",
        check=_is_threshold,
        limit="a share in [0, 1) or a whole number of blocks",
    )
    t_persist: int = at_least(
        1, 3, "pressure reports in a row that must agree before a transition is asked for"
    )
    hold_s: float = at_least(
        0.0, 5.0, "seconds that the draft stays away at least, so that it does not come and go"
    )
    backoff_s: float = at_least(
        0.01, 1.0, "seconds without a new request after a refusal; doubles up to 30 times that"
    )
    reload_share: float = option(
        0.5,
        "part of the time in which a reload on a GPU copies; it pauses in between",
        check=lambda share: 0 < share <= 1,
        limit="above 0, at most 1",
    )
    shm_dir: str = option(
        "/dev/shm",  # noqa: S108 - shared memory lives there; nothing secret, nothing predictable
        "the folder in which the worker keeps its pool; pools elsewhere are refused",
    )
