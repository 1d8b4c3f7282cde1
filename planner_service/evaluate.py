"""Off-line estimates of a policy's throughput from what another one drew. Pure.

The unit is the bin: its arm was drawn with a known propensity, and held. Throughput is a ratio,
tokens over seconds, over the logged contexts: how another policy would have changed them is not
asked.

    weight of a bin        w = probability of its arm under the policy / propensity
    tokens of a bucket       = sum q + N / sum(w n) * sum w (t - q of the arm that ran)

n are a bin's timed steps, N their sum over the bucket, t its tokens, and q what the model of
`outcome_model.py` expects: of the policy's arms in the first sum. Seconds likewise. With q = 0 this
is self-normalised inverse propensity (SNIPS; Swaminathan and Joachims, NeurIPS 2015), with the
model it is doubly robust (Dudík, Langford and Li, ICML 2011). Buckets are summed before the ratio.
Intervals come from influence values by draw, of each bin at its jackknife length, and Student's t
with the effective sample size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from planner_service.bins import Arm, Bin
from planner_service.outcome_model import Floats, Ints, predict

MAX_UNSUPPORTED = 0.05  # of the policy's probability, on arms that the log never drew
MIN_COVERED = 0.8  # mean weight: the share of the policy that the log could have drawn
_LEAST_PROPENSITY = 1e-12  # so that no square overflows; one such bin is refused by its ESS of 1
_LEAST_LEFT = 0.05  # of a bucket without its heaviest bin


class Value(NamedTuple):
    """Tokens per second, with a 95 % interval."""

    tokens_per_s: float
    low: float
    high: float


class Row(NamedTuple):
    """Estimates over a set of bins."""

    name: str
    num_bins: int
    num_steps: int
    share: float  # of all timed steps in bins
    logged: Value  # of what was drawn
    snips: Value
    doubly_robust: Value
    effective_sample_size: float
    mean_weight: float  # 1 where the log could draw all that the policy draws


class Refusal(NamedTuple):
    """A bucket in which the log says too little about the policy."""

    name: str
    num_bins: int
    share: float
    reason: str


class Evaluation(NamedTuple):
    """Estimates by bucket, over all that have one, and the buckets that have none."""

    buckets: tuple[Row, ...]
    overall: Row | None
    refused: tuple[Refusal, ...]


class _Table(NamedTuple):
    """Bins as columns."""

    buckets: Ints
    draws: Ints  # number of each bin's draw
    arms: Ints
    steps: Floats
    outcomes: Floats  # [num_bins, 2]: tokens, seconds
    probabilities: Floats  # [num_bins, num_arms], of the policy
    weights: Floats


def evaluate(
    bins: Sequence[Bin],
    probabilities: Mapping[Bin, Mapping[Arm, float]],
    *,
    min_ess: float,
) -> Evaluation:
    """Estimate the policy that draws with these probabilities from bins that were logged.

    Args:
        bins: At least one.
        probabilities: Of each arm, by bin.
        min_ess: Least effective sample size of a bucket, in bins.
    """
    arms = sorted({bin_.drawn.arm for bin_ in bins}.union(*(probabilities[b] for b in bins)))
    table = _table(bins, probabilities, arms)
    contexts = np.array(
        [(b.drawn.context.batch_size, b.drawn.context.num_kv_tokens) for b in bins], dtype=float
    )
    gammas = np.array([arm.gamma for arm in arms], dtype=float)
    expected = predict(
        contexts=contexts,
        buckets=table.buckets,
        arms=table.arms,
        gammas=gammas,
        targets=table.outcomes / table.steps[:, None],
        steps=table.steps,
    )
    expected *= table.steps[:, None, None]

    rows, refused, kept = list[Row](), list[Refusal](), list[Ints]()
    total = table.steps.sum()
    for bucket in np.unique(table.buckets):
        part = np.flatnonzero(table.buckets == bucket)
        reason = _why_not(table, part, arms, min_ess)
        if reason:
            share = float(table.steps[part].sum() / total)
            refused.append(Refusal(_range_name(int(bucket)), len(part), share, reason))
            continue
        kept.append(part)
        rows.append(_row(_range_name(int(bucket)), table, expected, [part]))
    overall = _row("overall", table, expected, kept) if kept else None
    return Evaluation(tuple(rows), overall, tuple(refused))


def _table(
    bins: Sequence[Bin], probabilities: Mapping[Bin, Mapping[Arm, float]], arms: Sequence[Arm]
) -> _Table:
    index = {arm: i for i, arm in enumerate(arms)}
    drawn = np.array([index[bin_.drawn.arm] for bin_ in bins])
    policy = np.zeros((len(bins), len(arms)))
    for i, bin_ in enumerate(bins):
        for arm, probability in probabilities[bin_].items():
            policy[i, index[arm]] = probability
    propensities = np.array([max(bin_.drawn.propensity, _LEAST_PROPENSITY) for bin_ in bins])
    return _Table(
        buckets=np.array([_range(bin_.drawn.context.batch_size) for bin_ in bins]),
        draws=np.array([bin_.draw for bin_ in bins]),
        arms=drawn,
        steps=np.array([bin_.num_timed_steps for bin_ in bins], dtype=float),
        outcomes=np.array([(bin_.tokens, bin_.seconds) for bin_ in bins], dtype=float),
        probabilities=policy,
        weights=policy[np.arange(len(bins)), drawn] / propensities,
    )


def _why_not(table: _Table, part: Ints, arms: Sequence[Arm], min_ess: float) -> str:
    """Why a bucket cannot be estimated, in words; empty if it can."""
    steps, weights = table.steps[part], table.weights[part]
    wanted = steps @ table.probabilities[part] / steps.sum()
    logged = set(table.arms[part].tolist())
    missing = {i: share for i, share in enumerate(wanted) if i not in logged and share > 0}
    if sum(missing.values()) > MAX_UNSUPPORTED:
        names = ", ".join(f"{arms[i]} in {share:.0%}" for i, share in missing.items())
        return f"the policy draws what the log never drew: {names} of the steps"
    size = _effective(weights)
    if size < min_ess:
        return f"effective sample size {size:.1f} of {len(part)} bins, below {min_ess:g}"
    # Its expectation is the policy's probability of what the log could draw, hence 1 or less.
    mean = float(weights @ steps / steps.sum())
    error = math.sqrt(float(((weights - mean) * steps) @ ((weights - mean) * steps))) / steps.sum()
    if mean + 3 * error < MIN_COVERED:
        return f"of what the policy draws, the log could have drawn {mean:.0%} alone (mean weight)"
    return ""


def _row(name: str, table: _Table, expected: Floats, parts: Sequence[Ints]) -> Row:
    bins = np.concatenate(parts)
    ones = np.ones_like(table.weights)
    nothing = np.zeros_like(expected)
    steps = table.steps[bins].sum()
    return Row(
        name,
        len(bins),
        int(steps),
        float(steps / table.steps.sum()),
        _estimate(table, ones, nothing, parts),
        _estimate(table, table.weights, nothing, parts),
        _estimate(table, table.weights, expected, parts),
        _effective(table.weights[bins]),
        float(table.weights[bins] @ table.steps[bins] / steps),
    )


def _estimate(table: _Table, weights: Floats, expected: Floats, parts: Sequence[Ints]) -> Value:
    """Tokens per second over buckets, with its interval; `expected` of 0 is SNIPS."""
    sums = np.zeros(2)  # tokens, seconds
    for part in parts:
        policy, residual, factor = _pieces(table, weights, expected, part)
        sums += policy.sum(axis=0) + factor @ residual
    tokens, seconds = sums
    rate = tokens / seconds
    variance = 0.0
    for part in parts:
        policy, residual, factor = _pieces(table, weights, expected, part)
        steps = table.steps[part]
        against = np.array([1.0, -rate])
        lead, residual_rate = policy @ against, residual @ against
        influence = lead - lead.sum() * steps / steps.sum()
        leverage = np.minimum(factor * steps / (factor @ steps), 1 - _LEAST_LEFT)
        center = factor @ residual_rate / steps.sum()
        influence += factor * (residual_rate - center * steps) / (1 - leverage)
        _, draws = np.unique(table.draws[part], return_inverse=True)
        variance += float((np.bincount(draws, influence) ** 2).sum())
    size = _effective(weights[np.concatenate(parts)])
    margin = _student(size - 1) * math.sqrt(variance) / seconds
    return Value(float(rate), float(rate - margin), float(rate + margin))


def _pieces(
    table: _Table, weights: Floats, expected: Floats, part: Ints
) -> tuple[Floats, Floats, Floats]:
    """What the model expects of the policy, what it got wrong, and the weights, normalised."""
    policy = np.einsum("na,nat->nt", table.probabilities[part], expected[part])
    residual = table.outcomes[part] - expected[part, table.arms[part]]
    steps = table.steps[part]
    factor = weights[part] * steps.sum() / (weights[part] @ steps)
    return policy, residual, factor


def _effective(weights: Floats) -> float:
    """Kish's effective sample size; 0 without any weight."""
    squares = float(weights @ weights)
    return float(weights.sum()) ** 2 / squares if squares > 0 else 0.0


def _student(degrees: float) -> float:
    """The 97.5 % quantile of Student's t, to 1 % from four degrees of freedom on."""
    z, degrees = 1.959964, max(degrees, 1.0)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / degrees + second / degrees**2


def _range(batch_size: int) -> int:
    return (max(batch_size, 1) - 1).bit_length()


def _range_name(number: int) -> str:
    low, high = (1 << number) // 2 + 1 if number else 1, 1 << number
    return f"batch {high}" if low == high else f"batch {low}-{high}"
