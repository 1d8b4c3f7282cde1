"""The loss that policies minimise over measured arms: seconds per token, and what drafting adds."""

from __future__ import annotations

import math
from collections.abc import Mapping

from planner_service.sums import Bucket, Estimator


def least_loss(
    arms: Bucket,
    largest: int,
    prefill_s: float,
    switching_s: float,
    estimator: Estimator = "ratio_of_sums",
) -> int:
    """Gamma of least loss of the arms up to `largest`, of equals the smallest; 0 without any.

    Args:
        arms: What ran, by gamma.
        largest: Largest gamma.
        prefill_s: Draft prefill in seconds per token per request, for gamma above 0.
        switching_s: Seconds of catching up, which gamma above 0 spreads over its drafts.
        estimator: How seconds per token are averaged.
    """
    best, least = 0, math.inf
    for gamma, arm in sorted(arms.items()):
        if gamma > largest:
            break
        loss = arm.seconds_per_token(estimator)
        if gamma > 0:
            loss += prefill_s + switching_s / gamma
        if loss < least:
            best, least = gamma, loss
    return best


def first_or_least(
    arms: Bucket,
    largest: int,
    prefill_s: float,
    switching_s: float,
    estimator: Estimator = "ratio_of_sums",
) -> int:
    """As `least_loss`, but a gamma that never ran comes first, the largest of them.

    Until speculation was tried, nothing says that it is off.
    """
    for gamma in range(largest, -1, -1):
        if gamma not in arms:
            return gamma
    return least_loss(arms, largest, prefill_s, switching_s, estimator)


def nearest(buckets: Mapping[int, Bucket], bucket: int) -> Bucket:
    """What is known of the nearest batch size, of equals the smaller; nothing if of none.

    A batch size that runs with prompt tokens alone is never timed: it would try what it never
    ran for ever.
    """
    if not buckets:
        return {}
    return buckets[min(buckets, key=lambda other: (abs(other - bucket), other))]
