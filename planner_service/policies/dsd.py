"""Policy `dsd`: the goodput model of SmartSpec (arXiv 2406.14066), also called DSD and TurboSpec.

Every 20 steps, for the whole batch and whatever its size becomes meanwhile,

    goodput(k) = B * (1 - a^(k+1)) / (1 - a) / T(k),    goodput(0) times 1.1
    k = where goodput, scanned from k = 0 on, stops growing

- `a`, the acceptance of one token, starts at 0.7 and moves by 0.15 of what is observed a step.
- T is linear, target + k * draft, each in (1, rows, KV tokens), the target's rows k + 1 times:
  T = t1 + t2 B + t3 Bk + t4 KV + k (d1 + d2 KV), by least squares over all timed steps of the
  profile; the moments add up, so planners share them.

As published, k = 0 is a trap: where no worker drafts, `a` stays as it is, however good the draft
became. The ways out are a stream that starts anew and a fit that lacks data.

What differs. Times are measured as the profile serves and not by a run beforehand. Until they
tell T, the arms that do are run: of k = 0 and the largest k (T is linear in between) the one
whose prediction here is less certain, 8 steps at a time, while that rests on fewer than about 8
steps (leverage x' (X'X)^-1 x above 1/8). `a` is of one stream; the acceptance observed is that of
all rows of the profile since the stream's last decision. Room for the drafts is the worker's to
judge (`feasible_max_gamma`).
"""

from __future__ import annotations

import math
import random
from operator import mul
from typing import NamedTuple, cast

from nightjar.buckets import BucketGrid
from planner_service.context import MAX_GAMMA, Context, Outcome
from planner_service.observation import observe
from planner_service.own_sums import OwnSums
from planner_service.policies.policy import IDLE_HOLD_STEPS, Choice, Policy, PolicySpec, gamma_max
from planner_service.session import Numbers, Session
from planner_service.sums import Stats

INTERVAL = 20  # steps of a decision
IDENTIFYING_STEPS = 8  # of an arm that is run for the fit's sake
KEPT = 0.85  # of the acceptance, by a step that drafted
INITIAL_ACCEPTANCE = 0.7
PLAIN_BONUS = 1.1  # what speculation must gain to be worth its overhead
WHOLE_BATCH = BucketGrid(())  # one bucket: a decision is for any batch

NUM_FEATURES = 6
_NUM_PRODUCTS = NUM_FEATURES * (NUM_FEATURES + 1) // 2
_NUM_MOMENTS = _NUM_PRODUCTS + NUM_FEATURES
NUM_SUMS = _NUM_MOMENTS + 3  # and drafts reached, drafts accepted, steps that drafted
_RIDGE, _TINY = 1e-9, 1e-12  # of a feature's own square; of one that is 0 throughout
_LEAST_MS = 1e-3

Vector = list[float]
Lower = tuple[tuple[float, ...], ...]  # rows of L, each up to its diagonal


def features(rows: float, num_kv_tokens: float, gamma: int) -> tuple[float, ...]:
    """What the time of a step is linear in."""
    return (1.0, rows, num_kv_tokens, gamma, gamma * rows, gamma * num_kv_tokens)


def moments(rows: float, num_kv_tokens: float, gamma: int, ms: float, steps: float) -> Vector:
    """Products of features (lower triangle, by row) and of features with time, times steps."""
    x = features(rows, num_kv_tokens, gamma)
    weighted = [steps * a for a in x]
    products = [a * b for i, a in enumerate(weighted, 1) for b in x[:i]]
    return products + [ms * a for a in weighted]


class Fit(NamedTuple):
    """Least squares by Cholesky: X'X = L L', and L^-1 X'y."""

    rows: Lower
    target: Vector

    @classmethod
    def of(cls, sums: tuple[float, ...]) -> Fit:
        """The fit to moments; a ridge far below the data's own size keeps it solvable.

        Unrolled, since loops take five times as long.
        """
        a, b, c, d, e, f = sums[0], sums[1:3], sums[3:6], sums[6:10], sums[10:15], sums[15:21]
        a0 = _pivot(a, 0.0)
        b0, c0, d0, e0, f0 = b[0] / a0, c[0] / a0, d[0] / a0, e[0] / a0, f[0] / a0
        b1 = _pivot(b[1], b0 * b0)
        c1, d1 = (c[1] - c0 * b0) / b1, (d[1] - d0 * b0) / b1
        e1, f1 = (e[1] - e0 * b0) / b1, (f[1] - f0 * b0) / b1
        c2 = _pivot(c[2], c0 * c0 + c1 * c1)
        d2 = (d[2] - d0 * c0 - d1 * c1) / c2
        e2, f2 = (e[2] - e0 * c0 - e1 * c1) / c2, (f[2] - f0 * c0 - f1 * c1) / c2
        d3 = _pivot(d[3], d0 * d0 + d1 * d1 + d2 * d2)
        e3 = (e[3] - e0 * d0 - e1 * d1 - e2 * d2) / d3
        f3 = (f[3] - f0 * d0 - f1 * d1 - f2 * d2) / d3
        e4 = _pivot(e[4], e0 * e0 + e1 * e1 + e2 * e2 + e3 * e3)
        f4 = (f[4] - f0 * e0 - f1 * e1 - f2 * e2 - f3 * e3) / e4
        f5 = _pivot(f[5], f0 * f0 + f1 * f1 + f2 * f2 + f3 * f3 + f4 * f4)
        rows: Lower = (
            (a0,),
            (b0, b1),
            (c0, c1, c2),
            (d0, d1, d2, d3),
            (e0, e1, e2, e3, e4),
            (f0, f1, f2, f3, f4, f5),
        )
        return cls(rows, _solve(rows, sums[_NUM_PRODUCTS:_NUM_MOMENTS], []))

    def line(self, rows: float, num_kv_tokens: float) -> Line:
        """Time over gamma for a batch."""
        batch = (1.0, rows, num_kv_tokens)
        start = _solve(self.rows, (*batch, 0.0, 0.0, 0.0), [])
        slope = _solve(self.rows[3:], batch, [0.0, 0.0, 0.0])
        return Line(start, slope, _dot(start, self.target), _dot(slope, self.target))


class Line(NamedTuple):
    """Predicted time over gamma, start + gamma * slope, with what leverage needs."""

    start: Vector  # L^-1 x
    slope: Vector
    start_ms: float
    slope_ms: float

    def ms(self, gamma: int) -> float:
        """Milliseconds of a step; never 0 or less, which no step takes."""
        return max(self.start_ms + gamma * self.slope_ms, _LEAST_MS)

    def leverages(self, gamma: int) -> tuple[float, float]:
        """Variance of the prediction at gamma 0 and at a gamma, in variances of one step."""
        plain = _dot(self.start, self.start)
        more = 2 * _dot(self.start, self.slope) + gamma * _dot(self.slope, self.slope)
        return plain, plain + gamma * more


def _pivot(square: float, taken: float) -> float:
    """Diagonal of L: the root of what is left of a feature's square, which is never nothing."""
    least = _RIDGE * abs(square) + _TINY
    left = square + least - taken
    return math.sqrt(left if left > least else least)


def _solve(rows: Lower, right: tuple[float, ...], found: Vector) -> Vector:
    """L^-1 right, of which the first entries are found."""
    for row, value in zip(rows, right):  # noqa: B905 as long as each other; strict costs time
        found.append((value - sum(map(mul, found, row))) / row[-1])
    return found


def _dot(first: Vector, second: Vector) -> float:
    product: float = sum(map(mul, first, second))
    return product


def best_gamma(acceptance: float, line: Line, largest: int) -> int:
    """The published scan: from 0 on, up to the first gamma whose goodput does not grow."""
    best, highest = 0, PLAIN_BONUS / line.ms(0)
    emitted, chance = 1.0, 1.0
    for gamma in range(1, largest + 1):
        chance *= acceptance
        emitted += chance
        goodput = emitted / line.ms(gamma)
        if not goodput > highest:
            break
        best, highest = gamma, goodput
    return best


class State(NamedTuple):
    """Where a stream stands: its decision, its acceptance, and the sums at its last select."""

    gamma: int = 0
    best: int = 0  # what the model says, should `gamma` be run for the fit's sake
    explored: int = 0
    left: int = 0  # steps that the decision still holds
    acceptance: float = INITIAL_ACCEPTANCE
    reached: float = 0.0
    accepted: float = 0.0
    drafted: float = 0.0  # steps

    @classmethod
    def read(cls, numbers: Numbers) -> State | None:
        """A state from foreign numbers; None unless it is one that we could have written."""
        if len(numbers) != len(cls._fields) or any(type(n) is not int for n in numbers[:4]):
            return None
        found = cls(*cast(tuple[int, int, int, int, float, float, float, float], numbers))
        gammas = 0 <= found.gamma <= MAX_GAMMA and 0 <= found.best <= MAX_GAMMA
        rest = 0 <= found.left <= INTERVAL and 0 <= found.acceptance <= 1
        return found if gammas and rest and found.explored in (0, 1) else None

    def after(self, num_steps: int, reached: float, accepted: float, drafted: float) -> State:
        """The state once steps ran, with the sums of now."""
        acceptance = self.acceptance
        more, taken = reached - self.reached, accepted - self.accepted
        steps = min(num_steps, drafted - self.drafted)
        # The sums can be behind what another planner knew; then nothing is known of the steps.
        if steps > 0 and more > 0 and 0 <= taken <= more:
            kept: float = KEPT**steps
            acceptance = kept * acceptance + (1 - kept) * taken / more
        left = max(self.left - num_steps, 0)
        decision = self.gamma, self.best, self.explored
        return State(*decision, left, acceptance, reached, accepted, drafted)


class Dsd(Policy):
    """Maximises the goodput that a linear model of step times predicts."""

    def __init__(self, gamma_max: int, name: str = "dsd") -> None:
        """Make the policy; its sums go by `name`, since another's steps take other times."""
        self._gamma_max = gamma_max
        self._name = f"{name}/moments"

    def select(
        self, context: Context, stats: Stats, session: Session, rng: random.Random
    ) -> tuple[Choice, Session]:
        """Hold the decision for its steps, then decide anew."""
        own = stats.own.get(self._name)
        sums = own.values if own is not None and len(own.values) == NUM_SUMS else _NO_SUMS
        state = _state(session).after(sum(session.ran.values()), *sums[_NUM_MOMENTS:])
        largest = min(self._gamma_max, context.max_gamma)
        feasible = min(largest, context.feasible_max_gamma)
        if state.left == 0 or feasible == 0:
            state = _decided(state, context, Fit.of(sums), largest, feasible)
        gamma, best = min(state.gamma, feasible), min(state.best, largest)
        hold = state.left if feasible else IDLE_HOLD_STEPS
        explored = bool(state.explored and feasible)
        choice = Choice(gamma, best, hold, explored, 1.0, {}, WHOLE_BATCH)
        return choice, Session(gamma, {context.bucket: state})

    def update(self, stats: Stats, context: Context, gamma: int, outcome: Outcome) -> Stats:
        """The common sums, the moments of timed steps, and what was accepted."""
        learned = observe(context, gamma, outcome)
        if context.feasible_max_gamma == 0:
            return learned
        values = [0.0] * _NUM_MOMENTS
        steps = outcome.num_timed_steps
        if steps:
            rows, ms = outcome.num_timed_rows / steps, outcome.step_us / steps / 1e3
            values = moments(rows, context.num_kv_tokens, gamma, ms, steps)
        drafted = outcome.num_steps if gamma else 0
        values += [sum(outcome.reached), sum(outcome.accepted), drafted]
        own = OwnSums(tuple(values), at=stats.totals.steps)
        return learned._replace(own={self._name: own})


_NO_SUMS = (0.0,) * NUM_SUMS


def _state(session: Session) -> State:
    for numbers in session.numbers.values():
        state = State.read(numbers) if session.foreign else cast(State, numbers)
        if state is not None:
            return state
    return State()


def _decided(state: State, context: Context, fit: Fit, largest: int, feasible: int) -> State:
    """The next decision: the gamma of most goodput, or one that the fit lacks."""
    line = fit.line(context.batch_size, context.num_kv_tokens)
    best = best_gamma(state.acceptance, line, largest)
    plain, most = line.leverages(feasible)
    if feasible and max(plain, most) > 1 / IDENTIFYING_STEPS:
        return State(feasible if most > plain else 0, best, 1, IDENTIFYING_STEPS, *state[4:])
    return State(min(best, feasible), best, 0, INTERVAL, *state[4:])


SPEC = PolicySpec(
    name="dsd",
    summary="Maximises modelled goodput, with linear step times and one acceptance (SmartSpec's).",
    parameters=(gamma_max(5),),
    make=lambda values: Dsd(int(values["gamma_max"])),
)
