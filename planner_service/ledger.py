"""What this replica knows of each group of sums, and what of it the store does not have yet.

    total = snapshot (as last read from the store, or confirmed by it)
          + lost     (not in the store and never to be: it lost this, refused it, or was away too
                      long; kept here so that decisions do not forget)
          + flight   (sent under a number, not confirmed; sent again unchanged until it is)
          + pending  (learned since)

A group is a profile's sums, or the acceptance of all profiles of two models. Pure: the clock is
passed in.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from planner_service.sums import NOTHING, ArmSums, Stats, Totals

# Entries on their way over all groups; what is learned beyond it stays in memory only.
MAX_PENDING_ARMS = 65_536


@dataclass(slots=True)
class _Group:
    total: Stats = NOTHING
    snapshot: Stats = NOTHING
    lost: Stats = NOTHING
    flight: Stats | None = None
    pending: Stats = NOTHING
    pending_since: float | None = None
    flight_since: float | None = None
    number: int = 0  # of the flush in flight, or the last
    # Of the store's sums, at least: what it counts more, others wrote. -1 until they are read.
    revision: int = -1
    prior_steps: float = 0  # found in the store when it was first read


class Ledger:
    """Sums by group, with the state of their way into the store."""

    def __init__(self, *, stored: bool, max_pending_arms: int = MAX_PENDING_ARMS) -> None:
        self._stored = stored
        self._max_pending_arms = max_pending_arms
        self._num_pending_arms = 0
        # One count for all groups: a group that was forgotten must not start at 1 again.
        self._number = 0
        self._groups: dict[str, _Group] = {}
        self.num_dropped = 0

    def total(self, key: str) -> Stats:
        """All that is known of a group."""
        group = self._groups.get(key)
        return group.total if group else NOTHING

    def prior_steps(self, key: str) -> float:
        """Steps of a group that were in the store when this ledger first read it."""
        group = self._groups.get(key)
        return group.prior_steps if group else 0

    def add(self, key: str, learned: Stats, now: float) -> None:
        """Learn; what finds no room on the way to the store is counted in `num_dropped`."""
        group = self._groups.setdefault(key, _Group())
        group.total = group.total.plus(learned)
        if not self._stored:
            return
        before = group.pending
        new = sum(
            1
            for b, row in learned.buckets.items()
            for g in row
            if g not in before.buckets.get(b, ())
        )
        new += sum(1 for name in learned.own if name not in before.own)
        new += sum(1 for name in learned.latest if name not in before.latest)
        if self._num_pending_arms + new > self._max_pending_arms:
            group.lost = group.lost.plus(learned)
            self.num_dropped += 1
            return
        self._num_pending_arms += new
        group.pending = before.plus(learned)
        if group.pending_since is None:
            group.pending_since = now

    def track(self, keys: Iterable[str]) -> None:
        """Know of groups before anything is learned for them, so that they are read."""
        for key in keys:
            self._groups.setdefault(key, _Group())

    def forget(self, key: str) -> bool:
        """Forget a group, unless the store lacks something of it; returns whether it is gone."""
        group = self._groups.get(key)
        if group is not None and (group.flight is not None or group.pending is not NOTHING):
            return False
        self._groups.pop(key, None)
        return True

    def groups(self) -> list[str]:
        """Keys of all groups."""
        return list(self._groups)

    def revision(self, key: str) -> int:
        """Revision that the store's sums have, as far as this ledger knows; -1: it never read."""
        group = self._groups.get(key)
        return group.revision if group else -1

    def in_flight(self, key: str) -> bool:
        """Whether a flush was sent and not confirmed."""
        group = self._groups.get(key)
        return group is not None and group.flight is not None

    def depart(self, key: str) -> tuple[int, Stats] | None:
        """The flush to send now, with its number; None if the store lacks nothing."""
        group = self._groups.get(key)
        if group is None:
            return None
        if group.flight is None:
            if group.pending is NOTHING:
                return None
            self._number += 1
            group.number = self._number
            group.flight, group.flight_since = group.pending, group.pending_since
            group.pending, group.pending_since = NOTHING, None
            self._num_pending_arms -= _num_arms(group.flight)
        return group.number, group.flight

    def confirm(self, key: str) -> None:
        """The store has the flight, and counted a revision for it."""
        group = self._groups[key]
        assert group.flight is not None
        group.snapshot = group.snapshot.plus(group.flight)
        group.flight, group.flight_since = None, None
        if group.revision >= 0:
            group.revision += 1

    def drop_flight(self, key: str) -> None:
        """The store will never take the flight: it is known here only, and counted."""
        group = self._groups[key]
        assert group.flight is not None
        group.lost = group.lost.plus(group.flight)
        group.flight, group.flight_since = None, None
        self.num_dropped += 1

    def adopt(self, key: str, stored: Stats, revision: int) -> bool:
        """Take over what the store holds; returns whether it holds less than it did.

        Only between flights: with one under way it would be unknown whether it is in there. A
        group that was forgotten in the meantime stays forgotten.
        """
        group = self._groups.get(key)
        if group is None:
            return False
        assert group.flight is None
        shrunk = revision < group.revision
        if shrunk:
            group.lost = group.lost.plus(_less(group.snapshot, stored))
        if group.revision < 0:
            group.prior_steps = max(0.0, stored.totals.steps - group.snapshot.totals.steps)
        group.snapshot, group.revision = stored, revision
        group.total = stored.plus(group.lost).plus(group.pending)
        return shrunk

    def oldest(self) -> float | None:
        """When the oldest sum that the store lacks was learned; None if it has all."""
        ages = (t for g in self._groups.values() for t in (g.flight_since, g.pending_since))
        return min((t for t in ages if t is not None), default=None)


def _num_arms(stats: Stats) -> int:
    arms = sum(len(arms) for arms in stats.buckets.values())
    return arms + len(stats.own) + len(stats.latest)


def _less(more: Stats, less: Stats) -> Stats:
    """What `more` has beyond `less`, never negative."""

    def beyond(a: Iterable[float], b: Iterable[float]) -> list[float]:
        return [max(0.0, x - y) for x, y in zip(a, b, strict=False)]

    buckets = {}
    for bucket, arms in more.buckets.items():
        there = less.buckets.get(bucket, {})
        left = {g: ArmSums(*beyond(sums, there.get(g, ArmSums()))) for g, sums in arms.items()}
        buckets[bucket] = {g: sums for g, sums in left.items() if sums.steps > 0}
    zeros = (0.0,) * len(more.reached)
    return Stats(
        buckets,
        Totals(*beyond(more.totals, less.totals)),
        tuple(beyond(more.reached, less.reached + zeros)),
        tuple(beyond(more.accepted, less.accepted + zeros)),
        {n: s.less(less.own[n]) if n in less.own else s for n, s in more.own.items()},
        {n: values for n, values in more.latest.items() if n not in less.latest},
    )
