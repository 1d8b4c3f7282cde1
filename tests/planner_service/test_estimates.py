"""Estimates: acceptance that follows changes, and step times learned from few steps."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from planner_service.context import Context, Outcome
from planner_service.estimates import acceptance, step_cost, workload
from planner_service.estimates.acceptance import HALF_LIVES, Acceptance
from planner_service.estimates.model import GRID, Beyond, Model, sums
from planner_service.observation import observe
from planner_service.own_sums import OwnSums
from planner_service.sums import NOTHING, Stats

LARGEST = 5


def drafted(rng: random.Random, rate: float, gamma: int, rows: int) -> Outcome:
    """One step whose every draft is accepted with the same probability."""
    reached, accepted, left = [], [], rows
    for _ in range(gamma):
        reached.append(left)
        left = sum(rng.random() < rate for _ in range(left))
        accepted.append(left)
    emitted = rows + sum(accepted)
    return Outcome(
        1, 1, 10_000, emitted, rows, emitted, 0, 0, 0, 0, tuple(reached), tuple(accepted)
    )


def taught(rates: list[float], gamma: int, rows: int, seed: int = 0) -> Acceptance:
    """What is estimated after one step at each rate."""
    rng, own = random.Random(seed), dict[str, OwnSums]()
    for step, rate in enumerate(rates):
        outcome = drafted(rng, rate, gamma, rows)
        for name, added in acceptance.sums("p", float(step * rows), outcome).items():
            own[name] = own[name].plus(added) if name in own else added
    found = acceptance.counts("p", own)
    return acceptance.estimate(found, (), (), largest=LARGEST, optimism_sds=1.0)


def test_tokens_are_one_and_the_products_of_conditional_rates() -> None:
    """Reached 3000, 2400, 1200 and accepted .8, .5, .25 of them: 1 + .8 + .4 + .1."""
    values = (3000, 2400, 2400, 1200, 1200, 300)
    found = [OwnSums(tuple(map(float, values)), half_life, 9.0) for half_life in HALF_LIVES]
    tokens = acceptance.estimate(found, (), (), largest=3, optimism_sds=1.0).tokens
    # The prior of 6 rows moves each by less than 6 / (1200 / 3).
    assert tokens == pytest.approx((1.0, 1.8, 2.2, 2.3), abs=0.015)


def test_a_position_without_counts_is_taken_to_be_like_the_one_before() -> None:
    """Gamma 1 alone teaches what longer drafts would yield, with doubt that grows."""
    found = taught([0.7] * 300, gamma=1, rows=16)
    assert found.tokens[3] == pytest.approx(1 + 0.7 + 0.49 + 0.343, rel=0.03)
    doubt = [high / mean for high, mean in zip(found.tokens_high, found.tokens, strict=True)]
    assert doubt[1] < 1.01
    assert doubt == sorted(doubt)
    assert doubt[3] > 1.05


@pytest.mark.parametrize(("before", "after"), [(0.8, 0.4), (0.4, 0.8)])
@pytest.mark.parametrize(("rows", "steps"), [(1, 600), (16, 50)])
def test_an_abrupt_change_is_followed(before: float, after: float, rows: int, steps: int) -> None:
    """A long past is dropped for all positions, also for those that were not reached since."""
    found = [
        taught([before] * 1500 + [after] * steps, gamma=2, rows=rows, seed=seed)
        for seed in range(6)
    ]
    for gamma in (2, 4):
        estimates = [one.tokens[gamma] for one in found]
        expected = sum(after**i for i in range(gamma + 1))
        assert np.mean(estimates) == pytest.approx(expected, rel=0.15)


def test_without_a_change_the_long_past_counts() -> None:
    """At one row the estimate is far steadier than the last steps alone would make it."""
    estimates = [taught([0.7] * 2000, gamma=3, rows=1, seed=s).tokens[3] for s in range(12)]
    assert np.std(estimates) < 0.08
    assert np.mean(estimates) == pytest.approx(2.533, abs=0.05)


def test_other_profiles_acceptance_is_a_guess_until_own_rows_were_seen() -> None:
    """Cold, the prior decides; with own counts it is gone."""
    prior = ((1000.0, 900.0), (900.0, 810.0))
    cold = acceptance.estimate((None,) * len(HALF_LIVES), *prior, largest=2, optimism_sds=1.0)
    assert cold.tokens == pytest.approx((1, 1.9, 2.71))
    own = acceptance.counts(
        "p", acceptance.sums("p", 0.0, Outcome(9, reached=(900, 180), accepted=(180, 36)))
    )
    known = acceptance.estimate(own, *prior, largest=2, optimism_sds=1.0)
    assert known.tokens == pytest.approx((1, 1.2, 1.24), rel=0.03)


def cells(model: Model, points: list[tuple[int, int, int, float]], steps: int = 50) -> Stats:
    """Stats after steps at (batch size, gamma, KV tokens) of given microseconds, read by it."""
    stats = NOTHING
    for batch, gamma, kv, us in points:
        context = Context(batch, num_kv_tokens=kv)
        rows = batch * steps
        outcome = Outcome(steps, steps, round(us * steps), rows, rows, rows)
        learned = observe(context, gamma, outcome)
        stats = stats.plus(learned._replace(own=sums("p", stats, context, gamma, outcome)))
    model.read(stats)
    return stats


def test_measured_cells_are_returned_and_cells_between_lie_between() -> None:
    """After fifty steps each, 2 % remains; batch 6 lies between 5 and 7."""
    model = Model("p", 3, optimism_sds=1.0)
    cells(model, [(b, g, 0, 1000 * (b + 2 * g)) for b in (5, 7) for g in range(4)])
    at5, at6, at7 = (model.step_us(Context(batch)) for batch in (5, 6, 7))
    assert at5 == pytest.approx([5000, 7000, 9000, 11_000], rel=0.03)
    assert at7 == pytest.approx([7000, 9000, 11_000, 13_000], rel=0.03)
    assert all(low < middle < high for low, middle, high in zip(at5, at6, at7, strict=True))


def test_kv_tokens_cost_what_steps_of_one_cell_say() -> None:
    """At batch 8 steps take 5 ms and 10 us for each thousand KV tokens."""
    model = Model("p", 1, optimism_sds=1.0)
    points = [(8, 0, kv, 5000 + 0.01 * kv) for kv in (10_000, 50_000, 100_000, 200_000)]
    cells(model, points * 3)
    assert model.cost.us_per_kv_token == pytest.approx(0.01, rel=0.1)
    for kv in (20_000, 150_000):
        assert model.step_us(Context(8, kv))[0] == pytest.approx(5000 + 0.01 * kv, rel=0.03)


def test_steps_with_prompt_tokens_teach_too() -> None:
    """Where every step holds some, at 20 us each, the step of 5 ms is told apart all the same."""
    model, stats = Model("p", 1, optimism_sds=1.0), NOTHING
    for prompt in (100, 400, 50, 800, 0) * 3:
        outcome = Outcome(
            10,
            num_emitted=80,
            num_prefill_tokens=10 * prompt,
            mixed_step_us=10 * (5000 + 20 * prompt),
        )
        learned = observe(Context(8), 0, outcome)
        own = sums("p", stats, Context(8), 0, outcome)
        stats = stats.plus(learned._replace(own=own))
    model.read(stats)
    assert model.cost.us_per_prompt_token == pytest.approx(20, rel=0.15)
    assert model.step_us(Context(8))[0] == pytest.approx(5000, rel=0.15)


def test_doubt_is_against_the_best_gamma_and_shrinks_with_steps() -> None:
    """A gamma that ran here is known; one that ran at a far batch size is not."""
    model = Model("p", 2, optimism_sds=1.0)
    cells(model, [(7, 0, 0, 5000), (7, 1, 0, 6000), (200, 2, 0, 9000)])
    factors = model.time_factors(Context(7), 0)
    assert factors[0] == 1.0
    assert factors[1] > 0.97
    assert factors[2] < 0.9


def test_the_table_holds_the_best_gamma_by_batch_and_kv_tokens() -> None:
    """Where KV reads dominate, drafts cost little, and the best gamma is larger."""
    model = Model("p", 1, optimism_sds=1.0)
    # Gamma 1 yields 1.6 tokens and adds 4 ms to 4 ms; KV adds 100 us for each thousand tokens.
    stats = cells(
        model,
        [(8, g, kv, 4000 * (1 + g) + 0.1 * kv) for g in (0, 1) for kv in (500, 4000, 9000)] * 2,
    )
    assert stats.totals.steps == 600
    table = model.table(8, 1)
    assert table[GRID.bucket(8, 3000)] == (0, 0)
    assert table[GRID.bucket(8, 100_000)] == (1, 1)
    assert all(0 <= gamma <= 1 for pair in table.values() for gamma in pair)


def test_reading_other_sums_forgets_the_ones_before() -> None:
    """One model that reads two profiles in turn answers each like a model of its own."""
    first = cells(Model("p", 2, optimism_sds=1.0), [(8, 0, 0, 5000), (8, 2, 0, 6000)])
    second = cells(Model("p", 2, optimism_sds=1.0), [(8, 0, 0, 9000)])
    shared = Model("p", 2, optimism_sds=1.0)
    for stats in (first, second, first, NOTHING, second):
        fresh = Model("p", 2, optimism_sds=1.0)
        fresh.read(stats)
        shared.read(stats)
        assert shared.step_us(Context(8)) == pytest.approx(fresh.step_us(Context(8)))
        assert shared.acceptance == fresh.acceptance


def test_torn_cells_are_left_out() -> None:
    """Foreign vectors of any shape leave every estimate a finite number."""
    name = f"p/{step_cost.NAMES[3][1]}"
    for values in ((1.0,), (0.0,) * 12, (-1.0,) * 12, (1.0, -5.0, *(0.0,) * 10), (1e-9,) * 12):
        model = Model("p", 2, optimism_sds=1.0)
        model.read(Stats(own={name: OwnSums(values, 4000.0, 0.0)}))
        assert all(math.isfinite(us) and us > 0 for us in model.step_us(Context(3)))


def prompts(gamma: int, *, drafted: int, draft_us: int) -> Outcome:
    """A hundred steps of 8 rows, of which twenty compute a prompt of 100 tokens each."""
    rows = 800
    return Outcome(
        100, 80, 80 * 9000, 640, 640, rows, 2000, 0, 0, draft_us, (drafted,), (drafted // 2,)
    )._replace(num_emitted=rows + drafted // 2)


def test_a_drafts_prompts_cost_what_they_took_while_all_rows_drafted() -> None:
    """20 steps in 100 have prompts, 900 us each in the draft; what was put off is left out."""
    at, own = Context(8), dict[str, OwnSums]()
    outcomes = (
        (1, prompts(1, drafted=800, draft_us=18_000)),
        (1, prompts(1, drafted=200, draft_us=90_000)),
        (0, prompts(0, drafted=0, draft_us=0)),
    )
    assert workload.read("p", own).draft_prompts_us == -1
    for gamma, outcome in outcomes:
        for name, added in workload.sums("p", 0.0, at, gamma, outcome).items():
            own[name] = own[name].plus(added) if name in own else added
    found = workload.read("p", own)
    assert found.draft_prompts_us == pytest.approx(900)
    mean_emitted = sum(outcome.num_emitted for _, outcome in outcomes) / 300
    assert 1 - math.exp(-found.prompt_steps * mean_emitted) == pytest.approx(0.2)


def test_the_table_pays_for_prompts_and_for_switching() -> None:
    """Gamma 1 yields 1.6 tokens in 6 ms for 4: not with 1 ms more, of prompts or catching up."""
    model = Model("p", 1, optimism_sds=1.0)
    cells(model, [(8, 0, 0, 4000), (8, 1, 0, 6000)])
    at = GRID.bucket(8, 0)
    assert model.table(8, 1)[at] == (1, 1)
    assert model.table(8, 1, Beyond(prompts_us=10.0, prompt_steps=1.0))[at] == (1, 1)
    assert model.table(8, 1, Beyond(prompts_us=1000.0, prompt_steps=1.0))[at] == (0, 0)
    assert model.table(8, 1, Beyond(switching_us=1000.0 / 8))[at] == (0, 0)


def test_rounding_decides_when_to_fit_and_not_what_is_fitted() -> None:
    """A cell of 10,049 us is known as such, not as the nearest step of a grid."""
    model = Model("p", 1, optimism_sds=1.0)
    cells(model, [(8, 0, 0, 10_049)], steps=100_000)
    assert model.step_us(Context(8))[0] == pytest.approx(10_049, rel=1e-4)


def test_as_many_of_the_last_rows_count_as_a_step_has() -> None:
    """Forty rows that took nine in ten drafts, then ten that took none: a few rows, or all."""
    rng, own = random.Random(0), dict[str, OwnSums]()
    for clock, rate, rows in ((0.0, 0.9, 40), (40.0, 0.0, 10)):
        for name, added in acceptance.sums("p", clock, drafted(rng, rate, 1, rows)).items():
            own[name] = own[name].plus(added) if name in own else added
    found = acceptance.counts("p", own)
    few, many = (acceptance.lately(found, 0.5, 1, rows)[1] for rows in (2, 40))
    assert few < many
    assert many == pytest.approx(1 + acceptance.lately(found[1:], 0.5, 1, 2)[1] - 1)
