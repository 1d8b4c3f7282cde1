"""Policy `q_learning`: the switching cost makes gamma a Markov decision process.

Watkins' Q-learning with epsilon-greedy draws. A state is an octave of batch sizes and a mode:
"ready", or "stale" where the draft's cache lacks tokens emitted at gamma 0. The reward of a step
is its tokens per request and second; catch-up that took as long as c such steps costs c of them:

    reward = tokens / seconds (1 - catch-up seconds / seconds)

where at gamma > 0 the seconds hold the tokens' share of draft prefill, as known so far. A report
of n steps at gamma a in state s then moves

    Q(s, a) <- Q(s, a) + step (target - Q(s, a)),   step = 1 - (1 - step_size)^n
    target  =  (1 - discount) reward + discount max Q(s', .)

(With 1 - discount, Q is in tokens per second whatever the discount.) So leaving gamma 0 pays if it
is worth its catch-up over the next 1 / (1 - discount) steps. At gamma 0 the reward does not depend
on the mode, and both modes learn. At gamma > 0 the steps that caught up are those that left the
stale mode, all others were in the ready one.

What approximates: the batch size is taken to stay in its octave, s' differs from s in mode
alone; the stale mode does not tell few stale tokens from many; steps count alike, however long
they are, and their mean reward stands for tokens over time; catch-up in steps that could not draft
yet, which come without a time, is charged to the octave's next step that leaves the stale mode,
whichever worker's it is. Q values do not add up: of two replicas the last writer's stay.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from planner_service.context import MAX_GAMMA, Context, Outcome
from planner_service.observation import observe
from planner_service.policies.held import (
    Drawn,
    Prepared,
    epsilon_draw,
    hold_or_draw,
    hold_steps,
)
from planner_service.policies.policy import Choice, Parameter, Policy, PolicySpec, gamma_max
from planner_service.session import Session
from planner_service.sums import Stats

NUM_ARMS = MAX_GAMMA + 1
READY, STALE, OWED = 0, NUM_ARMS, 2 * NUM_ARMS  # where each begins; OWED: catch-up seconds
NUM_VALUES = OWED + 1
_MOST = 1e15
_EMPTY = (0.0,) * NUM_VALUES  # a value of 0: never ran


class QLearning(Policy):
    """Learns the value of each gamma in each state."""

    def __init__(
        self, gamma_max: int, hold_steps: int, epsilon: float, step_size: float, discount: float
    ) -> None:
        self._gamma_max = gamma_max
        self._hold_steps = hold_steps
        self._epsilon = epsilon
        self._step_size = step_size
        self._discount = discount
        # Values of another discount or step size are others.
        prefix = f"q_learning/{discount!r}/{step_size!r}"
        self._names = [f"{prefix}/{octave}" for octave in range(16)]

    def select(
        self, context: Context, stats: Stats, session: Session, rng: random.Random
    ) -> tuple[Choice, Session]:
        """Hold the arm, or draw the next one."""
        largest = min(self._gamma_max, context.max_gamma)

        def prepare() -> Prepared:
            stale = session.previous_gamma == 0 and context.sum_stale_tokens > 0
            values = self._nearest(stats, _octave(context.batch_size))

            def best(limit: int) -> int:
                return best_gamma(values, STALE if stale else READY, limit)

            def draw(feasible: int) -> Drawn:
                return epsilon_draw(best(feasible), feasible, self._epsilon, rng)

            return best(largest), draw

        return hold_or_draw(
            context, session, largest=largest, hold_steps=self._hold_steps, prepare=prepare
        )

    def update(self, stats: Stats, context: Context, gamma: int, outcome: Outcome) -> Stats:
        """The common sums, and the octave's values as they are now."""
        learned = observe(context, gamma, outcome)
        name = self._names[_octave(context.batch_size)]
        values = list(_values(stats, name))
        catch_up_s = outcome.catch_up_us / 1e6
        if context.feasible_max_gamma == 0:
            if not catch_up_s:
                return learned
            values[OWED] = min(values[OWED] + catch_up_s, _MOST)
        elif outcome.num_timed_steps:
            self._learn(values, gamma, outcome, stats.draft_prefill_us_per_token)
        else:
            return learned
        return learned._replace(latest={name: tuple(values)})

    def _nearest(self, stats: Stats, octave: int) -> Sequence[float]:
        """Values of the octave, or of the nearest that has any.

        Batch sizes that run with prompt tokens alone are never timed: what never ran there would
        be tried for ever.
        """
        values = _values(stats, self._names[octave])
        if any(values[:OWED]):
            return values
        all_values = [_values(stats, name) for name in self._names]
        known = [other for other, there in enumerate(all_values) if any(there[:OWED])]
        return all_values[min(known, key=lambda other: abs(other - octave), default=octave)]

    def _learn(self, values: list[float], gamma: int, outcome: Outcome, prefill_us: float) -> None:
        """Move the values by the timed steps of a report."""
        steps = outcome.num_timed_steps
        tokens = outcome.num_timed_emitted / outcome.num_timed_rows  # of a request, in one step
        seconds = outcome.step_us / 1e6 / steps
        if gamma == 0:
            for mode in (READY, STALE):
                self._move(values, mode, 0, steps, tokens / seconds)
            return
        # Draft prefill takes its share of every token's time, as its steps are not timed.
        seconds += tokens * prefill_us * (outcome.num_timed_rows / steps) / 1e6
        switched = min(steps, outcome.num_catch_up_steps or int(outcome.catch_up_us > 0))
        if steps > switched:
            self._move(values, READY, gamma, steps - switched, tokens / seconds)
        if switched:
            catch_up_s = values[OWED] + outcome.catch_up_us / 1e6
            values[OWED] = 0.0
            reward = tokens / seconds * (1 - catch_up_s / switched / seconds)
            self._move(values, STALE, gamma, switched, reward)

    def _move(
        self, values: list[float], mode: int, gamma: int, num_steps: int, reward: float
    ) -> None:
        after = READY if gamma else STALE
        following = max([q for q in values[after : after + NUM_ARMS] if q], default=reward)
        target = (1 - self._discount) * reward + self._discount * following
        known = values[mode + gamma]
        step = 1 - (1 - self._step_size) ** num_steps if known else 1.0
        values[mode + gamma] = min(max(known + step * (target - known), -_MOST), _MOST)


def best_gamma(values: Sequence[float], mode: int, largest: int) -> int:
    """Gamma of the largest value in a mode; one that never ran comes first, the largest of them.

    A gamma that ran in the ready mode alone counts with that value in the stale mode: leaving
    gamma 0 is free until it was measured.
    """
    best, most = 0, -math.inf
    for gamma in range(largest, -1, -1):
        value = values[mode + gamma] or values[READY + gamma]
        if not value:
            return gamma
        if value >= most:  # of equals the smallest gamma
            best, most = gamma, value
    return best


def _octave(batch_size: int) -> int:
    """1, 2 to 3, 4 to 7, ...: 13 of them up to the largest batch, and 0."""
    return batch_size.bit_length()


def _values(stats: Stats, name: str) -> Sequence[float]:
    """The values of an octave; none where they are not ours."""
    values = stats.latest.get(name, _EMPTY)
    ours = len(values) == NUM_VALUES and max(values) <= _MOST and min(values) >= -_MOST
    return values if ours and values[OWED] >= 0 else _EMPTY


SPEC = PolicySpec(
    name="q_learning",
    summary="Q-learning over batch size and whether the draft is stale.",
    parameters=(
        gamma_max(5),
        hold_steps(),
        Parameter(
            name="epsilon",
            kind="float",
            default=0.05,
            minimum=0.0,
            maximum=1.0,
            help="share of draws that explore",
        ),
        Parameter(
            name="step_size",
            kind="float",
            default=0.02,
            minimum=1e-6,
            maximum=1.0,
            help="share of its error that a value is corrected by at each step",
        ),
        Parameter(
            name="discount",
            kind="float",
            default=0.95,
            minimum=0.0,
            maximum=0.999,
            help="weight of the next step's value; 0: each step for itself",
        ),
    ),
    make=lambda values: QLearning(
        int(values["gamma_max"]),
        int(values["hold_steps"]),
        float(values["epsilon"]),
        float(values["step_size"]),
        float(values["discount"]),
    ),
    additive=False,
)
