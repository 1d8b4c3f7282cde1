"""Means with 95 % intervals over pairs of slices, by Student's t."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

_POINTS = 4001


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean, the variance of it, and what its t has of degrees of freedom."""

    mean: float
    variance: float
    df: float
    num: int

    @property
    def low(self) -> float:
        """Lower end of the two-sided 95 % interval; -inf where one value gives none."""
        return self.mean - self._reach

    @property
    def high(self) -> float:
        """Upper end."""
        return self.mean + self._reach

    @property
    def _reach(self) -> float:
        if self.df <= 0:
            return math.inf
        return quantile(0.975, self.df) * math.sqrt(self.variance)


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean."""
    return sum(values) / len(values)


def of(values: Sequence[float]) -> Estimate:
    """From independent values."""
    n = len(values)
    variance = float(np.var(values, ddof=1)) / n if n > 1 else math.inf
    return Estimate(mean=mean(values), variance=variance, df=n - 1, num=n)


def mean_of(estimates: Sequence[Estimate]) -> Estimate:
    """Mean of independent estimates (Welch and Satterthwaite's degrees of freedom)."""
    n = len(estimates)
    parts = [e.variance / n**2 for e in estimates]
    variance = sum(parts)
    return Estimate(
        mean=mean([e.mean for e in estimates]),
        variance=variance,
        df=_df(parts, [e.df for e in estimates]),
        num=sum(e.num for e in estimates),
    )


def difference(first: Estimate, second: Estimate) -> Estimate:
    """Of independent estimates."""
    variance = first.variance + second.variance
    return Estimate(
        mean=first.mean - second.mean,
        variance=variance,
        df=_df([first.variance, second.variance], [first.df, second.df]),
        num=min(first.num, second.num),
    )


def _df(variances: Sequence[float], dfs: Sequence[float]) -> float:
    if min(dfs) <= 0:
        return 0.0
    total = sum(variances)
    if total == 0:
        return sum(dfs)
    return total**2 / sum(v**2 / df for v, df in zip(variances, dfs, strict=True))


@lru_cache(maxsize=256)
def quantile(share: float, df: float) -> float:
    """Quantile above a half of Student's t: its density is summed up, then halving finds it."""
    scale = math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(df * math.pi)

    def below(t: float) -> float:
        # By angle the density has no tail: t = sqrt(df) tan(angle).
        angles = np.linspace(0.0, math.atan(t / math.sqrt(df)), _POINTS)
        density = np.cos(angles) ** (df - 1)
        return 0.5 + scale * math.sqrt(df) * float(np.trapezoid(density, angles))

    low, high = 0.0, 1.0
    while below(high) < share:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < share else (low, middle)
    return (low + high) / 2
