"""What holds for every policy that can be activated, whatever it is asked and taught."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import Any, NamedTuple

import pytest

from nightjar.errors import InvalidRequest
from planner_service.context import MAX_GAMMA, MAX_SUM, Context, Outcome
from planner_service.own_sums import OwnSums
from planner_service.policies import BUILT_IN
from planner_service.policies.policy import (
    Choice,
    Parameter,
    Policy,
    check_choice,
    check_table,
)
from planner_service.session import MAX_BUCKETS, MAX_NUMBERS, Session, pack, unpack
from planner_service.sums import NOTHING, Stats, Totals, from_fields
from planner_service.trial import try_out

every_policy = pytest.mark.parametrize("name", BUILT_IN)
SEEDS = range(12)
MAX_BATCH_SIZE = 24
MAX_STEPS = 24  # of a stream


class Step(NamedTuple):
    """A question, and steps that ran after it."""

    context: Context
    gamma: int  # that ran; the one answered if it is larger
    outcome: Outcome
    moves: bool  # to another replica, after the answer


class Event(NamedTuple):
    """A step of a stream as it went."""

    context: Context
    gamma: int  # that ran
    outcome: Outcome
    stats: Stats  # that were known
    learned: Stats
    session: Session  # after the answer


def made(name: str, **parameters: str) -> Policy:
    """A policy with some parameters."""
    return BUILT_IN[name].build(parameters)[0]


def outcome(rng: random.Random) -> Outcome:
    """Sums that pass the check at the wire, now and then the largest."""

    def some(most: int) -> int:
        return rng.choice([0, 1, MAX_SUM]) if rng.random() < 0.1 else rng.randint(0, most)

    steps = rng.randint(1, 40)
    timed = rng.choice([0, steps, rng.randint(0, steps)])
    rows = rng.randint(timed, timed * MAX_BATCH_SIZE)
    emitted = rng.randint(0, rows)
    reached = [some(1000) for _ in range(rng.randint(0, MAX_GAMMA))]
    made = Outcome(
        steps,
        timed,
        max(1, some(10**6)) if timed else 0,
        emitted,
        rows,
        emitted + rng.randint(0, 100),
        some(1000),
        some(10**5),
        some(1000),
        some(10**5),
        tuple(reached),
        tuple([rng.randint(0, n) for n in reached]),
        rng.randint(0, steps),
        some(10**6) if timed < steps else 0,
        rng.choice([None, 1.0, 1e-300, 1 - rng.random()]),
    )
    made.check("outcome", MAX_GAMMA)
    return made


def stream(rng: random.Random) -> list[Step]:
    """What one worker asks and reports."""
    max_gamma = rng.choice([MAX_GAMMA, 5, rng.randint(0, MAX_GAMMA)])
    steps = []
    for _ in range(rng.randint(1, MAX_STEPS)):
        context = Context(
            batch_size=rng.randint(0, rng.choice([3, MAX_BATCH_SIZE, MAX_BATCH_SIZE + 9])),
            num_kv_tokens=rng.choice([0, 2**62, rng.randint(0, 10**5)]),
            num_prefill_tokens=rng.randint(0, 100),
            num_waiting=rng.randint(0, 9),
            sum_stale_tokens=rng.choice([0, MAX_SUM, rng.randint(0, 3000)]),
            max_stale_tokens=rng.randint(0, 3000),
            feasible_max_gamma=rng.choice([0, max_gamma, rng.randint(0, max_gamma)]),
            max_gamma=max_gamma,
            max_batch_size=MAX_BATCH_SIZE,
        )
        context.check("context")
        steps.append(Step(context, rng.randint(0, MAX_GAMMA), outcome(rng), rng.random() < 0.2))
    return steps


def problem(choice: Choice, context: Context) -> str:
    """What is wrong with an answer; empty if nothing is."""
    wrong = check_choice(choice, context) or check_table(choice.table, context.max_gamma)
    if not wrong and choice.grid is not None and choice.table:
        wrong = "" if max(choice.table) < choice.grid.num_buckets else "a row beyond the grid"
    return wrong


def followed(name: str, seed: int) -> Iterator[Event]:
    """Ask and teach as a worker does."""
    rng = random.Random(seed)
    policy, stats, session = made(name), NOTHING, Session()
    for context, largest, outcome, moves in stream(rng):
        choice, session = policy.select(context, stats, session, rng)
        assert problem(choice, context) == ""
        if moves:  # to a replica that has seen nothing
            packed = pack(session, f"1-{name}", context.bucket, choice.hold_steps)
            policy, session = made(name), unpack(packed, f"1-{name}")
        gamma = min(largest, choice.gamma)
        learned = policy.update(stats, context, gamma, outcome)
        yield Event(context, gamma, outcome, stats, learned, session)
        stats = stats.plus(learned)
        if context.feasible_max_gamma > 0:
            session = session.after_steps(context.bucket, outcome.num_steps)


def numbers_in(stats: Stats) -> list[float]:
    """Every number that would be stored."""
    return [float(text) for texts in stats.fields().values() for text in texts.split(" ")]


@every_policy
def test_answers_are_feasible_and_all_that_is_kept_is_finite(name: str) -> None:
    """Whatever was asked and taught before, also by way of another replica."""
    for seed in SEEDS:
        for event in followed(name, seed):
            assert event.learned is not event.stats or event.learned is NOTHING
            assert all(math.isfinite(number) for number in numbers_in(event.learned))
            rows = event.session.numbers
            assert all(math.isfinite(number) for row in rows.values() for number in row)
            assert all(len(row) <= MAX_NUMBERS for row in rows.values())
            assert len(rows) <= MAX_BUCKETS


@every_policy
def test_what_is_learned_depends_on_clocks_alone(name: str) -> None:
    """Of what an additive policy knows, its update reads how much ran, and nothing it learned."""
    if not BUILT_IN[name].additive:
        pytest.skip("keeps what the last writer wrote, and says so")
    for seed in SEEDS:
        for event in followed(name, seed):
            totals = Totals(steps=event.stats.totals.steps)
            clock = Stats(totals=totals, reached=event.stats.reached)  # steps, and rows drafted for
            again = made(name).update(clock, event.context, event.gamma, event.outcome)
            assert again.fields() == event.learned.fields()
            assert not again.latest


@every_policy
def test_what_is_learned_adds_up_in_any_order_and_grouping(name: str) -> None:
    """One replica that learned all equals two that learned parts, merged, through the store."""
    for seed in SEEDS:
        rng = random.Random(-1 - seed)
        learned = [event.learned._replace(latest={}) for event in followed(name, seed)]
        whole, parts, size = NOTHING, [NOTHING, NOTHING], Counter[str]()
        for added in learned:
            whole = whole.plus(added)
            for field, text in added.fields().items():
                size[field] += max(abs(float(number)) for number in text.split(" "))
        for added in rng.sample(learned, len(learned)):
            part = rng.randrange(2)
            parts[part] = parts[part].plus(stored(added))
        for merged in (parts[0].plus(parts[1]), parts[1].plus(parts[0])):
            one, other = merged.fields(), whole.fields()
            for field in one.keys() | other.keys():
                numbers, expected = (vector(each.get(field, "0")) for each in (one, other))
                padded = zip_longest(numbers, expected, fillvalue=0.0)
                assert all(abs(x - y) <= 1e-9 * size[field] for x, y in padded), field


def vector(text: str) -> list[float]:
    """Numbers of a stored text."""
    return [float(number) for number in text.split(" ")]


def stored(stats: Stats) -> Stats:
    """What the store gives back."""
    again, num_unknown = from_fields(stats.fields().items())
    assert num_unknown == 0
    assert again.fields() == stats.fields()
    assert (again.own, again.latest) == (stats.own, stats.latest)
    return again


@every_policy
def test_state_comes_back_from_the_store_as_it_was(name: str) -> None:
    """All that was learned survives the codec, and a policy decides from what came back."""
    for seed in SEEDS:
        for event in followed(name, seed):
            known = stored(event.stats.plus(event.learned))
        choice, _ = made(name).select(event.context, known, event.session, random.Random(seed))
        assert problem(choice, event.context) == ""


@every_policy
def test_nothing_given_is_changed_and_a_seed_gives_the_same_answers(name: str) -> None:
    """A policy that has decided before answers and learns as one that was just made."""
    for seed in SEEDS:
        policy, stats, session = made(name), NOTHING, Session()
        for context, largest, outcome, _ in stream(random.Random(seed)):
            before = repr((stats, session, context, outcome))
            choice, after = policy.select(context, stats, session, random.Random(seed))
            gamma = min(largest, choice.gamma)
            learned = policy.update(stats, context, gamma, outcome)
            assert repr((stats, session, context, outcome)) == before
            fresh = made(name)
            again = fresh.select(context, stats, session, random.Random(seed))
            assert (choice, after) == again
            assert fresh.update(stats, context, gamma, outcome).fields() == learned.fields()
            stats, session = stats.plus(learned), after
            session = session.after_steps(context.bucket, outcome.num_steps)


def garbage(rng: random.Random) -> tuple[float, ...]:
    """Numbers that a session's bytes may hold."""
    kinds: list[Callable[[], float]] = [
        lambda: rng.randint(-1, 9),
        lambda: rng.randint(-(10**15), 10**15),
        lambda: rng.uniform(-1e15, 1e15),
        rng.random,
    ]
    likely = rng.choice([kinds, kinds[:1], kinds[:1] + kinds[3:]])
    return tuple([rng.choice(likely)() for _ in range(rng.randint(0, MAX_NUMBERS))])


@every_policy
def test_a_session_of_garbage_is_no_matter(name: str) -> None:
    """Numbers that came back from outside make no error and no answer out of range."""
    known = learned_stats(name)
    for seed in range(10 * len(SEEDS)):
        rng = random.Random(seed)
        context = stream(rng)[0].context
        buckets = (0, context.bucket, rng.randint(0, MAX_BATCH_SIZE))
        rows = {bucket: garbage(rng) for bucket in buckets}
        packed = pack(Session(rng.randint(0, MAX_GAMMA), rows), "v", context.bucket, 7)
        session, policy = unpack(packed, "v"), made(name)
        for stats in (NOTHING, known, known):
            choice, session = policy.select(context, stats, session, rng)
            assert problem(choice, context) == ""


@every_policy
def test_a_store_of_garbage_is_no_matter(name: str) -> None:
    """Own sums and latest values of any length and size, as a torn store could hold them."""
    policy = made(name)
    for seed in SEEDS:
        rng = random.Random(-1 - seed)

        def torn(known: tuple[float, ...], rng: random.Random = rng) -> tuple[float, ...]:
            values = garbage(rng) or (-1.0,)
            kept = [rng.choice([value, *values, 1e299, -1e299, 0.0]) for value in known]
            return rng.choice([known, values, tuple(kept), tuple(kept[:-1]) or (0.0,)])

        for event in followed(name, seed):
            stats = event.stats.plus(event.learned)
            own = {
                key: OwnSums(torn(sums.values), sums.half_life, rng.choice([0.0, sums.at, 1e299]))
                for key, sums in stats.own.items()
            }
            latest = {key: torn(values) for key, values in stats.latest.items()}
            fields = stats._replace(own=own, latest=latest).fields()
            read, _ = from_fields(fields.items())
            choice, _ = policy.select(event.context, read, event.session, rng)
            assert problem(choice, event.context) == ""
            again = policy.update(read, event.context, choice.gamma, event.outcome)
            assert all(math.isfinite(number) for number in numbers_in(again))


def learned_stats(name: str) -> Stats:
    """What a policy has after each gamma ran at three batch sizes; gamma 2 is the fastest."""
    policy, stats = made(name), NOTHING
    for batch_size in (1, 4, 16):
        context = Context(
            batch_size, num_kv_tokens=300 * batch_size, max_gamma=5, feasible_max_gamma=5
        )
        for gamma in range(6):
            rows, us = 40 * batch_size, 40 * (9_000 + 900 * gamma + 50 * batch_size * gamma)
            emitted = round(rows * (1 + min(gamma, 2) * 0.6))
            positions = tuple(rows >> i for i in range(gamma))
            outcome = Outcome(
                40, 40, us, emitted, rows, emitted, reached=positions, accepted=positions
            )
            outcome = outcome._replace(propensity=0.5)
            stats = stats.plus(policy.update(stats, context, gamma, outcome))
    return stats


@every_policy
@pytest.mark.parametrize("feasible", [5, 2])
def test_a_propensity_is_the_share_of_draws(name: str, feasible: int) -> None:
    """Of 1500 seeds as many answer a gamma as its propensity says, within five deviations."""
    policy, num_draws = made(name), 1500
    context = Context(4, num_kv_tokens=1200, max_gamma=5, feasible_max_gamma=feasible)
    for stats in (NOTHING, learned_stats(name)):
        said = dict[int, float]()
        answers = Counter[int]()
        for seed in range(num_draws):
            choice, _ = policy.select(context, stats, Session(), random.Random(seed))
            assert said.setdefault(choice.gamma, choice.propensity) == choice.propensity
            answers[choice.gamma] += 1
        for gamma, propensity in said.items():
            deviation = math.sqrt(propensity * (1 - propensity) / num_draws)
            assert abs(answers[gamma] / num_draws - propensity) <= 5 * deviation + 1e-9
        assert sum(said.values()) <= 1 + 1e-9


def settings_of(parameter: Parameter) -> set[str]:
    """Values at the ends of what a parameter takes."""
    values: list[Any] = [parameter.default, *parameter.choices]
    values += [end for end in (parameter.minimum, parameter.maximum) if math.isfinite(end)]
    if parameter.kind == "int":
        values = [int(value) for value in values]
    return {str(value) for value in values}


@every_policy
def test_parameters_work_at_their_limits(name: str) -> None:
    """Defaults, minima, maxima and choices parse, build, and pass the trial of an activation."""
    spec = BUILT_IN[name]
    assert spec.name == name
    assert spec.summary.endswith(".")
    known = learned_stats(name)
    policy, defaults = spec.build({})
    assert try_out(policy, [known]) == ""
    for parameter in spec.parameters:
        assert parameter.help
        assert parameter.parse(defaults[parameter.name]) == parameter.default
        for text in settings_of(parameter) - {defaults[parameter.name]}:
            try:
                changed, values = spec.build({parameter.name: text})
            except InvalidRequest as error:  # it needs another parameter beside it
                if error.field == f"parameters.{parameter.name}":
                    raise
                continue
            assert parameter.parse(values[parameter.name]) == parameter.parse(text)
            assert try_out(changed, []) == ""
            step = Context(4, max_gamma=5, feasible_max_gamma=5)
            choice, _ = changed.select(step, known, Session(), random.Random(0))
            assert problem(choice, step) == ""
