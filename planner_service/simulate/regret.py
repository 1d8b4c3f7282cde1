"""Regret of a run in other terms than lost throughput: the bandit's own loss, and tables."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from planner_service.simulate.acceptance import Acceptance
from planner_service.simulate.run import Result
from planner_service.sums import Estimator

Floats = NDArray[np.float64]


def own_loss_regret(result: Result, estimator: Estimator) -> Floats:
    """[steps]: regret so far in the loss of policy `nightjar` (arXiv 2512.22420).

    The loss of a step is its expected seconds per token per request, and, where speculation
    starts again, what catching up with all stale tokens costs, divided by gamma. The rival is
    the gamma of least summed loss for each batch size, with hindsight. Meant for a stationary
    mixture: of any other the one at step 0 counts.

    Args:
        result: A run.
        estimator: What "expected" means: the mean of per-step ratios, as published, or the
            ratio of the means.
    """
    steps = np.arange(result.num_steps)
    rows = result.batch_size[:, None]
    if estimator == "mean_of_ratios":
        per_token = np.empty_like(result.arm_us)
        for size in np.unique(result.batch_size).tolist():
            at = result.batch_size == size
            per_token[at] = [
                mean_inverse(result.scenario.acceptance, size, gamma)
                for gamma in range(result.arm_us.shape[1])
            ]
    else:
        per_token = rows / result.arm_tokens
    losses = result.arm_us * per_token / 1e6
    best = np.zeros(result.num_steps, np.int64)
    for size in np.unique(result.batch_size).tolist():
        at = result.batch_size == size
        best[at] = np.argmin(losses[at].sum(axis=0))
    truth = result.scenario.true_cost(result.seed)
    starts = np.flatnonzero((result.gamma[1:] > 0) & (result.gamma[:-1] == 0)) + 1
    own = losses[steps, result.gamma]
    for step in starts.tolist():
        stale = float(result.sum_stale_tokens[step])
        switching_us = truth.catching_up_us(stale, float(result.batch_size[step]))
        own[step] += switching_us / 1e6 / result.gamma[step]
    return np.cumsum(own - losses[steps, best])


def mean_inverse(acceptance: Acceptance, num_rows: int, gamma: int) -> float:
    """Mean of rows / emitted tokens over steps, each row's class drawn from the first mixture.

    The distribution of the sum over rows is the power of one row's characteristic function.
    """
    shares = np.array(acceptance.shares(0))
    reached = np.concatenate([[1.0], shares @ acceptance.prefixes[:, :gamma], [0.0]])
    one_row = -np.diff(reached)  # chance of so many accepted drafts
    length = num_rows * gamma + 1
    summed = np.fft.irfft(np.fft.rfft(one_row, 2 * length) ** num_rows, 2 * length)[:length]
    return float((np.clip(summed, 0, None) * num_rows / (num_rows + np.arange(length))).sum())


def loglog_slope(regret: Floats, first: int, number: int = 24) -> float:
    """Slope of log(regret) over log(step) from step `first` on; 1 is linear, below sublinear.

    A least-squares line through points that lie evenly on the logarithmic axis; NaN where the
    regret is not positive at some of them.
    """
    points = np.unique(np.geomspace(first, len(regret), number).astype(int))
    values = regret[points - 1]
    if len(points) < 2 or not (values > 0).all():
        return float("nan")
    return float(np.polyfit(np.log(points), np.log(values), 1)[0])


def best_table(results: Sequence[Result], edges: Sequence[int]) -> list[int]:
    """Gamma of least lost throughput for each range of batch sizes, with hindsight.

    Args:
        results: Runs whose contexts count, of a policy that switches little.
        edges: First batch size of each range, ascending, from 1.
    """
    ranges = [np.digitize(result.batch_size, edges) - 1 for result in results]
    num_gammas = results[0].arm_us.shape[1]
    tokens, us = (np.zeros((len(edges), num_gammas)) for _ in range(2))
    for result, at in zip(results, ranges, strict=True):
        # Weighted by the optimum, a step counts as much as the time that it could have saved.
        np.add.at(us, at, (result.arm_us + result.arm_prefill_us) * result.optimal_theta[:, None])
        np.add.at(tokens, at, result.arm_tokens)
    ran = us[:, 0] > 0
    best = np.zeros(len(edges), int)
    best[ran] = np.argmax(tokens[ran] / us[ran], axis=1)
    return [int(gamma) for gamma in best]
