"""Policy `ema_tiers`: SGLang's adaptive draft length, `--speculative-adaptive`.

Batch sizes fall into tiers, each with candidates for gamma and its own state: the candidate in
use, a moving average of the accepted drafts per row (weight `alpha` a step), a count of steps.
After `warmup` steps, each `interval` steps:

    down, while average <= lower - 0.5 + hysteresis     (lower: the candidate below;
                                                         to 0 while <= 0.5 + hysteresis)
    else up, while average > current - 0.5
    at 0: after one interval to the smallest positive candidate, whatever the average

The candidates and hysteresis of each tier are SGLang's defaults (its upward hysteresis and its
ceiling on the length are off there, and left out). A tier starts at `initial_gamma`, if that is
one of its candidates, otherwise at the middle one, with an average one below.

What differs. A worker asks once an interval, so the average moves by the interval's mean with
the weight 1 - (1 - alpha)^steps: the same for equal steps, without their order otherwise. The
mean is that of all rows of the profile that drafted at this tier and gamma since the stream's
last decision: with several workers on a profile, the fleet's acceptance and not the worker's
own. Candidates above the worker's largest gamma are cut to it. A batch is not padded to the
size of a CUDA graph before its tier is looked up.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple, cast

from nightjar.buckets import BucketGrid
from planner_service.context import MAX_BATCH_SIZE, MAX_GAMMA, Context, Outcome
from planner_service.observation import observe
from planner_service.own_sums import OwnSums
from planner_service.policies.policy import (
    IDLE_HOLD_STEPS,
    Choice,
    Parameter,
    ParameterValue,
    Policy,
    PolicySpec,
)
from planner_service.policies.tiers import DEFAULT_TIERS, Tier, parse, problem
from planner_service.session import Numbers, Session
from planner_service.sums import Stats


class State(NamedTuple):
    """Where a stream stands in one tier."""

    current: int  # candidate in use
    steps: int  # that ran in the tier
    average: float  # accepted drafts per row
    answered: int  # gamma that ran: `current`, cut to what was feasible
    rows: float  # of the sums at `answered`, what was known at the last decision
    accepted: float

    @classmethod
    def read(cls, numbers: Numbers) -> State | None:
        """A state from foreign numbers; None unless it is one that we could have written."""
        if len(numbers) != len(cls._fields) or any(type(numbers[i]) is not int for i in (0, 1, 3)):
            return None
        found = cls(*cast(tuple[int, int, float, int, float, float], numbers))
        ranges = found.steps >= 0 and -1 <= found.average <= MAX_GAMMA
        return found if ranges and 0 <= found.answered <= found.current <= MAX_GAMMA else None


class EmaTiers(Policy):
    """Moves between a tier's candidates by the average of accepted drafts per row."""

    def __init__(
        self, tiers: tuple[Tier, ...], initial_gamma: int, alpha: float, interval: int, warmup: int
    ) -> None:
        self._tiers = tiers
        self._firsts = [tier.first for tier in tiers]
        self._grid = BucketGrid(tuple(self._firsts[1:]))
        ends = [first - 1 for first in self._firsts[1:]] + [MAX_BATCH_SIZE]
        self._names = [f"ema_tiers/{t.first}-{end}" for t, end in zip(tiers, ends, strict=True)]
        self._initial_gamma, self._alpha = initial_gamma, alpha
        self._interval, self._warmup = interval, warmup

    def select(
        self, context: Context, stats: Stats, session: Session, rng: random.Random
    ) -> tuple[Choice, Session]:
        """Count what ran in each tier, move where an interval ended, answer for all tiers."""
        ran: dict[int, int] = {}
        for bucket, num_steps in session.ran.items():
            tier = self._tier(bucket)
            ran[tier] = ran.get(tier, 0) + num_steps
        known = self._states(session, context.max_gamma)
        asked = self._tier(context.bucket)
        numbers: dict[int, Numbers] = {}
        table: dict[int, tuple[int, int]] = {}
        for tier in range(len(self._tiers)):
            gammas = self._gammas(tier, context.max_gamma)
            if tier != asked and tier not in ran:
                if tier in known:
                    key, state = known[tier]
                    numbers[key], current = state, state.current
                else:
                    current = self._start(gammas)
                table[tier] = (current, current)
                continue
            key, state = known.get(tier) or (self._tiers[tier].first, self._fresh(gammas))
            state = self._after(state, ran.get(tier, 0), tier, gammas, stats)
            table[tier] = (state.current, state.current)
            if tier == asked:
                known[tier] = (context.bucket, state)
            else:
                numbers[key] = self._anchored(state, state.current, tier, stats)
        mine = known[asked][1]
        gamma = min(mine.current, context.feasible_max_gamma)
        # Under the batch size that is asked for: so a session that comes back counts its hold.
        numbers[context.bucket] = self._anchored(mine, gamma, asked, stats)
        hold = self._interval - (mine.steps - self._warmup) % self._interval
        if context.feasible_max_gamma == 0:
            hold = IDLE_HOLD_STEPS
        choice = Choice(gamma, mine.current, hold, False, 1.0, table, self._grid)
        return choice, Session(gamma, numbers)

    def update(self, stats: Stats, context: Context, gamma: int, outcome: Outcome) -> Stats:
        """The common sums; rows that drafted and accepted drafts, by tier and gamma."""
        learned = observe(context, gamma, outcome)
        if context.feasible_max_gamma == 0 or gamma == 0 or not any(outcome.reached):
            return learned
        sums = (*(0.0,) * (2 * gamma), outcome.reached[0], sum(outcome.accepted))
        name = self._names[self._tier(context.bucket)]
        return learned._replace(own={name: OwnSums(sums, at=stats.totals.steps)})

    def _tier(self, batch_size: int) -> int:
        return max(bisect_right(self._firsts, batch_size) - 1, 0)

    def _gammas(self, tier: int, max_gamma: int) -> tuple[int, ...]:
        """Candidates of a tier that the worker can run."""
        return _cut(self._tiers[tier].gammas, max_gamma)

    def _states(self, session: Session, max_gamma: int) -> dict[int, tuple[int, State]]:
        """Key and state of each tier that the session knows."""
        found: dict[int, tuple[int, State]] = {}
        for key, numbers in session.numbers.items():
            # Our own are states already, unless foreign.
            state = State.read(numbers) if session.foreign else cast(State, numbers)
            tier = self._tier(key)
            if state is not None and state.current in self._gammas(tier, max_gamma):
                found[tier] = (key, state)
        return found

    def _start(self, gammas: tuple[int, ...]) -> int:
        return self._initial_gamma if self._initial_gamma in gammas else gammas[len(gammas) // 2]

    def _fresh(self, gammas: tuple[int, ...]) -> State:
        current = self._start(gammas)
        return State(current, 0, current - 1.0, 0, 0.0, 0.0)

    def _sums(self, tier: int, gamma: int, stats: Stats) -> tuple[float, float]:
        """Rows that drafted and accepted drafts, of a tier and gamma, over all time."""
        own = stats.own.get(self._names[tier])
        if own is None or gamma == 0 or len(own.values) < 2 * gamma + 2:
            return 0.0, 0.0
        return own.values[2 * gamma], own.values[2 * gamma + 1]

    def _anchored(self, state: State, answered: int, tier: int, stats: Stats) -> State:
        rows, accepted = self._sums(tier, answered, stats)
        return State(state.current, state.steps, state.average, answered, rows, accepted)

    def _after(
        self, state: State, num_steps: int, tier: int, gammas: tuple[int, ...], stats: Stats
    ) -> State:
        """The state once steps ran; it moves if an interval ended with them."""
        if num_steps == 0:
            return state
        rows, accepted = self._sums(tier, state.answered, stats)
        rows, accepted, average = rows - state.rows, accepted - state.accepted, state.average
        # The sums can be behind what another planner knew; then nothing is known of the steps.
        if rows > 0 and 0 <= accepted <= rows * state.answered:
            kept: float = (1 - self._alpha) ** num_steps
            average = kept * average + (1 - kept) * accepted / rows
        current, steps = state.current, min(state.steps + num_steps, 2**40)
        if self._intervals(steps) > self._intervals(state.steps):
            current, average = _moved(current, average, gammas, self._tiers[tier].hysteresis)
        return state._replace(current=current, steps=steps, average=average)

    def _intervals(self, steps: int) -> int:
        """Intervals that ended within so many steps of a tier."""
        return max(steps - self._warmup, 0) // self._interval


@lru_cache(maxsize=256)
def _cut(gammas: tuple[int, ...], largest: int) -> tuple[int, ...]:
    return tuple(sorted({min(gamma, largest) for gamma in gammas}))


def _moved(
    current: int, average: float, gammas: tuple[int, ...], hysteresis: float
) -> tuple[int, float]:
    """Candidate and average after a decision."""
    at = gammas.index(current)
    if current == 0:
        probed = gammas[min(at + 1, len(gammas) - 1)]
        # Without a step that drafted there is no average yet.
        return probed, float(probed - 1) if probed > 0 and average < 0 else average
    while at > 0:
        lower = gammas[at - 1]
        if average > (0.5 if lower == 0 else lower - 0.5) + hysteresis:
            break
        at -= 1
    if gammas[at] == current:
        while at < len(gammas) - 1 and average > gammas[at] - 0.5:
            at += 1
    return gammas[at], average


def _make(values: Mapping[str, ParameterValue]) -> EmaTiers:
    return EmaTiers(
        parse(str(values["tiers"])),
        int(values["initial_gamma"]),
        float(values["alpha"]),
        int(values["interval"]),
        int(values["warmup"]),
    )


SPEC = PolicySpec(
    name="ema_tiers",
    summary="Moves gamma within candidates per batch size by a mean of accepted drafts (SGLang's).",
    parameters=(
        Parameter(
            name="tiers",
            kind="text",
            default=DEFAULT_TIERS,
            problem=problem,
            form="tiers first:gamma/gamma/...[:hysteresis] from 1 on, with commas between",
            help="candidates for gamma from a batch size on, and hysteresis on the way down",
        ),
        Parameter(
            name="initial_gamma",
            kind="int",
            default=3,
            minimum=0,
            maximum=MAX_GAMMA,
            help="where a tier starts, if it is one of its candidates; otherwise at the middle one",
        ),
        Parameter(
            name="alpha",
            kind="float",
            default=0.2,
            minimum=0.001,
            maximum=1,
            help="weight of a step in the average",
        ),
        Parameter(
            name="interval",
            kind="int",
            default=5,
            minimum=1,
            maximum=1000,
            help="steps between two decisions of a tier",
        ),
        Parameter(
            name="warmup",
            kind="int",
            default=10,
            minimum=0,
            maximum=10_000,
            help="steps of a tier before its first interval",
        ),
    ),
    make=_make,
)
