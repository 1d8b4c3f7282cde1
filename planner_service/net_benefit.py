"""What speculating brought against plain decoding: measured, never modelled.

A ratio of sums over the batch sizes at which gamma 0 was measured too:

    tokens that came / tokens that plain decoding brings in the same time - 1

The time includes catch-up and draft prefill, which are charged to who speculates. Where gamma 0
never ran there is no figure.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Mapping
from typing import NamedTuple

from planner_service.context import Outcome
from planner_service.sums import Stats
from planner_service.versions import Floor

MAX_KEYS = 1024  # batch sizes, over all profiles, that one meter keeps apart
NUM_PARTS = 8  # of a window: it moves on by one of them at a time
MIN_BASELINE_STEPS = 16  # less says too little to withdraw a version for it
MAX_WINDOWS = 32  # that a window grows to where steps are too few for that


class Ran(NamedTuple):
    """Timed steps of one batch size."""

    steps: float = 0
    us: float = 0
    tokens: float = 0


class Benefit(NamedTuple):
    """A measured net benefit, and how much it rests on."""

    net: float  # 0.1: 10 % more tokens per second than plain decoding
    num_steps: int  # at batch sizes with a baseline
    num_baseline_steps: int


def net_benefit(
    ran: Mapping[Hashable, Ran], plain: Mapping[Hashable, Ran], overhead: float
) -> Benefit | None:
    """Net benefit of what ran; None where no batch size has a baseline.

    Args:
        ran: What ran, by batch size.
        plain: The same at gamma 0.
        overhead: Catch-up and draft prefill per microsecond of `ran`.
    """
    tokens = expected = steps = num_baseline = 0.0
    for key, what in ran.items():
        baseline = plain.get(key)
        if baseline is None or baseline.tokens <= 0 or baseline.us <= 0:
            continue
        tokens += what.tokens
        expected += what.us * (1 + overhead) * baseline.tokens / baseline.us
        steps += what.steps
        num_baseline += baseline.steps
    if expected <= 0:
        return None
    return Benefit(tokens / expected - 1, round(steps), round(num_baseline))


def of_stats(stats: Stats) -> Benefit | None:
    """Net benefit of all steps that a profile learned from."""
    ran: dict[Hashable, Ran] = {}
    plain: dict[Hashable, Ran] = {}
    timed_us = 0.0
    for batch_size, arms in stats.buckets.items():
        ran[batch_size] = Ran(
            sum(arm.steps for arm in arms.values()),
            sum(arm.step_us for arm in arms.values()),
            sum(arm.emitted for arm in arms.values()),
        )
        timed_us += ran[batch_size].us
        if (arm := arms.get(0)) is not None:
            plain[batch_size] = Ran(arm.steps, arm.step_us, arm.emitted)
    totals = stats.totals
    overhead_us = totals.catch_up_us + totals.draft_prefill_us
    return net_benefit(
        ran, plain, _overhead(overhead_us, totals.steps, totals.timed_steps, timed_us)
    )


def _overhead(overhead_us: float, steps: float, timed_steps: float, timed_us: float) -> float:
    """Overhead per timed microsecond; what all steps paid, in the timed steps' share."""
    return overhead_us * timed_steps / steps / timed_us if steps > 0 and timed_us > 0 else 0.0


class _Part:
    """Sums over a while."""

    def __init__(self, ends_at: float) -> None:
        self.ends_at = ends_at
        self.ran: dict[Hashable, Ran] = {}
        self.plain: dict[Hashable, Ran] = {}
        self.steps = self.timed_steps = self.overhead_us = 0.0


class Meter:
    """Sums of one version's steps and of gamma 0 beside them; of all time, or of a window.

    Where a window holds too few steps at gamma 0 it grows, up to `max_windows` times.
    """

    def __init__(self, window_s: float = math.inf, max_windows: int = 1) -> None:
        self.window_s = window_s
        self._max_windows = max_windows
        self._parts: deque[_Part] = deque()

    def add(self, key: Hashable, gamma: int, outcome: Outcome, now: float, *, is_own: bool) -> None:
        """Add steps; those that are not the version's own count as baseline only."""
        if not self._parts or now >= self._parts[-1].ends_at:
            self._parts.append(_Part(now + self.window_s / NUM_PARTS))
            while len(self._parts) > NUM_PARTS * self._max_windows:
                self._parts.popleft()
        part = self._parts[-1]
        timed = Ran(outcome.num_timed_steps, outcome.step_us, outcome.num_timed_emitted)
        if is_own:
            part.steps += outcome.num_steps
            part.timed_steps += timed.steps
            part.overhead_us += outcome.catch_up_us + outcome.draft_prefill_us
            _add(part.ran, key, timed)
        if gamma == 0:
            _add(part.plain, key, timed)

    def measured(self, now: float) -> Benefit | None:
        """The net benefit so far; None without a baseline."""
        part = _Part(0)
        for one in reversed(self._parts):
            windows = (now - one.ends_at) / self.window_s + 1 / NUM_PARTS
            if windows >= self._max_windows:
                break
            if windows >= 1 and sum(r.steps for r in part.plain.values()) >= MIN_BASELINE_STEPS:
                break
            for mine, its in ((part.ran, one.ran), (part.plain, one.plain)):
                for key, ran in its.items():
                    _add(mine, key, ran)
            part.steps += one.steps
            part.timed_steps += one.timed_steps
            part.overhead_us += one.overhead_us
        timed_us = sum(ran.us for ran in part.ran.values())
        overhead = _overhead(part.overhead_us, part.steps, part.timed_steps, timed_us)
        return net_benefit(part.ran, part.plain, overhead)


def _add(sums: dict[Hashable, Ran], key: Hashable, ran: Ran) -> None:
    known = sums.get(key)
    if known is not None:
        sums[key] = Ran(known.steps + ran.steps, known.us + ran.us, known.tokens + ran.tokens)
    elif ran.steps > 0 and len(sums) < MAX_KEYS:
        sums[key] = ran


class FloorWatch:
    """Says when a version stayed below its floor for as long as it may.

    What is measured is a window as long as that time, so that one bad moment does not count for
    long, or longer until it holds enough steps of plain decoding; while nothing can be measured,
    the time starts anew.
    """

    def __init__(self, floor: Floor) -> None:
        self.floor = floor
        self.meter = Meter(floor.for_s, MAX_WINDOWS)
        self._below_since: float | None = None
        self._next_look = -math.inf

    def problem(self, now: float) -> str:
        """Why the version is to be withdrawn now, in words; empty while it is not."""
        if now < self._next_look:
            return ""
        if now > self._next_look + self.floor.for_s:  # nothing ran meanwhile
            self._below_since = None
        self._next_look = now + self.floor.for_s / NUM_PARTS
        measured = self.meter.measured(now)
        if (
            measured is None
            or measured.num_baseline_steps < MIN_BASELINE_STEPS
            or measured.net >= self.floor.min_net_benefit
        ):
            self._below_since = None
            return ""
        if self._below_since is None:
            self._below_since = now
        if now - self._below_since < self.floor.for_s:
            return ""
        return (
            f"net benefit {measured.net:+.1%} stayed below its floor of "
            f"{self.floor.min_net_benefit:+.1%} for {now - self._below_since:.0f} s "
            f"({measured.num_steps} steps against {measured.num_baseline_steps} of plain decoding)"
        )
