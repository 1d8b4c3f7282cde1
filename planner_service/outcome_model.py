"""What a bin would have given with another arm: tokens and seconds per step, by ridge regression.

The model of the doubly robust estimates. It need not be right, only near: what it gets wrong
the weighted residuals correct. A bin is predicted by a fit that did not see it (cross-fitting).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NUM_FOLDS = 5
# Penalties, in bins: of what all arms share, of an arm's own slopes, of an arm in one bucket.
_SHARED, _ARM, _CELL = 1e-3, 1.0, 2.0


def predict(
    *,
    contexts: Floats,
    buckets: Ints,
    arms: Ints,
    gammas: Floats,
    targets: Floats,
    steps: Floats,
) -> Floats:
    """Predict for each bin and each arm.

    Args:
        contexts: [num_bins, 2], batch size and KV tokens at the draw.
        buckets: [num_bins], from 0.
        arms: [num_bins], index of the arm that was drawn.
        gammas: [num_arms], gamma of each arm.
        targets: [num_bins, num_targets], per step.
        steps: [num_bins], how much each bin counts.

    Returns:
        [num_bins, num_arms, num_targets], per step.
    """
    num_bins, num_arms = len(arms), len(gammas)
    scale = np.maximum(contexts.max(axis=0), 1.0)
    base = np.column_stack([np.ones(num_bins), contexts / scale])  # [num_bins, 3]
    width, num_buckets = base.shape[1], int(buckets.max()) + 1
    size = width * (2 + num_arms) + num_buckets * num_arms
    rows = np.arange(num_bins)

    design = np.zeros((num_bins, size))
    design[:, :width] = base
    design[:, width : 2 * width] = base * gammas[arms, None]
    own = width * (2 + arms)[:, None] + np.arange(width)
    design[rows[:, None], own] = base
    cells = width * (2 + num_arms)
    design[rows, cells + buckets * num_arms + arms] = 1.0
    penalty = np.full(size, _ARM)
    penalty[: 2 * width], penalty[cells:] = _SHARED, _CELL

    weights = (steps / steps.mean())[:, None]
    folds = rows % min(NUM_FOLDS, max(num_bins, 2))
    parts = [np.flatnonzero(folds == fold) for fold in range(int(folds.max()) + 1)]
    grams = [design[part].T @ (weights[part] * design[part]) for part in parts]
    sides = [design[part].T @ (weights[part] * targets[part]) for part in parts]
    gram, side = sum(grams) + np.diag(penalty), sum(sides)

    predicted = np.empty((num_bins, num_arms, targets.shape[1]))
    for part, its_gram, its_side in zip(parts, grams, sides, strict=True):
        solved = np.linalg.solve(gram - its_gram, side - its_side)  # [size, num_targets]
        shared, slope = solved[:width], solved[width : 2 * width]
        arm_own = solved[2 * width : cells].reshape(num_arms, width, -1)
        cell = solved[cells:].reshape(num_buckets, num_arms, -1)
        per_arm = shared + gammas[:, None, None] * slope + arm_own  # [num_arms, 3, num_targets]
        predicted[part] = np.einsum("nw,awt->nat", base[part], per_arm) + cell[buckets[part]]
    return predicted
