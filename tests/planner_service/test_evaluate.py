"""Off-line estimates against logs whose truth is known."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
from synthetic_log import (
    Drawing,
    Law,
    always,
    as_lines,
    logged,
    mixed,
    skewed,
    truth,
)

from nightjar.errors import InvalidRequest, NightjarError
from planner_service.bins import Arm, Bin, Drawn, Heard, Log, parse, put_together
from planner_service.context import Context, Outcome
from planner_service.evaluate import Evaluation, Row, Value, evaluate
from planner_service.policies import BUILT_IN
from planner_service.policies.policy import Choice, Policy
from planner_service.replay import Replay
from planner_service.session import Session
from planner_service.sums import Stats

SIZES = {"batch 1": (1,), "batch 2": (2,), "batch 3-4": (3, 4), "batch 5-8": (6, 8)}
NUM_SEEDS = 40


def fixed(gamma: int) -> Policy:
    """Policy `fixed`."""
    return BUILT_IN["fixed"].build({"gamma": str(gamma)})[0]


def estimated(log: Log, policy: Policy, seed: int = 0, min_ess: float = 5) -> Evaluation:
    """Estimates of a policy from a log."""
    return evaluate(log.bins, Replay(policy, seed).run(log.events), min_ess=min_ess)


def overall(found: Evaluation) -> Row:
    """The estimate over all buckets."""
    assert not found.refused
    assert found.overall is not None
    return found.overall


class _Errors(NamedTuple):
    """Of one estimator over seeds, as shares of the truth."""

    errors: list[float]
    covered: list[bool]

    def add(self, value: Value, true: float) -> None:
        self.errors.append(value.tokens_per_s / true - 1)
        self.covered.append(value.low <= true <= value.high)

    @property
    def rms(self) -> float:
        return float(np.sqrt(np.mean(np.square(self.errors))))


@pytest.mark.parametrize(
    ("make", "law", "less_variance"),
    [(lambda: fixed(3), always(3), 1.1), (lambda: Drawing(mixed), mixed, 0.8)],
    ids=["deterministic", "stochastic"],
)
def test_intervals_hold_the_truth_about_as_often_as_they_say(
    make: Callable[[], Policy], law: Law, less_variance: float
) -> None:
    """Over 40 logs of a skewed policy: both beat the plain average, and the model helps.

    It helps where arms differ. Where one arm alone has weight, in buckets of one batch size,
    there is next to nothing left for it to explain.
    """
    snips, robust, naive = (_Errors([], []) for _ in range(3))
    in_buckets = list[bool]()
    for seed in range(NUM_SEEDS):
        log = put_together(logged(skewed, 600, seed))
        found = estimated(log, make(), seed)
        row = overall(found)
        true = truth(law, {SIZES[bucket.name]: bucket.num_steps for bucket in found.buckets})
        snips.add(row.snips, true)
        robust.add(row.doubly_robust, true)
        # What the logged arms gave, each as often as the policy would draw it there.
        rates = [
            (sum(b.tokens for b in some) / sum(b.seconds for b in some), sum(map(share, some)))
            for gamma in range(4)
            if (some := [b for b in log.bins if b.drawn.arm.gamma == gamma])
            for share in [lambda b, gamma=gamma: law(b.drawn.context.batch_size)[gamma]]
        ]
        average = sum(rate * weight for rate, weight in rates) / sum(w for _, w in rates)
        naive.add(Value(average, average, average), true)
        for bucket in found.buckets:
            its = truth(law, {SIZES[bucket.name]: 1})
            in_buckets += [v.low <= its <= v.high for v in (bucket.snips, bucket.doubly_robust)]
    assert sum(snips.covered) >= 35
    assert sum(robust.covered) >= 35
    assert 0.91 <= np.mean(in_buckets) <= 0.99
    assert max(snips.rms, robust.rms) < 0.6 * naive.rms
    assert np.var(robust.errors) < less_variance * np.var(snips.errors)


def test_the_logging_policy_is_worth_what_it_gave() -> None:
    """All weights are 1 then: SNIPS is its own mean, the other one nearly, both within 1 %."""
    log = put_together(logged(skewed, 400, 7))
    row = overall(estimated(log, Drawing(skewed)))
    assert tuple(row.snips) == pytest.approx(tuple(row.logged), rel=1e-3)
    assert row.doubly_robust.tokens_per_s == pytest.approx(row.logged.tokens_per_s, rel=0.01)
    assert row.effective_sample_size == pytest.approx(400, rel=1e-3)
    assert row.mean_weight == pytest.approx(1, abs=1e-3)
    bins = log.bins
    own = sum(b.tokens for b in bins) / sum(b.seconds for b in bins)
    assert row.logged.tokens_per_s == pytest.approx(own)


def test_estimates_do_not_depend_on_luck() -> None:
    """The same log, policy and seed give the same numbers."""
    log = put_together(logged(skewed, 300, 3))
    assert estimated(log, Drawing(mixed), 5) == estimated(log, Drawing(mixed), 5)


def never_two(batch_size: int) -> list[float]:
    """A law that never drafts 2 tokens for more than two rows."""
    return [0.25] * 4 if batch_size <= 2 else [0.4, 0.3, 0.0, 0.3]


def test_absent_overlap_is_refused_by_bucket() -> None:
    """Buckets without the policy's arm are named with the arm; the others keep their estimates."""
    log = put_together(logged(never_two, 600, 0))
    found = estimated(log, fixed(2))
    assert [refusal.name for refusal in found.refused] == ["batch 3-4", "batch 5-8"]
    assert all("never drew: gamma 2 in 100%" in refusal.reason for refusal in found.refused)
    assert [row.name for row in found.buckets] == ["batch 1", "batch 2"]
    assert found.overall is not None
    shares = [refusal.share for refusal in found.refused]
    assert found.overall.share + sum(shares) == pytest.approx(1)
    assert found.overall.num_bins == sum(row.num_bins for row in found.buckets)
    true = truth(always(2), {SIZES[row.name]: row.num_steps for row in found.buckets})
    assert found.overall.doubly_robust.low <= true <= found.overall.doubly_robust.high
    nowhere = estimated(log, fixed(2), min_ess=1e9)
    assert (nowhere.overall, nowhere.buckets, len(nowhere.refused)) == (None, (), 4)
    assert "effective sample size" in nowhere.refused[0].reason


def certain(batch_size: int) -> list[float]:
    """A law without any chance: an arm by the batch size."""
    return [1.0, 0.0, 0.0, 0.0] if batch_size in (3, 6) else [0.0, 0.0, 0.0, 1.0]


def test_a_log_without_chance_supports_no_other_policy() -> None:
    """Both arms are in the bucket, yet neither could have been drawn where the other was."""
    found = estimated(put_together(logged(certain, 600, 0)), fixed(3))
    assert [refusal.name for refusal in found.refused] == ["batch 3-4", "batch 5-8"]
    assert all("could have drawn" in refusal.reason for refusal in found.refused)
    assert overall(estimated(put_together(logged(certain, 600, 0)), Drawing(certain)))


# ---- bins ------------------------------------------------------------------------------------


def drawn(number: int, **fields: object) -> Drawn:
    """A decision for two rows."""
    line = Drawn(
        at_ms=10 * number,
        profile_key="p",
        worker_id="w",
        decision_id=f"d-{number}",
        version="1-log",
        bucket=2,
        arm=Arm(2),
        explored=False,
        propensity=0.5,
        hold_steps=4,
        grid=None,
        context=Context(2, 100),
    )
    return line._replace(**fields)  # type: ignore[arg-type]


def heard(number: int, steps: int = 4, batch_size: int = 2, **sums: int) -> Heard:
    """A report of steps of 10 ms that emitted 3 tokens each."""
    outcome = Outcome(
        steps, steps, steps * 10_000, 3 * steps, batch_size * steps, 3 * steps
    )._replace(**sums)
    at_ms = 10 * number + 5
    return Heard(at_ms, "p", "w", f"d-{number}", 2, Context(batch_size, 100), outcome)


def test_steps_go_to_the_bin_that_they_were_drawn_for() -> None:
    """What ran elsewhere is left out, counted by its reason, and never lost."""
    log = put_together(
        [
            drawn(1),
            heard(1, 3),
            heard(1, 1, batch_size=3),
            heard(9, 2),
            heard(2)._replace(decision_id="", at_ms=16),
            drawn(3, decision_id="d-3-probe", arm=Arm(0), propensity=1.0),
            heard(3, 8)._replace(decision_id="d-3-probe"),
            drawn(4, context=Context(2, feasible_max_gamma=0), arm=Arm(0), propensity=1.0),
            heard(4, 5),
            drawn(5, propensity=0.25),
            heard(5, 7, num_timed_steps=0, step_us=0, num_timed_emitted=0, num_timed_rows=0),
            drawn(6, propensity=0.3),
        ]
    )
    (only,) = log.bins
    assert (only.num_timed_steps, only.tokens, only.seconds) == (3, 9, pytest.approx(0.03))
    assert log.num_steps == 30
    assert sorted(log.steps_left_out.values()) == [1, 2, 4, 8]
    assert sum(isinstance(event, Bin) for event in log.events) == 5


def test_a_decision_for_the_rest_of_a_bin_is_the_same_draw() -> None:
    """Another arm, propensity, bucket or version is another draw; certainty is never shared."""
    rest = [drawn(1), drawn(2, hold_steps=2), drawn(3, propensity=0.4), drawn(4, arm=Arm(1))]
    others = [drawn(5, bucket=3), drawn(6, version="2-log"), drawn(7, worker_id="v")]
    sure = [drawn(8, propensity=1.0, bucket=7), drawn(9, propensity=1.0, bucket=7)]
    log = put_together([*rest, *others, *sure])
    draws = [event.draw for event in log.events if isinstance(event, Bin)]
    assert draws[0] == draws[1]
    assert len(set(draws)) == len(draws) - 1


def test_catch_up_and_the_drafts_prefill_are_paid_by_the_timed_share() -> None:
    """Half of the steps were timed: half of the catch-up counts; gamma 0 prefills no draft."""
    sums = {
        "catch_up_us": 4_000,
        "draft_prefill_us": 2_000,
        "num_timed_steps": 2,
        "step_us": 20_000,
    }
    for gamma, seconds in ((2, 0.023), (0, 0.022)):
        log = put_together([drawn(1, arm=Arm(gamma)), heard(1, **sums)])
        assert log.bins[0].seconds == pytest.approx(seconds)


def test_a_file_given_twice_is_refused() -> None:
    """Its reports would count twice."""
    with pytest.raises(InvalidRequest, match="d-1 is there twice"):
        put_together([drawn(1), drawn(1)])


def test_lines_survive_the_file() -> None:
    """What is written is what is read."""
    lines = logged(skewed, 20, 0)
    assert [parse(text) for text in as_lines(lines)] == lines


BAD_LINES = [
    ("", "is no JSON"),
    ("[1]", "is no object"),
    ("[" * 100_000, "is no JSON"),
    ('{"kind": "deci', "is no JSON"),
    ('{"kind": "other"}', "neither"),
    ('{"kind": "report"}', "is missing"),
    *(
        (f'{{"kind": "decision", {text}}}', words)
        for text, words in (
            ('"context": 3', "context: must be an object"),
            ('"context": {}', "batch_size is missing"),
            ('"context": {"batch_size": true}', "context.batch_size: must be a whole number"),
            ('"context": {"batch_size": -1}', "context.batch_size: must lie in"),
            ('"context": {"batch_size": 1e400}', "context.batch_size: must be a whole number"),
            ('"context": {"batch_size": 1, "cpu_utilization": NaN}', "must be finite"),
            (f'"context": {{"batch_size": 1, "num_kv_tokens": {"9" * 400}}}', "too large"),
            ('"context": {"batch_size": 1}', "at_ms is missing"),
        )
    ),
]


@pytest.mark.parametrize(("text", "words"), BAD_LINES)
def test_a_bad_line_says_what_is_wrong(text: str, words: str) -> None:
    """No line makes the reader fail in another way."""
    with pytest.raises(ValueError, match=words):
        parse(text)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("propensity", 0, "propensity: must lie in"),
        ("propensity", "0.5", "propensity: must be a number"),
        ("propensity", 1.1, "propensity: must lie in"),
        ("gamma", 9, "gamma: must lie in"),
        ("hold_steps", 0, "hold_steps: must lie in"),
        ("explored", 1, "explored: must be true or false"),
        ("grid", [[1]], "grid: must be two lists"),
        ("decision_id", "a\nb", "decision_id: must hold printable"),
        ("worker", None, "worker: must be text"),
    ],
)
def test_a_decision_that_cannot_be_is_refused(field: str, value: object, words: str) -> None:
    """Every field is checked."""
    (line,) = as_lines(logged(skewed, 1, 0)[:1], **{field: value})
    with pytest.raises(ValueError, match=words):
        parse(line)


# ---- replay ----------------------------------------------------------------------------------


def test_probabilities_are_those_of_the_law() -> None:
    """Of the logged arm exactly; what no draw showed is small and goes to the other arms."""
    log = put_together(logged(skewed, 300, 0))
    replay = Replay(Drawing(mixed), 0)
    for bin_, found in replay.run(log.events).items():
        law = mixed(bin_.drawn.context.batch_size)
        assert sum(found.values()) == pytest.approx(1)
        assert all(abs(share - law[arm.gamma]) < 0.11 for arm, share in found.items())
    assert sum(replay.unseen.values()) / len(log.bins) < 0.02


def test_the_papers_bandit_replayed_over_its_own_log_draws_as_it_did() -> None:
    """It learns what the logging one learned: each logged arm has its logged propensity."""
    policy, rng = BUILT_IN["nightjar"].build({"gamma_max": "3"})[0], random.Random(1)
    lines, stats, session = list[Drawn | Heard](), Stats(), Session()
    for number in range(600):
        size = rng.choice((1, 2, 5))
        context = Context(size, max_gamma=3, feasible_max_gamma=3)
        choice, session = policy.select(context, stats, session, rng)
        line = drawn(
            number,
            bucket=size,
            arm=Arm(choice.gamma),
            explored=choice.explored,
            propensity=choice.propensity,
            hold_steps=choice.hold_steps,
            context=context,
        )
        steps = rng.randint(1, choice.hold_steps)  # at times it is asked again within a bin
        ran = heard(number, steps, size)._replace(gamma=choice.gamma, context=context)
        lines += [line, ran]
        outcome = ran.outcome._replace(propensity=choice.propensity)
        stats = stats.plus(policy.update(stats, context, choice.gamma, outcome))
        session = session.after_steps(size, steps)
    log = put_together(lines)
    found = Replay(policy, 3).run(log.events)
    wrong = [
        b for b in log.bins if found[b][b.drawn.arm] != pytest.approx(b.drawn.propensity, rel=1e-6)
    ]
    assert not wrong
    assert len({bin_.draw for bin_ in log.bins}) < 600


class Failing(Drawing):
    """A policy that is no policy."""

    def select(
        self, context: Context, stats: Stats, session: Session, rng: random.Random
    ) -> tuple[Choice, Session]:
        """Answer out of range."""
        choice, session = super().select(context, stats, session, rng)
        return choice._replace(gamma=99), session


def test_a_policy_that_fails_in_replay_ends_it_with_a_sentence() -> None:
    """Not with a number."""
    with pytest.raises(NightjarError, match=r"the policy failed in .* gamma 99"):
        estimated(put_together(logged(skewed, 10, 0)), Failing(mixed))
