"""Policy `q_learning` against figures computed by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from planner_service.context import Context, Outcome
from planner_service.policies import BUILT_IN
from planner_service.policies.policy import Policy
from planner_service.policies.q_learning import NUM_VALUES, OWED, READY, STALE, best_gamma
from planner_service.session import Session
from planner_service.sums import NOTHING, Stats, Totals


class Chance(random.Random):
    """Draws one number."""

    def random(self) -> float:
        """A number that explores nothing."""
        return 0.999


AT = Context(1, max_gamma=2)


def made(**parameters: Any) -> Policy:
    """The policy with some parameters."""
    given = {"gamma_max": 2, "step_size": 0.5, "discount": 0.5, **parameters}
    return BUILT_IN["q_learning"].build({k: str(v) for k, v in given.items()})[0]


def one_step(us: int, emitted: int, **fields: Any) -> Outcome:
    """One step of one row."""
    return Outcome(1, 1, us, emitted, 1, emitted, **fields)


def values(stats: Stats, octave: int = 1) -> Sequence[float]:
    """Values of an octave."""
    return stats.latest[f"q_learning/0.5/0.5/{octave}"]


def test_a_stream_follows_the_trace_computed_by_hand() -> None:
    """Step size 1/2, discount 1/2; values in tokens a second.

    1. Gamma 2, 10 ms, 2 tokens, 200/s. Nothing is known of what follows: the target is 200.
    2. Gamma 0, 10 ms, 1 token, 100/s, in both modes; it leads to the stale mode, of which nothing
       is known when the ready mode learns: 100; the stale one then follows with 100 too.
    3. Gamma 2 from the stale mode, 200/s, with 5 ms of catch-up, half a step: 200 - 100. It leads
       to the ready mode, where the best is 200: 100 / 2 + 200 / 2 = 150.
    4. Gamma 0 again at 100/s: the best of the stale mode is 150 now, so the target is 125;
       ready: 100 + (125 - 100) / 2 = 112.5, and stale: the same.
    5. Two steps of gamma 2 at 400/s in the ready mode: target 400 / 2 + 200 / 2 = 300, and
       1 - (1 - 1/2)^2 = 3/4 of the way: 200 + 75 = 275.
    """
    policy, stats = made(), NOTHING

    def teach(gamma: int, outcome: Outcome) -> Sequence[float]:
        nonlocal stats
        stats = stats.plus(policy.update(stats, AT, gamma, outcome))
        return values(stats)

    assert teach(2, one_step(10_000, 2))[READY + 2] == pytest.approx(200)
    known = teach(0, one_step(10_000, 1))
    assert (known[READY], known[STALE]) == pytest.approx((100, 100))
    caught_up = one_step(10_000, 2, catch_up_us=5_000, num_catch_up_steps=1)
    assert teach(2, caught_up)[STALE + 2] == pytest.approx(150)
    known = teach(0, one_step(10_000, 1))
    assert (known[READY], known[STALE]) == pytest.approx((112.5, 112.5))
    assert teach(2, Outcome(2, 2, 20_000, 8, 2, 8))[READY + 2] == pytest.approx(275)


def test_a_state_is_an_octave_and_a_mode() -> None:
    """Ready: 1 is best. Stale: leaving 0 costs more than it brings. Gamma 2 never ran: first."""
    known = [0.0] * NUM_VALUES
    known[READY : READY + 3] = [100.0, 120.0, 90.0]
    known[STALE : STALE + 2] = [100.0, 80.0]
    assert best_gamma(known, READY, 2) == 1
    assert best_gamma(known, STALE, 1) == 0
    assert best_gamma(known, STALE, 3) == 3
    policy = made()
    # Gamma 2 ran in the ready mode only, with 90: that counts in the stale mode too.
    stats = Stats(latest={"q_learning/0.5/0.5/2": tuple(known)})
    for previous, stale, batch_size, expected in (
        (1, 50, 3, 1),
        (0, 50, 3, 0),
        (0, 0, 3, 1),  # nothing is stale, so nothing has to be caught up
    ):
        at = AT._replace(batch_size=batch_size, sum_stale_tokens=stale)
        choice, _ = policy.select(at, stats, Session(previous), Chance())
        assert choice.gamma == expected
        assert choice.propensity == pytest.approx(0.95 + 0.05 / 3)


def test_draft_prefill_takes_its_share_of_every_token() -> None:
    """10 ms and 2 tokens at 4 rows; 125 us of prefill for each of 8 tokens are 1 ms: 2 in 11."""
    charged = Stats(totals=Totals(emitted=8, draft_prefill_us=1000))
    outcome = Outcome(1, 1, 10_000, 8, 4, 8)
    at = AT._replace(batch_size=4)
    assert values(made().update(charged, at, 1, outcome), 3)[READY + 1] == pytest.approx(2 / 0.011)
    assert values(made().update(charged, at, 0, outcome), 3)[READY] == pytest.approx(2 / 0.010)


def test_an_octave_that_is_never_timed_goes_by_the_nearest() -> None:
    """Of 32 to 63 rows only owed catch-up is known: what is known of 64 and more decides."""
    timed, owing = [0.0] * NUM_VALUES, [0.0] * NUM_VALUES
    timed[READY : READY + 3], owing[OWED] = [100.0, 120.0, 90.0], 0.5
    names = {7: timed, 6: owing, 2: [90.0, 1.0, 100.0, *timed[3:]]}
    stats = Stats(latest={f"q_learning/0.5/0.5/{n}": tuple(known) for n, known in names.items()})
    for batch_size, expected in ((63, 1), (64, 1), (5, 2)):
        at = AT._replace(batch_size=batch_size)
        assert made().select(at, stats, Session(1), Chance())[0].gamma == expected


def test_steps_of_a_report_go_to_the_mode_they_ran_in() -> None:
    """Of 4 steps of 10 ms at 200/s one caught up for 30 ms, three steps: 200 - 600 there."""
    outcome = Outcome(4, 4, 40_000, 8, 4, 8, catch_up_us=30_000, num_catch_up_steps=1)
    known = values(made(discount=0.5).update(NOTHING, AT, 1, outcome))
    assert known[READY + 1] == pytest.approx(200)
    assert known[STALE + 1] == pytest.approx(0.5 * -400 + 0.5 * 200)
    without_count = outcome._replace(num_catch_up_steps=0)  # paid, so by one step at least
    assert values(made().update(NOTHING, AT, 1, without_count)) == known


def test_catch_up_before_the_first_draft_is_charged_to_it() -> None:
    """Two steps that could not draft caught up for 6 and 4 ms, the next for 5: 3/4 of a step."""
    policy, stats = made(), NOTHING
    off = AT._replace(feasible_max_gamma=0)
    for us in (6_000, 4_000):
        waiting = Outcome(1, catch_up_us=us, num_catch_up_tokens=9)
        stats = stats.plus(policy.update(stats, off, 0, waiting))
    assert values(stats)[OWED] == pytest.approx(0.010)
    first = one_step(20_000, 2, catch_up_us=5_000, num_catch_up_steps=1)
    stats = stats.plus(policy.update(stats, AT, 1, first))
    assert values(stats)[OWED] == 0
    assert values(stats)[STALE + 1] == pytest.approx(100 * (1 - 15 / 20))
    assert policy.update(NOTHING, off, 0, Outcome(1)) is NOTHING
    assert not policy.update(NOTHING, AT, 1, Outcome(1)).latest  # not timed: no reward


def test_values_that_are_none_of_ours_count_as_nothing_known() -> None:
    """Of another length, owing less than nothing, or huge: every gamma is as if it never ran."""
    for known in ((1.0,), (1.0,) * OWED + (-1.0,), (1e200,) * NUM_VALUES):
        stats = Stats(latest={"q_learning/0.5/0.5/1": known})
        assert made().select(AT, stats, Session(1), Chance())[0].gamma == 2
        assert values(made().update(stats, AT, 1, one_step(10_000, 1)))[READY + 1] == 100


@pytest.mark.parametrize(("catch_up_us", "expected"), [(20_000, 2), (400_000, 0)])
def test_it_learns_whether_leaving_gamma_0_pays(catch_up_us: int, expected: int) -> None:
    """Gamma 2 makes 110 tokens a second, gamma 0 makes 100; with .95 the next 20 steps count.

    In the stale mode gamma 2 is worth .05 * 110 (1 - c) + .95 * 110 for a catch-up of c steps of
    100 ms, which is more than 100 while c < 1.8: at 20 ms it is, at 400 ms it is not.
    """
    policy = made(step_size=0.2, discount=0.95, epsilon=0.3, hold_steps=4)
    rng, stats, session, stale = random.Random(7), NOTHING, Session(), 0
    for _ in range(1500):
        at = AT._replace(sum_stale_tokens=stale)
        choice, session = policy.select(at, stats, session, rng)
        tokens = (40, 36, 44)[choice.gamma]
        caught_up = choice.gamma > 0 and stale > 0
        ran = Outcome(4, 4, 400_000, tokens, 4, tokens)
        if caught_up:
            ran = ran._replace(catch_up_us=catch_up_us, num_catch_up_steps=1)
        stats = stats.plus(policy.update(stats, at, choice.gamma, ran))
        stale = 0 if choice.gamma else stale + 40
        session = session.after_steps(1, 4)
    at = AT._replace(sum_stale_tokens=40)
    assert policy.select(at, stats, Session(0), Chance())[0].exploit_gamma == expected
    assert policy.select(at, stats, Session(2), Chance())[0].exploit_gamma == 2
