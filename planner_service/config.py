"""Configuration of a planner; flags and variables derive from the fields."""

from __future__ import annotations

import dataclasses

from nightjar.config import at_least, option
from planner_service.context import MAX_GAMMA


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannerConfig:
    """Everything a planner can be told."""

    listen: str = option("127.0.0.1:0", "address to serve on; port 0 takes a free one")
    store: str = option(
        "",
        "URL of Redis or Valkey: redis://, rediss://, unix:// or redis+sentinel://HOST:PORT,"
        "HOST:PORT/NAME; empty keeps what is learned in memory only",
    )
    policy: str = option("nightjar", "policy to begin with, where the store has no version yet")
    policy_parameters: str = option(
        "",
        "its parameters, as NAME=VALUE,NAME=VALUE; a comma that no NAME= follows belongs to the "
        "value, as in preset=custom,ranges=1-64:3,65-128:1; `nightjar policy list` shows them",
    )
    gamma_max: int = option(
        5,
        "largest gamma of the policy to begin with, where it takes gamma_max",
        check=lambda n: 0 <= n <= MAX_GAMMA,
        limit=f"0 to {MAX_GAMMA}",
    )
    probe_share: float = option(
        0.01,
        "share of steps that run plain decoding, whatever the policy says, so that what "
        "speculating brings can be measured; 0 switches it off",
        check=lambda share: 0 <= share <= 0.5,
        limit="0 to 0.5",
    )
    plugin_timeout_ms: float = at_least(
        0.1, 5, "milliseconds that a decision waits for a policy of another package"
    )
    audit_log: str = option(
        "", "file that gets a line of JSON for every decision and report; empty writes none"
    )
    audit_max_mb: int = at_least(
        1, 256, "size in MB at which the audit log starts a new file; four full ones are kept"
    )
    drain_timeout_s: float = at_least(0, 5, "seconds that calls under way get at SIGTERM")
