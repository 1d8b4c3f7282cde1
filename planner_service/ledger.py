"""What this replica knows of each group of sums, and what of it the store does not have yet.

    total = snapshot (as last read from the store, or confirmed by it)
          + lost     (not in the store and never to be: it lost this, refused it, or was away too
                      long; kept here so that decisions do not forget)
          + flights  (sent under a number, not confirmed; sent again unchanged until they are)
          + pending  (learned since)

With the sums the store keeps a mark, the number of our last flight that it has. After a failover
or a crash the mark may be lower than it was: confirmed flights are kept for a while, and those
that the store no longer has are sent again, under their numbers and in their order.

A group is a profile's sums, or the acceptance of all profiles of two models. Pure: the clock is
passed in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from planner_service.sums import NOTHING, ArmSums, Bucket, Stats, Totals

# Entries on their way over all groups; what is learned beyond it stays in memory only. As many
# are kept for the case that the store loses them.
MAX_PENDING_ARMS = 65_536
MAX_FLIGHT_ARMS = 256  # about: decisions wait while a flight is written out
KEPT_S = 30.0


class Flight(NamedTuple):
    """Sums on their way into the store."""

    number: int
    sums: Stats
    since: float  # when the oldest of it was learned
    arrived: float = 0.0


@dataclass(slots=True)
class _Group:
    total: Stats = NOTHING
    snapshot: Stats = NOTHING
    lost: Stats = NOTHING
    flights: deque[Flight] = field(default_factory=deque)  # the first is under way
    kept: deque[Flight] = field(default_factory=deque)  # confirmed lately
    pending: Stats = NOTHING
    pending_since: float = 0.0
    mark: int = 0  # number of the last flight that the store has
    # Of the store's sums, at least: what it counts more, others wrote. -1 until they are read.
    revision: int = -1
    prior_steps: float = 0  # found in the store when it was first read


class Ledger:
    """Sums by group, with the state of their way into the store."""

    def __init__(self, *, stored: bool, max_pending_arms: int = MAX_PENDING_ARMS) -> None:
        self._stored = stored
        self._max_arms = max_pending_arms
        self._num_pending_arms = self._num_kept_arms = 0
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
        num_new = 0
        for bucket, row in learned.buckets.items():
            there = before.buckets.get(bucket, ())
            for gamma in row:
                num_new += gamma not in there
        for name in learned.own:
            num_new += name not in before.own
        for name in learned.latest:
            num_new += name not in before.latest
        if self._num_pending_arms + num_new > self._max_arms:
            group.lost = group.lost.plus(learned)
            self.num_dropped += 1
            return
        self._num_pending_arms += num_new
        if before is NOTHING:
            group.pending, group.pending_since = learned, now
        else:
            group.pending = before.plus(learned)

    def track(self, keys: Iterable[str]) -> None:
        """Know of groups before anything is learned for them, so that they are read."""
        for key in keys:
            self._groups.setdefault(key, _Group())

    def forget(self, key: str) -> bool:
        """Forget a group, unless the store lacks something of it; returns whether it is gone."""
        group = self._groups.get(key)
        if group is not None:
            if group.flights or group.pending is not NOTHING:
                return False
            del self._groups[key]
            self._num_kept_arms -= sum(_num_arms(flight.sums) for flight in group.kept)
        return True

    def groups(self) -> list[str]:
        """Keys of all groups."""
        return list(self._groups)

    def revision(self, key: str) -> int:
        """Revision that the store's sums have, as far as this ledger knows; -1: it never read."""
        group = self._groups.get(key)
        return group.revision if group else -1

    def depart(self, key: str, *, waiting: bool = False) -> tuple[Flight, int] | None:
        """The flight to send now, and the mark that the store must have reached before.

        None if the store lacks nothing; with `waiting`, nothing that was to be sent before.
        """
        group = self._groups.get(key)
        if group is None:
            return None
        if not group.flights and group.pending is not NOTHING and not waiting:
            for part in _parts(group.pending):
                self._number += 1
                group.flights.append(Flight(self._number, part, group.pending_since))
            self._num_pending_arms -= _num_arms(group.pending)
            group.pending = NOTHING
        return (group.flights[0], group.mark) if group.flights else None

    def settle(self, key: str, mark: int, now: float) -> int:
        """The store's mark is this; returns how many confirmed flights it lost.

        They fly again. Those that were confirmed too long ago are not noticed here, but by
        `adopt`.
        """
        group, num_lost = self._groups[key], 0
        while group.flights and group.flights[0].number <= mark:
            flight = group.flights.popleft()
            group.snapshot = group.snapshot.plus(flight.sums)
            group.revision += group.revision >= 0
            group.kept.append(flight._replace(arrived=now))
            self._num_kept_arms += _num_arms(flight.sums)
        while group.kept and group.kept[-1].number > mark:
            flight = group.kept.pop()
            group.flights.appendleft(flight)
            group.snapshot = _less(group.snapshot, flight.sums)
            group.revision -= group.revision > 0
            self._num_kept_arms -= _num_arms(flight.sums)
            num_lost += 1
        group.mark = mark
        while group.kept and (
            group.kept[0].arrived < now - KEPT_S or self._num_kept_arms > self._max_arms
        ):
            self._num_kept_arms -= _num_arms(group.kept.popleft().sums)
        return num_lost

    def drop_flight(self, key: str) -> None:
        """The store will never take the flight: it is known here only, and counted."""
        group = self._groups[key]
        flight = group.flights.popleft()
        group.lost, group.mark = group.lost.plus(flight.sums), flight.number
        self.num_dropped += 1

    def adopt(self, key: str, stored: Stats, revision: int) -> bool:
        """Take over what the store held with the mark just settled; returns whether it lost some.

        A group that was forgotten in the meantime stays forgotten.
        """
        group = self._groups.get(key)
        if group is None:
            return False
        shrunk = revision < group.revision
        if shrunk:
            group.lost = group.lost.plus(_less(group.snapshot, stored))
        if group.revision < 0:
            group.prior_steps = max(0.0, stored.totals.steps - group.snapshot.totals.steps)
        group.snapshot, group.revision = stored, revision
        total = stored.plus(group.lost)
        for flight in group.flights:
            total = total.plus(flight.sums)
        group.total = total.plus(group.pending)
        return shrunk

    def oldest(self) -> float | None:
        """When the oldest sum that the store lacks was learned; None if it has all."""
        groups = self._groups.values()
        since = [group.flights[0].since for group in groups if group.flights]
        since += [group.pending_since for group in groups if group.pending is not NOTHING]
        return min(since, default=None)


def _parts(stats: Stats) -> Iterator[Stats]:
    """Sums that together are these, none with many more arms than a flight takes."""
    buckets: dict[int, Bucket] = {}
    num_arms = 0
    for bucket, arms in stats.buckets.items():
        if num_arms >= MAX_FLIGHT_ARMS:
            yield Stats(buckets)
            buckets, num_arms = {}, 0
        buckets[bucket] = arms
        num_arms += len(arms)
    yield stats._replace(buckets=buckets)


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
