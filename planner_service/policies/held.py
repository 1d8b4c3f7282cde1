"""An arm that a stream holds for some steps, and how its draw is answered and remembered.

A policy says which gamma it takes for the best, and how it draws; the rest is the same for all
that hold an arm for a number of steps.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, cast

from planner_service.context import Context
from planner_service.policies.policy import IDLE_HOLD_STEPS, Choice, Parameter
from planner_service.session import MAX_HOLD, Numbers, Session

MAX_HOLD_STEPS = 4096


def hold_steps(default: int = 8) -> Parameter:
    """The parameter that says how often an arm is drawn."""
    return Parameter(
        name="hold_steps",
        kind="int",
        default=default,
        minimum=1,
        maximum=MAX_HOLD_STEPS,
        help="steps that a drawn gamma is held for",
    )


def half_life_of(value: float | str) -> float:
    """Steps of the parameter `half_life`, of which 0 stands for no forgetting."""
    return float(value) or float("inf")


HALF_LIFE = Parameter(
    name="half_life",
    kind="float",
    default=0.0,
    minimum=0.0,
    maximum=1e9,
    help="steps of the profile after which a step counts half; 0: nothing is forgotten",
)


class Drawn(NamedTuple):
    """An arm, and the probability with which it was drawn given all that was known."""

    arm: int
    explored: bool
    propensity: float = 1.0


# The best gamma of [0, largest], and what draws an arm of [0, its argument].
Prepared = tuple[int, Callable[[int], Drawn]]


class Held(NamedTuple):
    """The arm of a stream at one batch size."""

    arm: int
    exploit: int  # best over all gammas when it was drawn
    left: int  # steps that the arm is still held for; 0: it is drawn anew
    explored: int
    propensity: float

    @classmethod
    def read(cls, numbers: Numbers, largest: int) -> Held | None:
        """A held arm from foreign numbers; None unless it is one that we could have written."""
        if len(numbers) != len(cls._fields) or any(type(n) is not int for n in numbers[:4]):
            return None
        found = cls(*cast(tuple[int, int, int, int, float], numbers))
        in_range = 0 <= found.arm <= largest and 0 <= found.exploit <= largest
        fits = 0 <= found.left <= MAX_HOLD and found.explored in (0, 1)
        return found if in_range and fits and 0 < found.propensity <= 1 else None

    def after(self, num_steps: int) -> Held:
        """What is held once steps ran; those past its end ran while the answer was on its way."""
        left = self.left - num_steps
        return Held(self.arm, self.exploit, max(left, 0), self.explored, self.propensity)


def hold_or_draw(
    context: Context,
    session: Session,
    *,
    largest: int,
    hold_steps: int,
    prepare: Callable[[], Prepared],
) -> tuple[Choice, Session]:
    """Answer with the arm that is held at this batch size, as it was drawn, or with a new one.

    An arm that cannot run any more is drawn anew, so that the propensity is always that of the
    arm that is answered. The table has a row for each batch size that the stream decided.

    Args:
        context: What is asked about.
        session: Of the stream; its numbers are `Held`.
        largest: Largest gamma of the policy and the worker.
        hold_steps: Steps that a new arm is held for.
        prepare: Called where no arm is held.
    """
    bucket, held = context.bucket, _held(session, largest)
    feasible = min(largest, context.feasible_max_gamma)
    if feasible == 0:
        exploit, table = prepare()[0], _table(held)
        return Choice(0, exploit, IDLE_HOLD_STEPS, False, 1.0, table), Session(0, held)
    now = held.pop(bucket, None)
    if now is None or not now.left or now.arm > feasible:
        exploit, draw = prepare()
        drawn = draw(feasible)
        now = Held(drawn.arm, exploit, hold_steps, int(drawn.explored), drawn.propensity)
    held[bucket] = now  # last in the dict: most recently decided
    arm, exploit, left, explored, propensity = now
    choice = Choice(arm, exploit, left, explored == 1, propensity, _table(held))
    return choice, Session(arm, held)


def hold_or_draw_one(
    context: Context,
    buckets: Iterable[int],
    session: Session,
    *,
    largest: int,
    hold_steps: int,
    prepare: Callable[[], Prepared],
) -> tuple[Choice, Session]:
    """As `hold_or_draw`, with one arm for all batch sizes; the table has a row for `buckets`.

    The arm goes under the batch size that was asked about last, so that a replica that takes
    the stream over counts the steps of its hold.
    """
    bucket = context.bucket
    numbers = list(session.numbers.values())[-1:]
    ran = sum(session.ran.values())
    one = Session(
        session.previous_gamma,
        {bucket: numbers[0]} if numbers else {},
        {bucket: ran},
        session.foreign,
    )
    choice, after = hold_or_draw(
        context, one, largest=largest, hold_steps=hold_steps, prepare=prepare
    )
    row = choice.table.get(bucket, (choice.exploit_gamma, choice.exploit_gamma))
    return choice._replace(table=dict.fromkeys(buckets, row)), after


def epsilon_draw(exploit: int, feasible: int, epsilon: float, rng: random.Random) -> Drawn:
    """Uniform over [0, feasible] with probability `epsilon`, else `exploit`."""
    explored = rng.random() < epsilon
    arm = rng.randrange(feasible + 1) if explored else exploit
    propensity = epsilon / (feasible + 1) + (1 - epsilon if arm == exploit else 0.0)
    return Drawn(arm, explored, min(1.0, propensity))


def draw_from(weights: Sequence[float], rng: random.Random) -> tuple[int, float]:
    """An arm drawn in proportion to its weight, and its probability; one weight is above 0."""
    total = sum(weights)
    left, last = rng.random() * total, -1
    for arm, weight in enumerate(weights):
        if weight <= 0:
            continue
        last, left = arm, left - weight
        if left < 0:
            break
    return last, weights[last] / total


def largest_of(values: Sequence[float]) -> int:
    """Index of the largest value, of equals the last."""
    return len(values) - 1 - values[::-1].index(max(values))


def _table(held: Mapping[int, Held]) -> dict[int, tuple[int, int]]:
    """Rows for what is held, or was."""
    return {
        at: (arm if left else exploit, exploit) for at, (arm, exploit, left, _, _) in held.items()
    }


def _held(session: Session, largest: int) -> dict[int, Held]:
    """The arms of a session, moved on by the steps that ran since."""
    held = cast(dict[int, Held], dict(session.numbers))  # our own, unless foreign
    if session.foreign:
        read = {bucket: Held.read(numbers, largest) for bucket, numbers in held.items()}
        held = {bucket: found for bucket, found in read.items() if found is not None}
    for bucket, num_steps in session.ran.items():
        if bucket in held and num_steps:
            held[bucket] = held[bucket].after(num_steps)
    return held
