"""Policy `model_guided`: the best gamma by its model, and experiments only where they can tell."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from planner_service.context import Context, Outcome
from planner_service.estimates.model import GRID
from planner_service.policies.model_guided import (
    DOUBT_SHARE,
    EXPERIMENT_STEPS,
    HOLD_STEPS,
    PROBE_STEPS,
    SPEC,
    UNMEASURED_SHARE,
    Memory,
    ModelGuided,
)
from planner_service.policies.policy import Choice
from planner_service.session import Session
from planner_service.sums import NOTHING, Stats

ROWS = 4
AT = Context(ROWS, num_kv_tokens=2000, feasible_max_gamma=2, max_gamma=2, max_batch_size=16)
STEP_MS = (10, 12, 16)  # by gamma


def policy(**given: str) -> ModelGuided:
    """A policy with gammas 0, 1 and 2."""
    made, _ = SPEC.build({"gamma_max": "2", **given})
    assert isinstance(made, ModelGuided)
    return made


def known(rate: float, *, steps: int = 4000, gammas: tuple[int, ...] = (0, 1, 2)) -> Stats:
    """What many steps teach, where every draft is accepted with the same probability."""
    stats, learner = NOTHING, policy()
    for gamma in gammas:
        reached = tuple(round(ROWS * steps * rate**i) for i in range(gamma))
        accepted = tuple(round(ROWS * steps * rate ** (i + 1)) for i in range(gamma))
        emitted = ROWS * steps + sum(accepted)
        outcome = Outcome(
            steps,
            steps,
            STEP_MS[gamma] * 1000 * steps,
            emitted,
            ROWS * steps,
            emitted,
            reached=reached,
            accepted=accepted,
        )
        stats = stats.plus(learner.update(stats, AT, gamma, outcome))
    return stats


def choices(stats: Stats, context: Context, session: Session, n: int = 400) -> list[Choice]:
    """What differently seeded selects answer."""
    made = policy()
    return [made.select(context, stats, session, random.Random(seed))[0] for seed in range(n)]


@pytest.mark.parametrize(
    ("rate", "best"),
    [
        (0.1, 0),  # 1 / 10 = .1;  1.1 / 12 = .092
        (0.5, 1),  # .1;  1.5 / 12 = .125;  1.75 / 16 = .109
        (0.7, 1),  # .1;  1.7 / 12 = .142;  2.19 / 16 = .137
        (0.95, 2),  # .1;  1.95 / 12 = .163;  2.85 / 16 = .178
    ],
)
def test_the_gamma_of_most_tokens_per_second_is_run(rate: float, best: int) -> None:
    """Tokens per ms and row, from steps of 10, 12 and 16 ms, are worked out beside each case."""
    answers = choices(known(rate), AT, Session(1))
    assert {answer.exploit_gamma for answer in answers} == {best}
    assert Counter(answer.gamma for answer in answers).most_common(1)[0][0] == best
    assert {answer.table[GRID.bucket(ROWS, 2000)] for answer in answers} == {(best, best)}


def test_no_experiment_is_made_that_cannot_change_the_decision() -> None:
    """With acceptance .5 every other gamma is 13 % worse, and well known to be.

    Only the small share of decisions is left that doubts the model itself.
    """
    answers = choices(known(0.5), AT, Session(1), 2000)
    kinds = Counter((a.gamma, a.explored, a.propensity, a.hold_steps) for a in answers)
    doubt = DOUBT_SHARE / 2
    assert set(kinds) == {
        (1, False, 1 - DOUBT_SHARE, HOLD_STEPS),
        (0, True, doubt, EXPERIMENT_STEPS),
        (2, True, doubt, EXPERIMENT_STEPS),
    }
    assert kinds.most_common(1)[0][1] >= 2000 * (1 - 2 * DOUBT_SHARE)


def test_experiments_are_drawn_with_the_probability_that_is_reported() -> None:
    """Gamma 2, 3 % worse by an uncertain estimate, is tried in its share of decisions."""
    answers = choices(known(0.7, steps=4), AT, Session(1), 2000)
    drawn = Counter(answer.gamma for answer in answers)
    assert len(drawn) > 1
    for gamma, count in drawn.items():
        told = {answer.propensity for answer in answers if answer.gamma == gamma}
        assert len(told) == 1
        assert count / 2000 == pytest.approx(told.pop(), abs=0.04)
    assert all(answer.explored == (answer.gamma != 1) for answer in answers)


def test_nothing_known_means_every_gamma_is_tried_soon() -> None:
    """Forty decisions without any knowledge reach all gammas."""
    drawn = Counter(answer.gamma for answer in choices(NOTHING, AT, Session(), 40))
    assert set(drawn) == {0, 1, 2}


def test_one_step_at_a_gamma_teaches_the_shorter_ones() -> None:
    """Only gamma 2 ran; what gamma 1 yields is known from it: 1 + rate."""
    made, stats = policy(), known(0.7, gammas=(2,))
    assert made._model(stats).acceptance.tokens[1] == pytest.approx(1.7, rel=0.01)


def test_catching_up_is_spread_over_the_steps_that_speculation_stays_on() -> None:
    """Stale rows keep gamma 0 while the catch-up costs more than its steps would win back.

    With runs of 8 steps a catch-up of 30 ms costs 3.75 ms a step and pays, most with the longer
    draft: 2.19 / 19.75 = .111 against .108 and .1. One of 60 ms does not: 2.19 / 23.5 = .093.
    """
    taught = known(0.7)
    taught = taught._replace(
        totals=taught.totals._replace(catch_up_us=100_000.0, catch_up_tokens=1000)
    )
    short_runs = Memory(0.0, 1.0, on_steps=16.0, on_runs=9.0)
    assert short_runs.on_length == 8
    for stale_tokens, best in ((300, 2), (600, 0)):
        stale = AT._replace(sum_stale_tokens=stale_tokens + 2 * ROWS)
        answers = choices(taught, stale, Session(0, {0: short_runs}))
        assert {answer.exploit_gamma for answer in answers} == {best}


def test_at_gamma_0_acceptance_is_probed_at_intervals_that_cost_little() -> None:
    """Two steps of 2 ms beyond plain decoding's 10 ms, at 3 % of 69 %, come every 20 steps.

    69 % is what good acceptance would gain: 2.71 / 16 over 1 / 10. The second step is the one
    until the next word comes.
    """
    made, stats = policy(), known(0.1)
    session, ran, probes = Session(), 0, 0
    for seed in range(400):
        choice, session = made.select(AT, stats, session, random.Random(seed))
        if choice.gamma:
            assert choice.explored
            probes += 1
        ran += choice.hold_steps
        session = session.after_steps(ROWS, choice.hold_steps)
    assert 15 <= ran / probes <= 30


def test_no_probe_where_even_good_acceptance_would_not_pay() -> None:
    """Where a draft doubles the step, 1.9 tokens at best do not pay, and none is tried."""
    stats = known(0.1)
    slow = {
        name: sums._replace(
            values=(sums.values[0], 2.2 * sums.values[1], *sums.values[2:6], *sums.values[6:])
        )
        if name.startswith("model_guided/time/") and not name.endswith("/0")
        else sums
        for name, sums in stats.own.items()
    }
    patient = Memory(since_draft=1e6)
    answers = choices(stats._replace(own=slow), AT, Session(0, {0: patient}))
    assert {answer.gamma for answer in answers} == {0}


def test_it_comes_back_from_gamma_0_when_drafts_begin_to_be_accepted() -> None:
    """Hostile prompts for long, then friendly ones: within 300 steps it speculates again."""
    made, rng, stats, session = policy(), random.Random(3), known(0.1), Session()
    ran = 0
    while ran < 300:
        choice, session = made.select(AT, stats, session, rng)
        steps, gamma = choice.hold_steps, choice.gamma
        reached = (ROWS * steps,) * gamma
        emitted = ROWS * steps * (1 + gamma)
        outcome = Outcome(
            steps,
            steps,
            STEP_MS[gamma] * 1000 * steps,
            emitted,
            ROWS * steps,
            emitted,
            reached=reached,
            accepted=reached,
        )
        stats = stats.plus(made.update(stats, AT, gamma, outcome))
        session = session.after_steps(ROWS, steps)
        ran += steps
    assert choice.exploit_gamma == 2


def test_a_foreign_memory_that_is_not_ours_counts_as_none() -> None:
    """Numbers out of range or too few are dropped; ours are kept."""
    made, ours = policy(), tuple(Memory(since_draft=3.0, on_steps=100.0, on_runs=2.0, left=5.0))
    for numbers in (
        (),
        (1.0,),
        (-1.0, *ours[1:]),
        (1e12, *ours[1:]),
        (*ours[:5], 0.5, 1.0),
        (*ours[:6], 2.0),
    ):
        session = Session(0, {0: numbers}, foreign=True)
        _, after = made.select(AT, known(0.1), session, random.Random(0))
        assert after.numbers[0][0] <= 1e9
    kept = Session(0, {0: ours}, foreign=True)
    assert made.select(AT, known(0.1), kept, random.Random(0))[1].numbers[0] == ours


def test_a_trial_that_cannot_run_any_more_is_drawn_anew() -> None:
    """What is answered then, and its propensity, are those of a draw among what can run."""
    made, stats = policy(), known(0.7, steps=4)
    trial = Memory(left=2.0, trial=2.0, propensity=0.004)
    less = AT._replace(feasible_max_gamma=1)
    for seed in range(40):
        answer, _ = made.select(less, stats, Session(1, {0: trial}), random.Random(seed))
        assert answer.gamma <= 1
        assert answer.propensity >= (DOUBT_SHARE if answer.explored else 0.7)


def test_a_gamma_that_never_ran_at_such_a_batch_size_is_tried_whatever_the_model_says() -> None:
    """Gamma 0, expected to be far worse, gets its share of decisions until it was measured."""
    stats = known(0.95, gammas=(1, 2))
    answers = choices(stats, AT, Session(1), 1000)
    tried = sum(answer.gamma == 0 for answer in answers)
    assert {answer.propensity for answer in answers if answer.gamma == 0} == {UNMEASURED_SHARE}
    assert tried / 1000 == pytest.approx(UNMEASURED_SHARE, abs=0.04)


def test_a_trial_far_behind_catches_up_by_the_cheapest_drafts() -> None:
    """With 10,000 stale tokens a trial of gamma 2 begins with gamma 1, and is still the trial."""
    made, far = policy(), AT._replace(sum_stale_tokens=10_000)
    trial = Session(0, {0: Memory(left=12.0, trial=2.0, propensity=0.1)})
    choice, after = made.select(far, known(0.1), trial, random.Random(0))
    assert (choice.gamma, choice.explored, choice.propensity) == (1, True, 0.1)
    assert choice.hold_steps <= 10
    near, _ = made.select(AT, known(0.1), after, random.Random(0))
    assert near.gamma == 2


def test_no_trial_that_costs_more_than_is_expected_of_knowing() -> None:
    """What gamma 2 takes is tried where that costs a few steps; 2000 steps behind, one probes."""
    stats = known(0.15, gammas=(0, 1))
    stats = stats._replace(own={n: s for n, s in stats.own.items() if not n.endswith("/1")})
    patient = Session(0, {0: Memory(since_draft=1e6, on_steps=4000.0)})
    for behind, tried in ((0, (2, EXPERIMENT_STEPS)), (2_000_000, (1, PROBE_STEPS))):
        answers = choices(stats, AT._replace(sum_stale_tokens=behind), patient, 40)
        assert {(answer.gamma, answer.hold_steps) for answer in answers} == {tried}


def test_without_any_gamma_plain_decoding_runs_on() -> None:
    """A policy that may not speculate says so, whatever the draft lacks."""
    made = policy(gamma_max="0")
    choice, _ = made.select(
        AT._replace(sum_stale_tokens=5000), NOTHING, Session(), random.Random(0)
    )
    assert (choice.gamma, choice.explored) == (0, False)
