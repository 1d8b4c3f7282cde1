"""When the draft leaves and when it comes back: a pure state machine, no clock and no I/O.

          asks to expand               done
 RESIDENT ─────────────► OFFLOADING ─────────► OFFLOADED
   ▲  ▲                   │                     │   ▲
   │  └────── refused ────┘      asks to contract   │ refused
   │                                            ▼   │
   └─────────────────────────────────────────  RELOADING
              done, and no load failed since

The worker owns the pool, so with no request open its own word on the residency is taken as
it is: a new agent starts in the middle that way. Only one thing is not believed: RESIDENT
after a load of this agent failed its checksum.

Leaving costs nothing and is urgent; coming back costs a copy and what the draft must catch up.
So the way back asks for more: blocks to spare above those whose lack made the draft leave
(`tau_high`), and some time since it left (`hold_s`), which bounds how often it can go round.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Literal


class Residency(enum.Enum):
    """Where the draft is."""

    RESIDENT = "resident"
    OFFLOADING = "offloading"
    OFFLOADED = "offloaded"
    RELOADING = "reloading"


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """When pressure counts and for how long it must last."""

    tau_low: float  # below 1: share of the head's blocks; else blocks
    tau_high: float  # likewise
    t_persist: int  # reports in a row
    hold_s: float  # from an expansion to the next contraction, at least
    backoff_s: float  # after a refusal; doubles up to 30 times that

    def low(self, num_base_blocks: int) -> int:
        """Free blocks below which the draft may leave."""
        return _in_blocks(self.tau_low, num_base_blocks)

    def high(self, num_base_blocks: int) -> int:
        """Free blocks that must stay above when the tail's blocks are gone; not below `low`."""
        return max(_in_blocks(self.tau_high, num_base_blocks), self.low(num_base_blocks))

    def objection(self, num_base_blocks: int) -> str:
        """Why a pool with such a head could not be served; empty if it can."""
        low, high = self.low(num_base_blocks), self.high(num_base_blocks)
        if high < num_base_blocks:
            return ""
        flag, given = ("--tau-low", self.tau_low) if low == high else ("--tau-high", self.tau_high)
        leaves = f", and it would leave at once, since it leaves below {low}"
        return (
            f"{flag}={given:.10g}: more than {high} blocks would have to be free, beside the "
            f"draft's own, before it returns, but the pool has {num_base_blocks}: a draft that "
            f"left could never return{leaves if low > num_base_blocks else ''}"
        )


@dataclass(frozen=True, kw_only=True)
class Pressure:
    """How full the pool is."""

    num_free_blocks: int
    num_total_blocks: int
    num_waiting: int
    exploit_gamma: int
    residency: Residency


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the agent asks of the worker."""

    request_id: int
    kind: Literal["expand", "contract"]


class Agent:
    """Decides for one attached worker; at most one request is open.

    Times are seconds of any monotonic clock. `leaves_below` and `returns_above` are free blocks,
    the latter beside as many as the tail has: the bounds that decide, wherever the draft is.
    """

    def __init__(
        self,
        thresholds: Thresholds,
        *,
        num_base_blocks: int,
        num_extra_blocks: int,
        residency: Residency,
    ) -> None:
        self.state = residency
        self.leaves_below = thresholds.low(num_base_blocks)
        self.returns_above = thresholds.high(num_base_blocks)
        self.open_request: Request | None = None
        self.num_expansions = 0  # asked for
        self.num_contractions = 0  # completed
        self._thresholds = thresholds
        self._num_extra_blocks = num_extra_blocks
        self._num_requests = 0
        self._agreed: Literal["expand", "contract"] | None = None  # what the last reports call for
        self._num_agreeing = 0  # how many of them, in a row
        self._num_refusals = 0  # since the last one that went through
        self._not_before_s = -math.inf
        self._held_until_s = -math.inf
        self._load_failed = False

    def on_pressure(self, pressure: Pressure, now_s: float) -> Request | None:
        """Take a report; returns a request if it is time for one."""
        if self.open_request is None:
            self._follow(pressure.residency)
        kind = self._wanted(pressure, now_s)
        self._num_agreeing = self._num_agreeing + 1 if kind == self._agreed else 1
        self._agreed = kind
        if kind is None or self._num_agreeing < self._thresholds.t_persist:
            return None
        if now_s < self._not_before_s:
            return None
        self._num_requests += 1
        self.open_request = Request(request_id=self._num_requests, kind=kind)
        if kind == "expand":
            self.num_expansions += 1
            self.state = Residency.OFFLOADING
        else:
            self.state = Residency.RELOADING
        return self.open_request

    def on_refused(self, request_id: int, now_s: float) -> None:
        """The worker declined; back to where the request started, and wait before the next."""
        if self.open_request is None or self.open_request.request_id != request_id:
            return
        expanding = self.open_request.kind == "expand"
        self.state = Residency.RESIDENT if expanding else Residency.OFFLOADED
        self.open_request = None
        factor = min(2 ** min(self._num_refusals, 5), 30)
        self._num_refusals += 1
        self._not_before_s = now_s + self._thresholds.backoff_s * factor

    def on_done(self, request_id: int, residency: Residency, now_s: float) -> None:
        """The worker finished a transition, perhaps one that an earlier agent asked for."""
        if self.open_request is not None:
            if self.open_request.request_id != request_id:
                return
            self.open_request = None
        before = self.state
        self._follow(residency)
        self._num_refusals = 0
        if self.state is Residency.OFFLOADED:
            self._held_until_s = now_s + self._thresholds.hold_s
        if before is Residency.RELOADING and self.state is Residency.RESIDENT:
            self.num_contractions += 1

    def on_load_granted(self) -> None:
        """The worker granted the tail: whatever was thought before, the draft is coming back."""
        self.state = Residency.RELOADING

    def on_load_answered(self, ok: bool) -> None:
        """This agent's own load ended; `ok` if the image in the tail was verified."""
        self._load_failed = not ok

    def _follow(self, residency: Residency) -> None:
        if residency is Residency.RESIDENT and self._load_failed:
            return
        self.state = residency

    def _wanted(self, pressure: Pressure, now_s: float) -> Literal["expand", "contract"] | None:
        if self.open_request is not None:
            return None
        free = pressure.num_free_blocks
        if self.state is Residency.RESIDENT:
            is_short = pressure.exploit_gamma == 0 and free < self.leaves_below
            return "expand" if is_short else None
        if self.state is not Residency.OFFLOADED or now_s < self._held_until_s:
            return None
        left = free - self._num_extra_blocks
        is_calm = pressure.num_waiting == 0 and left > self.returns_above
        return "contract" if is_calm else None


def _in_blocks(threshold: float, num_base_blocks: int) -> int:
    return math.ceil(threshold * num_base_blocks) if threshold < 1 else int(threshold)
