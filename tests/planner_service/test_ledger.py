"""The ledger: what was learned is neither lost nor counted twice on its way into a store."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from planner_service.context import Context, Outcome
from planner_service.ledger import Ledger
from planner_service.own_sums import OwnSums
from planner_service.sums import NOTHING, Stats, from_fields, observe


def steps(number: int) -> Stats:
    """What some steps at batch size 1 and gamma 0 teach."""
    return observe(Context(1), 0, Outcome(number, number, number, number, number, number))


class FakeStore:
    """A store that adds each flush once, and loses replies."""

    def __init__(self) -> None:
        self.sums, self.revision = NOTHING, 0
        self.last: dict[str, int] = {}

    def flush(self, who: str, number: int, learned: Stats) -> None:
        """Apply a flush unless it was."""
        if number > self.last.get(who, 0):
            self.last[who] = number
            self.sums, self.revision = self.sums.plus(learned), self.revision + 1


@given(st.integers(0, 2**32))
def test_replicas_and_store_agree_whatever_replies_are_lost(seed: int) -> None:
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
            ledger.add("g", steps(number), turn)
            continue
        if (departing := ledger.depart("g")) is not None and rng.random() < 0.8:
            store.flush(name, *departing)
            if rng.random() < 0.7:
                ledger.confirm("g")
        if not ledger.in_flight("g") and rng.random() < 0.5:
            assert not ledger.adopt("g", store.sums, store.revision)
    for _ in range(2):
        for name, ledger in ledgers.items():
            while (departing := ledger.depart("g")) is not None:
                store.flush(name, *departing)
                ledger.confirm("g")
            assert not ledger.adopt("g", store.sums, store.revision)
    totals = {ledger.total("g").totals.steps for ledger in ledgers.values()}
    assert totals == {store.sums.totals.steps} == {taught}
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
        departing = ledger.depart("g")
        assert departing is not None
        store.flush("me", *departing)
        ledger.confirm("g")
        assert ledger.forget("g")
    assert store.sums.totals.steps == 15


def test_what_the_store_held_at_first_is_prior() -> None:
    """Steps known before this ledger read a group, whether or not it taught meanwhile."""
    ledger, store = Ledger(stored=True), FakeStore()
    assert ledger.prior_steps("g") == 0
    store.flush("other", 1, steps(100))
    ledger.add("g", steps(5), 0.0)
    departing = ledger.depart("g")
    assert departing is not None
    store.flush("me", *departing)
    ledger.confirm("g")
    ledger.adopt("g", store.sums, store.revision)
    assert (ledger.prior_steps("g"), ledger.total("g").totals.steps) == (100, 105)
    store.flush("other", 2, steps(50))
    ledger.adopt("g", store.sums, store.revision)
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
    assert sorted(departing[1].buckets) == [1, 2, 3]
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
    assert (list(departing[1].own), departing[1].latest) == (["p/0", "p/1"], {"p/q": (1.0,)})


def test_a_flush_that_the_store_confirmed_and_then_lost_is_noticed() -> None:
    """After a failover its revision is below what was confirmed, though others wrote since."""
    ledger, store = Ledger(stored=True), FakeStore()
    ledger.track(["g"])
    ledger.adopt("g", NOTHING, 0)
    ledger.add("g", steps(5), 0.0)
    assert ledger.depart("g") is not None
    ledger.confirm("g")  # by a master that is gone
    ledger.add("g", steps(3), 0.0)
    departing = ledger.depart("g")
    assert departing is not None
    store.flush("me", *departing)
    ledger.confirm("g")
    assert ledger.adopt("g", store.sums, store.revision)
    assert ledger.total("g").totals.steps == 8


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
