"""Net benefit: ratios of sums against measured plain decoding, and floors over a window."""

from __future__ import annotations

import pytest

from planner_service.context import Outcome
from planner_service.net_benefit import (
    MAX_KEYS,
    FloorWatch,
    Meter,
    Ran,
    net_benefit,
    of_stats,
)
from planner_service.sums import ArmSums, Stats, Totals
from planner_service.versions import Floor


def outcome(steps: int, us: int, tokens: int, **fields: int) -> Outcome:
    """Timed steps that took `us` microseconds and delivered `tokens`."""
    return Outcome(steps, steps, us, tokens, tokens, tokens, **fields)


def test_net_benefit_by_hand() -> None:
    """Two batch sizes with a baseline, one without, which does not count."""
    ran = {1: Ran(10, 100.0, 20.0), 2: Ran(10, 100.0, 10.0), 3: Ran(99, 1.0, 1000.0)}
    plain = {1: Ran(4, 40.0, 4.0), 2: Ran(6, 50.0, 10.0)}
    measured = net_benefit(ran, plain, 0.0)
    # Plain decoding brings 0.1 and 0.2 tokens a microsecond: 10 + 20 in the same time.
    assert measured is not None
    assert measured == (pytest.approx(30 / 30 - 1), 20, 10)
    charged = net_benefit(ran, plain, 0.25)
    assert charged is not None
    assert charged.net == pytest.approx(30 / 37.5 - 1)


@pytest.mark.parametrize("plain", [{}, {2: Ran(5, 5, 5)}, {1: Ran(5, 5, 0)}, {1: Ran(5, 0, 5)}])
def test_without_a_baseline_there_is_no_figure(plain: dict[int, Ran]) -> None:
    """Nothing measured in the same batch size, or nothing delivered there."""
    assert net_benefit({1: Ran(10, 100.0, 20.0)}, plain, 0.0) is None


def test_of_all_that_was_learned() -> None:
    """All arms of a batch size against its gamma 0; catch-up and prefill are charged."""
    arms = {0: ArmSums(10, 1000, 10, 10), 2: ArmSums(10, 1000, 30, 10)}
    stats = Stats({1: arms, 2: {2: ArmSums(5, 1, 500, 5)}}, Totals(25, 25, 40, 0, 0, 0))
    measured = of_stats(stats)
    assert measured == (pytest.approx(40 / 20 - 1), 20, 10)
    totals = Totals(50, 25, 40, 2001.0, 7, 2001.0)  # half of the steps were timed
    charged = of_stats(stats._replace(totals=totals))
    assert charged is not None
    assert charged.net == pytest.approx(40 / (20 * 2) - 1)
    assert of_stats(Stats()) is None


def test_a_meter_tells_own_steps_from_the_baseline() -> None:
    """Probes and others' plain steps are baseline; the version's own plain steps are both."""
    meter = Meter()
    meter.add("b", 2, outcome(10, 1000, 20), 0.0, is_own=True)
    assert meter.measured(0.0) is None
    meter.add("b", 0, outcome(10, 1000, 10), 1.0, is_own=False)
    assert meter.measured(1.0) == (pytest.approx(1.0), 10, 10)
    meter.add("b", 0, outcome(10, 1000, 10), 2.0, is_own=True)
    assert meter.measured(1e9) == (pytest.approx(0.5), 20, 20)


def test_a_meter_charges_catch_up_of_steps_without_a_choice() -> None:
    """They bring a cost and nothing else."""
    meter = Meter()
    meter.add("b", 0, outcome(10, 1000, 10), 0.0, is_own=False)
    meter.add("b", 2, outcome(10, 1000, 20), 0.0, is_own=True)
    meter.add("b", -1, Outcome(0, catch_up_us=500, draft_prefill_us=500), 0.0, is_own=True)
    measured = meter.measured(0.0)
    assert measured is not None
    assert measured.net == pytest.approx(20 / 20 - 1)


def test_a_meter_forgets_what_left_its_window() -> None:
    """What is older than the window no longer counts, and its memory is bounded."""
    meter = Meter(80.0)
    meter.add("b", 0, outcome(10, 1000, 10), 0.0, is_own=True)
    assert meter.measured(79.0) is not None
    assert meter.measured(81.0) is None
    for second in range(1000):
        meter.add("b", 0, outcome(1, 100, 1), float(second), is_own=True)
    measured = meter.measured(1000.0)
    assert measured is not None
    assert 70 <= measured.num_steps <= 80
    for key in range(2 * MAX_KEYS):
        meter.add(key, 0, outcome(1, 100, 1), 1000.0, is_own=True)
    measured = meter.measured(1000.0)
    assert measured is not None
    assert measured.num_steps <= 80 + MAX_KEYS


def watched(nets: list[float | None], least: float = -0.05) -> list[str]:
    """What a floor over 8 s says, second by second, of a version with these net benefits."""
    watch = FloorWatch(Floor(min_net_benefit=least, for_s=8.0))
    said = []
    for second, net in enumerate(nets):
        now = float(second)
        if net is not None:
            watch.meter.add(1, 0, outcome(10, 1000, 1000), now, is_own=False)
            watch.meter.add(1, 2, outcome(10, 1000, round(1000 * (1 + net))), now, is_own=True)
            said.append(watch.problem(now))
    return said


def test_a_floor_acts_when_it_was_missed_for_long_enough() -> None:
    """Not before the time has passed, and then with figures."""
    said = watched([-0.1] * 12)
    first = next(i for i, words in enumerate(said) if words)
    assert first == 9  # too few baseline steps in the first second
    assert "net benefit -10.0% stayed below its floor of -5.0% for 8 s" in said[first]


def test_a_floor_does_not_act_on_a_version_that_pays_or_recovers() -> None:
    """One good moment starts the time anew; above the floor nothing is said."""
    assert not any(watched([-0.04] * 40))
    assert not any(watched(([-0.06] * 5 + [0.3] * 5) * 5))


def test_a_floor_does_not_act_on_what_is_not_measured() -> None:
    """Without steps, or with too few of plain decoding, the time does not run."""
    assert not any(watched([-0.1] * 6 + [None] * 30 + [-0.1] * 6))
    watch = FloorWatch(Floor(min_net_benefit=0.0, for_s=1.0))
    for second in range(100):
        if second % 5 == 0:
            watch.meter.add(1, 0, outcome(1, 1000, 1000), float(second), is_own=False)
        watch.meter.add(1, 2, outcome(100, 1000, 1), float(second), is_own=True)
        assert not watch.problem(float(second))


def test_a_floor_acts_on_a_slow_worker_too() -> None:
    """With a step of plain decoding a second, a window of 4 s grows until it holds sixteen."""
    watch, said = FloorWatch(Floor(min_net_benefit=0.0, for_s=4.0)), []
    for second in range(60):
        watch.meter.add(1, 0, outcome(1, 1000, 1000), float(second), is_own=False)
        watch.meter.add(1, 2, outcome(10, 1000, 500), float(second), is_own=True)
        said.append(watch.problem(float(second)))
    first = next(second for second, words in enumerate(said) if words)
    assert 16 <= first <= 24
    assert "-50.0%" in said[first]
