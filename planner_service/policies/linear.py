"""One ridge regression for each gamma over features of the context, kept as sums that add up.

What is regressed is a ratio, target over weight, each step weighted by its weight: with a
constant feature alone the solution is the ratio of sums. The ridge draws the constant towards a
prior ratio and all other coefficients to 0. The vector of an arm holds

    sum weight * x x'  (upper triangle),   sum target * x,   number of steps
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from planner_service.context import MAX_GAMMA, Context, Outcome
from planner_service.own_sums import OwnSums
from planner_service.policies.policy import Parameter
from planner_service.sums import Stats

# Fixed scales, since all replicas must add up the same features.
ROWS_SCALE, KV_SCALE = 128.0, 2048.0
MAX_KV = 32.0  # in units of the scale
LOG_SCALE = math.log(ROWS_SCALE)
NUM_SQUARES, NUM_FEATURES = 15, 5
NUM_VALUES = NUM_SQUARES + NUM_FEATURES + 1
AGES_PER_HALF_LIFE = 16  # forgetting is applied to an arm that rests in steps of 4 %
_MOST = 1e100  # beyond it sums are not ours, and squares of them no numbers

Features = tuple[float, float, float, float, float]
Factor = tuple[float, ...]  # of a matrix, L L': columns of L, reciprocals on the diagonal

RIDGE = Parameter(
    name="ridge",
    kind="float",
    default=1.0,
    minimum=1e-3,
    maximum=1e3,
    help="weight of the prior, that all gammas are alike in all contexts, in steps",
)


def features(num_rows: float, num_kv_tokens: float) -> Features:
    """[1, b, b^2, log b, KV per row], scaled; the logarithm is in units of the scale's."""
    rows = max(num_rows, 1.0)
    b = rows / ROWS_SCALE
    kv = min(num_kv_tokens / rows / KV_SCALE, MAX_KV)
    return (1.0, b, b * b, math.log(rows) / LOG_SCALE, kv)


def features_now(context: Context) -> Features:
    """Features of what is asked about."""
    return features(context.batch_size, context.num_kv_tokens)


class Ran(NamedTuple):
    """Timed steps as a regression sees them."""

    num_steps: int
    seconds: float
    tokens_per_request: float  # over all of the steps
    x: Features

    @classmethod
    def of(cls, context: Context, outcome: Outcome) -> Ran | None:
        """Timed steps of a report, None where it teaches no time; rows are their mean."""
        steps = outcome.num_timed_steps
        if not steps or context.feasible_max_gamma == 0:
            return None
        rows = outcome.num_timed_rows / steps
        kv_tokens = context.num_kv_tokens * rows / max(context.batch_size, 1)
        tokens = outcome.num_timed_emitted / rows
        return cls(steps, outcome.step_us / 1e6, tokens, features(rows, kv_tokens))


class Predicted(NamedTuple):
    """What the regressions say of a context, by arm."""

    means: list[float]  # of target over weight
    variances: list[float]  # x' (ridge + steps)^-1 x
    num_steps: list[float]  # that taught the arm, after forgetting; 0: nothing is known


class _Solved(NamedTuple):
    sums: OwnSums | None
    age: int  # in parts of a half-life
    factor: Factor  # of ridge + squares, in steps
    targets: Features  # L^-1 targets
    prior: Features  # L^-1 (ridge, 0, 0, 0, 0)
    num_steps: float


class LinearArms:
    """The regressions of a policy's arms; what it remembers is a memo of pure functions."""

    def __init__(self, policy: str, half_life: float, ridge: float) -> None:
        self._half_life, self._ridge = half_life, ridge
        self._names = [f"{policy}/{half_life!r}/{gamma}" for gamma in range(MAX_GAMMA + 1)]
        self._prior = (ridge, 0.0, 0.0, 0.0, 0.0)
        lower = factor((0.0,) * NUM_SQUARES, ridge)
        no_targets = (0.0, 0.0, 0.0, 0.0, 0.0)
        self._nothing = _Solved(None, 0, lower, no_targets, forward(lower, self._prior), 0.0)
        self._solved = [self._nothing] * (MAX_GAMMA + 1)

    def learned(
        self, stats: Stats, gamma: int, ran: Ran, weight: float, target: float
    ) -> Mapping[str, OwnSums]:
        """What steps add to the regression of an arm."""
        _, b, c, d, e = ran.x
        wb, wc, wd, we = weight * b, weight * c, weight * d, weight * e
        squares = (
            *(weight, wb, wc, wd, we),
            *(wb * b, wb * c, wb * d, wb * e),
            *(wc * c, wc * d, wc * e),
            *(wd * d, wd * e, we * e),
        )
        targets = (target, target * b, target * c, target * d, target * e)
        values = (*squares, *targets, float(ran.num_steps))
        return {self._names[gamma]: OwnSums(values, self._half_life, stats.totals.steps)}

    def ratio(self, stats: Stats, gamma: int) -> float:
        """Target over weight of one arm, as a ratio of sums over all contexts; 0 if unknown."""
        return _ratio([stats.own.get(self._names[gamma])])

    def overall_ratio(self, stats: Stats, largest: int) -> float:
        """Target over weight of all arms, over all contexts; 0 if unknown."""
        return _ratio([stats.own.get(name) for name in self._names[: largest + 1]])

    def predict(self, stats: Stats, x: Features, largest: int, prior: float) -> Predicted:
        """Mean and variance of every arm of [0, largest], where `prior` is the prior ratio."""
        means, variances, num_steps = list[float](), list[float](), list[float]()
        own, now, forgets = stats.own, stats.totals.steps, self._half_life < math.inf
        x0, x1, x2, x3, x4 = x
        for gamma in range(largest + 1):
            sums, solved = own.get(self._names[gamma]), self._solved[gamma]
            age = 0
            if forgets and sums is not None:
                halves = max(0.0, now - sums.at) / self._half_life
                age = int(min(halves, 1e3) * AGES_PER_HALF_LIFE)
            if solved.sums is not sums or solved.age != age:
                solved = self._solved[gamma] = self._solve(sums, age)
            # z = L^-1 x, as `forward` does it
            p0, l1, l2, l3, l4, p1, m2, m3, m4, p2, n3, n4, p3, o4, p4 = solved.factor
            a = x0 * p0
            b = (x1 - l1 * a) * p1
            c = (x2 - l2 * a - m2 * b) * p2
            d = (x3 - l3 * a - m3 * b - n3 * c) * p3
            e = (x4 - l4 * a - m4 * b - n4 * c - o4 * d) * p4
            f, g, h, i, j = solved.targets
            k, q, r, s, t = solved.prior
            mean = a * f + b * g + c * h + d * i + e * j
            means.append(mean + prior * (a * k + b * q + c * r + d * s + e * t))
            variances.append(a * a + b * b + c * c + d * d + e * e)
            num_steps.append(solved.num_steps)
        return Predicted(means, variances, num_steps)

    def _solve(self, sums: OwnSums | None, age: int) -> _Solved:
        """Solve the regression of an arm, its weights in units of their mean, hence in steps."""
        if sums is not None and len(sums.values) == NUM_VALUES:
            values, kept = sums.values, 0.5 ** (age / AGES_PER_HALF_LIFE)
            weight, num_steps = values[0], values[-1] * kept
            largest = max(weight, values[5], values[9], values[12], values[14])  # on the diagonal
            if weight > 1 / _MOST and num_steps > 1e-9 and largest * num_steps / weight < _MOST:
                scale = num_steps / weight
                try:
                    lower = factor(values, self._ridge, scale)
                    targets = forward(lower, [value * scale for value in values[NUM_SQUARES:-1]])
                except (ValueError, ZeroDivisionError):  # not sums of squares: not ours
                    return self._nothing._replace(sums=sums, age=age)
                if max(targets) < _MOST and min(targets) > -_MOST:
                    prior = forward(lower, self._prior)
                    return _Solved(sums, age, lower, targets, prior, num_steps)
        return self._nothing._replace(sums=sums, age=age)


def factor(squares: Sequence[float], ridge: float, scale: float = 1.0) -> Factor:
    """Cholesky's factor of a symmetric matrix, scaled, plus the ridge.

    The matrix is given as its upper triangle by rows; what follows it is left alone.

    Plain floats, written out: for five features that is several times as fast as an array.

    Raises:
        ValueError: The matrix is not positive definite.
        ZeroDivisionError: It is so by no more than rounding.
    """
    a, b, c, d, e, ff, fg, fh, fi, gg, gh, gi, hh, hi, ii = squares[:NUM_SQUARES]
    p = 1 / math.sqrt(a * scale + ridge)
    r = p * scale
    b, c, d, e = b * r, c * r, d * r, e * r
    q = 1 / math.sqrt(ff * scale + ridge - b * b)
    fg, fh, fi = (fg * scale - b * c) * q, (fh * scale - b * d) * q, (fi * scale - b * e) * q
    r = 1 / math.sqrt(gg * scale + ridge - c * c - fg * fg)
    gh, gi = (gh * scale - c * d - fg * fh) * r, (gi * scale - c * e - fg * fi) * r
    s = 1 / math.sqrt(hh * scale + ridge - d * d - fh * fh - gh * gh)
    hi = (hi * scale - d * e - fh * fi - gh * gi) * s
    t = 1 / math.sqrt(ii * scale + ridge - e * e - fi * fi - gi * gi - hi * hi)
    return (p, b, c, d, e, q, fg, fh, fi, r, gh, gi, s, hi, t)


def forward(lower: Factor, x: Sequence[float]) -> Features:
    """L^-1 x: its square is x' (L L')^-1 x."""
    p, b, c, d, e, q, fg, fh, fi, r, gh, gi, s, hi, t = lower
    x0, x1, x2, x3, x4 = x
    x0 *= p
    x1 = (x1 - b * x0) * q
    x2 = (x2 - c * x0 - fg * x1) * r
    x3 = (x3 - d * x0 - fh * x1 - gh * x2) * s
    x4 = (x4 - e * x0 - fi * x1 - gi * x2 - hi * x3) * t
    return (x0, x1, x2, x3, x4)


def _ratio(arms: list[OwnSums | None]) -> float:
    known = [sums.values for sums in arms if sums is not None and len(sums.values) == NUM_VALUES]
    weight = sum([values[0] for values in known])
    target = sum([values[NUM_SQUARES] for values in known])
    ratio = target / weight if weight > 0 and target > 0 else 0.0
    return ratio if 1 / _MOST < ratio < _MOST else 0.0
