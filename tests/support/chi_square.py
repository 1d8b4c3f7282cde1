"""Pearson's chi-square test, without another dependency."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import numpy.typing as npt


def p_value(observed: npt.ArrayLike, expected: npt.ArrayLike) -> float:
    """Probability of counts at least this far off, by Wilson and Hilferty's approximation.

    Cells that expect fewer than 5 are joined into one.
    """
    counts, means = np.asarray(observed, float), np.asarray(expected, float)
    assert math.isclose(counts.sum(), means.sum(), rel_tol=1e-6)
    rare = means < 5
    if rare.any():
        counts = np.append(counts[~rare], counts[rare].sum())
        means = np.append(means[~rare], means[rare].sum())
    cells = means > 0
    assert counts[~cells].sum() == 0, "a cell that cannot occur has occurred"
    counts, means = counts[cells], means[cells]
    statistic = float(((counts - means) ** 2 / means).sum())
    freedom = len(counts) - 1
    z = (statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))
    return 1 - NormalDist().cdf(z / math.sqrt(2 / (9 * freedom)))
