"""Sums: additive in any order, and back from the store as they were."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner_service.context import Context, Outcome
from planner_service.observation import observe
from planner_service.own_sums import OwnSums
from planner_service.sums import NOTHING, Stats, from_fields

whole = st.integers(0, 10**9)


@st.composite
def outcomes(draw: st.DrawFn) -> tuple[Context, int, Outcome]:
    """Steps with whole sums, as workers report them."""
    gamma, size = draw(st.integers(0, 8)), draw(st.integers(1, 5))
    steps = draw(st.integers(1, 100))
    timed = draw(st.integers(0, steps))
    emitted = draw(st.integers(0, timed * size * (gamma + 1)))
    reached = tuple(draw(st.lists(whole, max_size=8)))
    sums = [draw(whole) + 1, emitted, timed * size, emitted, *(draw(whole) for _ in range(4))]
    return Context(size), gamma, Outcome(steps, timed, *sums, reached, reached)


def exact(stats: Stats) -> dict[str, Any]:
    """Fields; those that are sums of quotients to nine digits."""
    return {
        k: float(f"{float(v):.9g}") if k.endswith("ratio_us") else v
        for k, v in stats.fields().items()
    }


@given(st.lists(outcomes(), max_size=12), st.integers(0, 99), st.integers(0, 12))
def test_merged_sums_do_not_depend_on_order_or_grouping(
    taught: list[tuple[Context, int, Outcome]], seed: int, cut: int
) -> None:
    """One replica that sees all equals two that see parts, in any order, merged."""
    one = NOTHING
    for item in taught:
        one = one.plus(observe(*item))
    shuffled = random.Random(seed).sample(taught, len(taught))
    parts = [NOTHING, NOTHING]
    for i, item in enumerate(shuffled):
        parts[i >= cut] = parts[i >= cut].plus(observe(*item))
    assert exact(parts[0].plus(parts[1])) == exact(parts[1].plus(parts[0])) == exact(one)


@given(st.lists(outcomes(), max_size=8))
def test_fields_read_back_are_the_same_sums(taught: list[tuple[Context, int, Outcome]]) -> None:
    """Names and values survive the store."""
    own = {"other:policy/x": OwnSums((2.5, 0.0)), "policy/y": OwnSums((0.1,), 64.0, 12.0)}
    stats = Stats(own=own, latest={"policy/z": (1e-9, 3.0)})
    for item in taught:
        stats = stats.plus(observe(*item))
    again, num_unknown = from_fields(stats.fields().items())
    assert num_unknown == 0
    assert again.fields() == stats.fields()
    assert (again.own, again.latest) == (stats.own, stats.latest)


def test_what_is_not_ours_in_the_store_is_left_out() -> None:
    """Unknown names are counted, and an arm without steps is not an arm."""
    names = [
        "arm:1:2:nope",
        "arm:x:2:steps",
        "arm:1:99:steps",
        "total:no",
        "reached:8",
        "arm:1",
        "own:inf:policy/x",  # a clock without values
        "own:0.0:policy/x",
        "",
    ]
    texts = [("total:steps", "nan"), ("latest:p/x", "1 two"), ("own:inf:p/x", "-1.0 2.0")]
    stats, num_unknown = from_fields(
        [*((name, "1.0") for name in names), ("arm:1:2:rows", "5.0"), *texts]
    )
    assert num_unknown == len(names) + len(texts)
    assert stats.fields() == {}


def test_time_is_learned_from_timed_steps_and_acceptance_from_all() -> None:
    """A report whose steps all held prompt tokens teaches acceptance, and no time."""
    outcome = Outcome(4, num_emitted=6, reached=(4, 2), accepted=(2, 1), draft_prefill_us=90)
    stats = observe(Context(1), 2, outcome)
    assert stats.buckets == {}
    assert (stats.totals.steps, stats.totals.timed_steps) == (4, 0)
    assert (stats.reached, stats.accepted) == ((4, 2), (2, 1))
    assert stats.draft_prefill_us_per_token == pytest.approx(15)


def test_seconds_per_token_is_per_request() -> None:
    """Two steps of 10 ms with 4 rows that deliver 16 tokens: 20 ms * 4 / 16 = 5 ms."""
    stats = observe(Context(4), 3, Outcome(2, 2, 20_000, 16, 8, 16))
    sums = stats.buckets[4][3]
    assert sums.seconds_per_token() == pytest.approx(0.005)
    assert sums.seconds_per_token("mean_of_ratios") == pytest.approx(0.005)


def test_acceptance_elsewhere_is_prior_and_less_than_its_own() -> None:
    """Prior is what the models' sums hold beyond the profile's, cut at 0 and at reached."""
    own = Stats(reached=(10.0, 4.0), accepted=(5.0, 1.0), num_prior_steps=9)
    shared = Stats(reached=(30.0, 10.0, 2.0), accepted=(20.0, 11.0, 1.0))
    stats = own.with_prior(shared, 7)
    assert (stats.prior_reached, stats.prior_accepted) == ((20, 6, 2), (15, 6, 1))
    assert (stats.reached, stats.accepted, stats.num_prior_steps) == ((10, 4), (5, 1), 7)
    assert stats.plus(own).prior_reached == stats.prior_reached
    assert stats.fields() == own.fields()
    for less in (own, NOTHING, Stats(reached=(9.0,), accepted=(1.0,))):
        unknown = own.with_prior(less, 0)
        assert (unknown.prior_reached, unknown.prior_accepted) == ((), ())
    assert NOTHING.with_prior(shared, 0).prior_accepted == (20, 10, 1)


vectors = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=3).map(tuple)


@given(
    st.lists(st.tuples(vectors, st.integers(0, 500)), min_size=1, max_size=8), st.integers(0, 99)
)
def test_sums_that_forget_do_not_depend_on_order(
    added: list[tuple[tuple[float, ...], int]], seed: int
) -> None:
    """A step counts by its age at the latest clock, however the sums came together."""
    sums = [OwnSums(values, 50.0, at) for values, at in added]
    latest = max(at for _, at in added)
    for order in (sums, random.Random(seed).sample(sums, len(sums))):
        merged = order[0]
        for more in order[1:]:
            merged = merged.plus(more)
        assert merged.at == latest
        for i, value in enumerate(merged.values):
            terms = [v[i] * 0.5 ** ((latest - at) / 50) for v, at in added if i < len(v)]
            assert value == pytest.approx(sum(terms), rel=1e-9, abs=1e-6)
