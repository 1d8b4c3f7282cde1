"""Sums: additive in any order, and back from the store as they were."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner_service.context import Context, Outcome
from planner_service.sums import NOTHING, Stats, from_fields, observe

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
        k: float(f"{v:.9g}") if k.endswith("ratio_us") else v for k, v in stats.fields().items()
    }


@given(st.lists(outcomes(), max_size=12), st.integers(0, 99), st.integers(0, 12))
def test_merged_sums_do_not_depend_on_order_or_grouping(
    taught: list[tuple[Context, int, Outcome]], seed: int, cut: int
) -> None:
    """One replica that sees all equals two that see parts, in any order, merged."""
    one = NOTHING
    for item in taught:
        one = observe(one, *item)
    shuffled = random.Random(seed).sample(taught, len(taught))
    parts = [NOTHING, NOTHING]
    for i, item in enumerate(shuffled):
        parts[i >= cut] = parts[i >= cut].plus(observe(NOTHING, *item))
    assert exact(parts[0].plus(parts[1])) == exact(parts[1].plus(parts[0])) == exact(one)
    assert exact(parts[0].only_time().plus(parts[0].only_acceptance())) == exact(parts[0])


@given(st.lists(outcomes(), max_size=8))
def test_fields_read_back_are_the_same_sums(taught: list[tuple[Context, int, Outcome]]) -> None:
    """Names and values survive the store."""
    stats = Stats(own={"other:policy/x": 2.5})
    for item in taught:
        stats = observe(stats, *item)
    again, num_unknown = from_fields(stats.fields().items())
    assert num_unknown == 0
    assert again.fields() == stats.fields()


def test_what_is_not_ours_in_the_store_is_left_out() -> None:
    """Unknown names are counted, and an arm without steps is not an arm."""
    names = [
        "arm:1:2:nope",
        "arm:x:2:steps",
        "arm:1:99:steps",
        "total:no",
        "reached:8",
        "arm:1",
        "",
    ]
    stats, num_unknown = from_fields([(name, 1.0) for name in names] + [("arm:1:2:rows", 5.0)])
    assert num_unknown == len(names)
    assert stats.fields() == {}


def test_time_is_learned_from_timed_steps_and_acceptance_from_all() -> None:
    """A report whose steps all held prompt tokens teaches acceptance, and no time."""
    outcome = Outcome(4, num_emitted=6, reached=(4, 2), accepted=(2, 1), draft_prefill_us=90)
    stats = observe(NOTHING, Context(1), 2, outcome)
    assert stats.buckets == {}
    assert (stats.totals.steps, stats.totals.timed_steps) == (4, 0)
    assert (stats.reached, stats.accepted) == ((4, 2), (2, 1))
    assert stats.draft_prefill_us_per_token == pytest.approx(15)


def test_seconds_per_token_is_per_request() -> None:
    """Two steps of 10 ms with 4 rows that deliver 16 tokens: 20 ms * 4 / 16 = 5 ms."""
    stats = observe(NOTHING, Context(4), 3, Outcome(2, 2, 20_000, 16, 8, 16))
    sums = stats.buckets[4][3]
    assert sums.seconds_per_token() == pytest.approx(0.005)
    assert sums.seconds_per_token("mean_of_ratios") == pytest.approx(0.005)
