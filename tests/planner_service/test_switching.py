"""The switching cost learned from reports, against figures computed by hand."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner_service.admin_messages import profile_state
from planner_service.context import Context, Outcome, Profile
from planner_service.observation import observe
from planner_service.own_sums import OwnSums
from planner_service.policies import BUILT_IN
from planner_service.session import Session
from planner_service.sums import NOTHING, ArmSums, Stats, Totals, from_fields
from planner_service.switching import COST, predict_us, step_cost, table_us, us_per_step


def caught_up(rows: int, tokens: int, us: int, steps: int = 1, **fields: Any) -> Stats:
    """What a report of some catch-up steps teaches."""
    outcome = Outcome(steps, num_emitted=rows, catch_up_us=us, num_catch_up_tokens=tokens, **fields)
    return observe(Context(rows), 2, outcome._replace(num_catch_up_steps=steps))


def plane(*points: tuple[int, int], fixed: int, token: int, row: int) -> Stats:
    """One step at each (rows, tokens), its cost exactly on a plane."""
    stats = NOTHING
    for rows, tokens in points:
        stats = stats.plus(caught_up(rows, tokens, fixed + token * tokens + row * rows))
    return stats


POINTS = ((1, 10), (1, 200), (2, 40), (4, 40), (4, 120), (8, 64), (8, 400), (16, 160))


def test_a_plane_is_found_as_it_is() -> None:
    """Eight steps on 900 + 30 tokens + 50 rows give these three numbers, and any answer on it."""
    stats = plane(*POINTS, fixed=900, token=30, row=50)
    cost = step_cost(stats)
    assert cost is not None
    assert cost[:3] == pytest.approx((900, 30, 50))
    assert predict_us(stats, 100, 4) == pytest.approx(900 + 3000 + 200)
    assert predict_us(stats, 4, 4) == 0  # a token a row: the first draft takes them along
    mean_rows = sum(rows for rows, _ in POINTS) / 8
    assert us_per_step(stats) == pytest.approx(900 + 50 * mean_rows)


def test_steps_of_one_report_count_as_so_many() -> None:
    """A report of four equal steps teaches what four reports of one do."""
    one, four = NOTHING, NOTHING
    for rows, tokens in POINTS:
        us = 900 + 30 * tokens + 50 * rows
        four = four.plus(caught_up(rows, 4 * tokens, 4 * us, steps=4))
        for _ in range(4):
            one = one.plus(caught_up(rows, tokens, us))
    assert one.own == four.own


def test_at_one_batch_size_the_rows_have_no_cost_of_their_own() -> None:
    """Where rows never vary the system is singular: their part belongs to the fixed one."""
    stats = plane(*((2, 10 * n) for n in range(1, 9)), fixed=900, token=30, row=50)
    cost = step_cost(stats)
    assert cost is not None
    assert cost[:3] == pytest.approx((1000, 30, 0))


@pytest.mark.parametrize(
    "stats",
    [
        plane(*POINTS[:7], fixed=900, token=30, row=50),  # too few steps
        plane(*((2, 40) for _ in range(9)), fixed=900, token=30, row=50),  # all alike
        plane(*POINTS, fixed=20_000, token=-10, row=0),  # a token that pays
        plane(*POINTS, fixed=-100, token=30, row=0),  # a start that pays
    ],
)
def test_without_a_sane_fit_it_is_the_mean_cost_of_a_token(stats: Stats) -> None:
    """Few steps, equal steps and negative parts: microseconds a token, never a wild answer."""
    assert step_cost(stats) is None
    assert predict_us(stats, 100, 2) == pytest.approx(100 * stats.catch_up_us_per_token)
    assert us_per_step(stats) == 0


def test_a_negative_cost_of_rows_is_left_out() -> None:
    """More rows that seem to cost less: the fit goes by tokens alone, and stays non-negative."""
    stats = plane(*POINTS, fixed=2000, token=30, row=-20)
    cost = step_cost(stats)
    assert cost is not None
    assert cost.per_row == 0
    assert cost.fixed > 0
    assert 20 < cost.per_token < 40


def test_nothing_is_kept_of_steps_that_caught_nothing_up() -> None:
    """Reports without catch-up add no sums; those from before steps were counted, totals only."""
    assert caught_up(2, 0, 0, steps=3).own == {}
    old = observe(Context(2), 2, Outcome(1, num_catch_up_tokens=50, catch_up_us=100))
    assert old.own == {}
    assert predict_us(old, 30, 1) == 60
    assert predict_us(NOTHING, 30, 1) == 0
    assert table_us(NOTHING, 30, 1) == 0


def test_what_could_not_speculate_teaches_too() -> None:
    """Steps that were still catching up have gamma 0 and no decision, and are the long ones."""
    outcome = Outcome(2, catch_up_us=600, num_catch_up_tokens=200, num_catch_up_steps=2)
    stats = observe(Context(1, feasible_max_gamma=0), 0, outcome)
    assert COST in stats.own
    assert table_us(stats, 100, 1) == 300
    assert stats.totals == Totals(catch_up_us=600, catch_up_tokens=200)


def test_the_table_answers_from_the_nearest_cell() -> None:
    """Cells by powers of two; the mean of a cell; of equally near ones the nearer batch."""
    stats = caught_up(4, 4 * 20, 2_000)  # L 16 to 31, B 4 to 7
    stats = stats.plus(caught_up(5, 5 * 31, 4_000))
    stats = stats.plus(caught_up(1, 300, 9_000))  # L 256 to 511, B 1
    assert table_us(stats, 16, 7) == 3_000
    assert table_us(stats, 300, 1) == 9_000
    assert table_us(stats, 64, 1) == 9_000  # two lengths away; the other is two and two
    assert table_us(stats, 64, 4) == 3_000  # two lengths away; the other is two and two
    assert table_us(stats, 10**9, 4096) == 9_000  # 26 lengths would fit no table: the last row
    assert table_us(stats, 1, 4) == 0


def test_nightjar_charges_the_table_where_it_is_told_to() -> None:
    """C(L, B) goes by the longest row, divided by gamma; `measured` by all rows' tokens."""

    def arm(ms: float) -> ArmSums:
        return ArmSums(10, ms * 1e4, 10, 10, ms * 1e4, 10)

    table = caught_up(1, 100, 3_000)
    stats = table._replace(buckets={1: {0: arm(10), 1: arm(8), 2: arm(8.2)}})
    at = Context(1, max_gamma=2, max_stale_tokens=100, sum_stale_tokens=100)

    def chosen(cost: str, context: Context = at) -> int:
        policy = BUILT_IN["nightjar"].build({"switching_cost": cost})[0]
        return policy.select(context, stats, Session(), random.Random(1))[0].exploit_gamma

    assert chosen("none") == 1
    assert chosen("table") == 2  # 8 + 3 is worse than 10, 8.2 + 3 / 2 is not
    assert chosen("measured") == 2
    assert chosen("table", at._replace(max_stale_tokens=1)) == 1
    assert chosen("measured", at._replace(sum_stale_tokens=1)) == 1


def test_the_state_shows_both_parts_of_the_cost() -> None:
    """The operator sees microseconds a token, and what a step costs beyond its tokens."""
    stats = plane(*POINTS, fixed=900, token=30, row=0)
    profile = Profile(
        target="t",
        draft="d",
        proposer="draft_model",
        dtype="float32",
        device="cpu",
        tensor_parallel_size=1,
        engine="e",
    )
    shown = profile_state(profile, stats)
    assert shown.catch_up_us_per_step == pytest.approx(900)
    assert shown.catch_up_us_per_token == pytest.approx(stats.catch_up_us_per_token)


steps = st.tuples(
    st.integers(1, 64), st.integers(1, 10**6), st.integers(0, 10**9), st.integers(1, 50)
)


@given(st.lists(steps, max_size=20), st.integers(0, 99), st.integers(0, 10**6), st.integers(0, 64))
def test_answers_are_finite_whatever_was_seen_and_in_any_order(
    seen: list[tuple[int, int, int, int]], seed: int, stale: int, batch: int
) -> None:
    """No report makes an answer negative or infinite; merged in another order it is the same."""
    one, other = NOTHING, NOTHING
    for rows, tokens, us, count in seen:
        one = one.plus(caught_up(rows, tokens, us, count))
    for rows, tokens, us, count in random.Random(seed).sample(seen, len(seen)):
        other = caught_up(rows, tokens, us, count).plus(other)
    for answer in (predict_us, table_us):
        assert 0 <= answer(one, stale, batch) < math.inf
    assert table_us(other, stale, batch) == pytest.approx(table_us(one, stale, batch))
    for name, sums in one.own.items():
        assert other.own[name].values == pytest.approx(sums.values)
    assert from_fields(one.fields().items())[0].own == one.own


@given(st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=12))
def test_senseless_sums_from_the_store_give_no_senseless_answer(values: list[float]) -> None:
    """Whatever stands under our names, the answer is a number of at least 0."""
    sums = OwnSums(tuple(values))
    stats = Stats(own={COST: sums, "switching/table:2": sums})
    assert predict_us(stats, 100, 2) >= 0
    assert table_us(stats, 100, 2) >= 0
