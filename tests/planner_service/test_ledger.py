"""The ledger: what was learned is neither lost nor counted twice on its way into a store."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from planner_service.context import Context, Outcome
from planner_service.ledger import KEPT_S, MAX_FLIGHT_ARMS, Flight, Ledger
from planner_service.observation import observe
from planner_service.own_sums import OwnSums
from planner_service.sums import NOTHING, Stats, from_fields


def steps(number: int) -> Stats:
    """What some steps at batch size 1 and gamma 0 teach."""
    return observe(Context(1), 0, Outcome(number, number, number, number, number, number))


class FakeStore:
    """A store that adds each flush once, loses replies, and fails over to an older state."""

    def __init__(self) -> None:
        self.sums, self.revision = NOTHING, 0
        self.marks: dict[str, int] = {}
        self._older: list[tuple[Stats, int, dict[str, int]]] = []

    def flush(self, who: str, departing: tuple[Flight, int]) -> int:
        """Apply a flush unless it was, or one before it is missing."""
        flight, after = departing
        last = self.marks.get(who, 0)
        if flight.number <= last or last < after:
            return last
        self._older.append((self.sums, self.revision, dict(self.marks)))
        self.marks[who] = flight.number
        self.sums, self.revision = self.sums.plus(flight.sums), self.revision + 1
        return flight.number

    def fail_over(self, num_lost: int) -> None:
        """Forget the last flushes, whoever they were from."""
        for _ in range(min(num_lost, len(self._older))):
            self.sums, self.revision, self.marks = self._older.pop()


def send(ledger: Ledger, store: FakeStore, who: str) -> None:
    """Flush as long as something waits."""
    departing = ledger.depart("g")
    while departing is not None:
        ledger.settle("g", store.flush(who, departing), 0.0)
        departing = ledger.depart("g", waiting=True)


def take_over(ledger: Ledger, store: FakeStore, who: str) -> bool:
    """Read the store; returns whether it lost something for good."""
    ledger.settle("g", store.marks.get(who, 0), 0.0)
    return ledger.adopt("g", store.sums, store.revision)


@given(st.integers(0, 2**32), st.booleans())
def test_replicas_and_store_agree_whatever_is_lost(seed: int, fails_over: bool) -> None:
    """Each step counts once in the store, and in every replica that has read it."""
    rng, store, taught = random.Random(seed), FakeStore(), 0
    ledgers = {name: Ledger(stored=True) for name in ("a", "b")}
    for ledger in ledgers.values():
        ledger.track(["g"])
    for turn in range(60):
        name, ledger = rng.choice(list(ledgers.items()))
        if rng.random() < 0.5:
            number = rng.randint(1, 9)
            taught += number
            ledger.add("g", steps(number), turn / 60)
        elif (departing := ledger.depart("g")) is not None and rng.random() < 0.8:
            mark = store.flush(name, departing)
            if rng.random() < 0.7:
                ledger.settle("g", mark, turn / 60)
        if rng.random() < 0.3:
            take_over(ledger, store, name)
        if fails_over and rng.random() < 0.1:
            store.fail_over(rng.randint(1, 5))
    for _ in range(3):
        for name, ledger in ledgers.items():
            while (departing := ledger.depart("g")) is not None:
                ledger.settle("g", store.flush(name, departing), 0.0)
            take_over(ledger, store, name)
    assert store.sums.totals.steps == taught
    if not fails_over:  # else a replica may miss for a while what another sends again
        totals = {ledger.total("g").totals.steps for ledger in ledgers.values()}
        assert totals == {taught}
    assert all(ledger.oldest() is None for ledger in ledgers.values())


def test_a_store_that_lost_sums_does_not_make_a_planner_forget() -> None:
    """What the store held and holds no more still counts here, and what comes after adds up."""
    ledger = Ledger(stored=True)
    ledger.track(["g"])
    ledger.adopt("g", steps(100), 7)
    ledger.add("g", steps(5), 0.0)
    assert ledger.adopt("g", steps(40), 3)
    assert ledger.total("g").totals.steps == 105
    assert ledger.total("g").visits(1) == 105
    assert ledger.depart("g") is not None


def test_a_group_that_was_forgotten_is_not_taken_for_a_replay() -> None:
    """Learned again after it made room, its flushes still have numbers of their own."""
    ledger, store = Ledger(stored=True), FakeStore()
    for turn in range(3):
        ledger.add("g", steps(5), turn)
        send(ledger, store, "me")
        assert ledger.forget("g")
    assert store.sums.totals.steps == 15


def test_what_the_store_held_at_first_is_prior() -> None:
    """Steps known before this ledger read a group, whether or not it taught meanwhile."""
    ledger, store, other = Ledger(stored=True), FakeStore(), Ledger(stored=True)
    assert ledger.prior_steps("g") == 0
    other.add("g", steps(100), 0.0)
    send(other, store, "other")
    ledger.add("g", steps(5), 0.0)
    send(ledger, store, "me")
    take_over(ledger, store, "me")
    assert (ledger.prior_steps("g"), ledger.total("g").totals.steps) == (100, 105)
    other.add("g", steps(50), 0.0)
    send(other, store, "other")
    take_over(ledger, store, "me")
    assert (ledger.prior_steps("g"), ledger.total("g").totals.steps) == (100, 155)
    ledger.track(["new"])
    ledger.adopt("new", NOTHING, 0)
    ledger.adopt("new", steps(7), 1)
    assert ledger.prior_steps("new") == 0


def test_pending_sums_are_bounded_and_drops_counted() -> None:
    """Beyond the bound, sums still teach this planner; what is pending still arrives."""
    ledger = Ledger(stored=True, max_pending_arms=3)
    for bucket in range(1, 6):
        ledger.add("g", observe(Context(bucket), 0, Outcome(1, 1, 1, 1, 1, 1)), 0.0)
    ledger.add("g", steps(1), 0.0)
    assert ledger.num_dropped == 2
    assert len(ledger.total("g").buckets) == 5
    ledger.adopt("g", NOTHING, 0)
    assert len(ledger.total("g").buckets) == 5
    departing = ledger.depart("g")
    assert departing is not None
    assert sorted(departing[0].sums.buckets) == [1, 2, 3]
    ledger.add("g", observe(Context(9), 0, Outcome(1, 1, 1, 1, 1, 1)), 0.0)
    assert ledger.num_dropped == 2


def test_a_policys_own_sums_are_bounded_too() -> None:
    """On their way they count as arms do: by name, whatever they hold."""
    ledger = Ledger(stored=True, max_pending_arms=3)
    for i in range(5):
        ledger.add("g", Stats(own={f"p/{i}": OwnSums((1.0,))}, latest={"p/q": (float(i),)}), 0.0)
    assert ledger.num_dropped == 3
    assert len(ledger.total("g").own) == 5
    departing = ledger.depart("g")
    assert departing is not None
    sums = departing[0].sums
    assert (list(sums.own), sums.latest) == (["p/0", "p/1"], {"p/q": (1.0,)})


def test_what_the_store_confirmed_and_then_lost_is_sent_again() -> None:
    """After a failover it arrives under its own number, before what was learned since."""
    ledger, store = Ledger(stored=True), FakeStore()
    for _ in range(3):
        ledger.add("g", steps(5), 0.0)
        send(ledger, store, "me")
    take_over(ledger, store, "me")
    store.fail_over(2)
    ledger.add("g", steps(3), 0.0)
    assert ledger.total("g").totals.steps == 18
    send(ledger, store, "me")
    assert (store.sums.totals.steps, store.revision) == (18, 4)
    assert not take_over(ledger, store, "me")
    assert ledger.total("g").totals.steps == 18


def test_what_was_confirmed_long_ago_is_not_kept() -> None:
    """A store that lost that too has lost it for good: it still counts here."""
    ledger, store = Ledger(stored=True, max_pending_arms=2), FakeStore()
    for turn in range(4):
        ledger.add("g", steps(5), turn)
        departing = ledger.depart("g")
        assert departing is not None
        ledger.settle("g", store.flush("me", departing), KEPT_S * turn)
    take_over(ledger, store, "me")
    store.fail_over(4)
    assert take_over(ledger, store, "me")
    send(ledger, store, "me")
    assert store.sums.totals.steps == 10
    assert ledger.total("g").totals.steps == 20


def test_a_long_outage_leaves_in_parts() -> None:
    """Many arms fly in flights of a few hundred, which add up to what was learned."""
    ledger, store = Ledger(stored=True), FakeStore()
    for size in range(1, 1001):
        for gamma in (0, 1):
            context = Context(size, max_batch_size=1000)
            ledger.add("g", observe(context, gamma, Outcome(1, 1, 1, 1, 1, 1)), 0.0)
    departing, num_flights = ledger.depart("g"), 0
    while departing is not None:
        assert 0 < sum(map(len, departing[0].sums.buckets.values())) <= MAX_FLIGHT_ARMS + 1
        ledger.settle("g", store.flush("me", departing), 0.0)
        departing, num_flights = ledger.depart("g", waiting=True), num_flights + 1
    assert num_flights == 8
    assert store.sums.fields() == ledger.total("g").fields()
    assert (store.sums.totals.steps, ledger.oldest()) == (2000, None)


def test_refused_sums_stay_in_memory() -> None:
    """A flush that the store will never take is known here, and counted as dropped."""
    ledger = Ledger(stored=True)
    ledger.add("g", steps(3), 0.0)
    ledger.depart("g")
    ledger.drop_flight("g")
    ledger.adopt("g", from_fields([])[0], 0)
    assert ledger.total("g").totals.steps == 3
    assert (ledger.num_dropped, ledger.oldest()) == (1, None)


def test_without_a_store_nothing_waits() -> None:
    """In memory only, nothing is pending and nothing is dropped."""
    ledger = Ledger(stored=False)
    ledger.add("g", steps(3), 0.0)
    assert ledger.depart("g") is None
    assert (ledger.total("g").totals.steps, ledger.oldest()) == (3, None)
