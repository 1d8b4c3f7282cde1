"""Step time as a function of batch size, gamma and KV tokens, learned from few steps.

The logarithm of the time without KV reads is a Gaussian process over (log batch size, gamma): a
level, its change with the batch, what drafting costs at all, a slope in gamma, and a residual of
each gamma that carries over to similar batch sizes alone (Rasmussen and Williams 2006, chapter
2). KV and prompt tokens add a time each, from how step time moves with them inside cells of alike
steps.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from operator import add
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from planner_service.context import MAX_BATCH_SIZE, MAX_GAMMA, Context, Outcome
from planner_service.own_sums import OwnSums

Floats = npt.NDArray[np.float64]

# Edges of cells over batch size, each about a quarter above the last.
BATCH_EDGES = tuple(sorted({*range(1, 9)} | {round(2 ** (k / 3)) for k in range(9, 37)}))
HALF_LIFE = 50_000.0  # steps, of a whole fleet: machines change slowly
# Of a cell, summed over steps: 1, us, batch, KV, KV^2, KV * us; over reports: us^2 / steps, 1; over
# steps again: prompt tokens p, p^2, p * us, p * KV.
NUM_VALUES = 12

# Before anything is known: of log time, what the first draft adds, and each one.
PRIOR_START, PRIOR_SLOPE = 0.15, 0.1
LEVEL_SD, CURVE_SD, START_SD, SLOPE_SD, RESIDUAL_SD = 3.0, 0.5, 0.2, 0.15, 0.2
# In log batch size.
CURVE_LENGTH, START_LENGTH, SLOPE_LENGTH, RESIDUAL_LENGTH = 2.0, 1.5, 1.5, 0.7
GRAIN, MAX_GRAIN = 0.01, 0.05  # of the log of a cell's mean time
CELL_SD = 0.01  # noise of the log of a cell's mean, at least
STEP_SD, STEP_SD_RANGE, STEP_SD_REPORTS = 0.1, (0.02, 0.4), 8.0  # of one step; its prior's weight
CAUGHT_UP_SHARE = 0.8  # of rows, that draft in steps which teach what drafting costs
_MOST = 1e40  # that a sum of ours can be
SLOPE_PRIOR_STEPS = 20.0  # weight of "tokens cost nothing", in steps of the usual spread


class Cell(NamedTuple):
    """Means over alike steps."""

    log_batch: float
    gamma: int
    log_us: float
    num_kv_tokens: float
    num_prompt_tokens: float
    num_steps: float

    def rounded(self, error: float) -> Cell:
        """What must change before a model is fitted anew: knowledge, not noise.

        Args:
            error: Of the mean time, as a share of it.
        """
        grain = min(max(GRAIN, 2.0 ** math.floor(math.log2(error + 1e-9))), MAX_GRAIN)
        return Cell(
            round(self.log_batch, 1 + (self.log_batch > math.log(3))),
            self.gamma,
            round(self.log_us / grain) * grain,
            _coarse(self.num_kv_tokens),
            _coarse(self.num_prompt_tokens),
            2.0 ** round(math.log2(self.num_steps)),
        )


class Spread(NamedTuple):
    """How steps of cells differ inside them: sums of squares and products; adds up over cells."""

    num_steps: float = 0.0
    kv: float = 0.0
    kv_us: float = 0.0
    prompt: float = 0.0
    prompt_us: float = 0.0
    prompt_kv: float = 0.0
    us: float = 0.0  # over reports, scaled to one step: squares of time, and of its logarithm
    relative: float = 0.0
    num_reports: float = 0.0  # less the one that gives the mean

    def plus(self, other: Spread) -> Spread:
        """Of both."""
        return Spread(*map(add, self, other))

    def slopes(self) -> tuple[float, float]:
        """Microseconds that a KV token and a prompt token add to a step; at least 0, rounded."""
        shrink = 1 + SLOPE_PRIOR_STEPS / self.num_steps if self.num_steps > 0 else 1.0
        kv, prompt = self.kv * shrink, self.prompt * shrink
        determinant = kv * prompt - self.prompt_kv**2
        if determinant > 1e-6 * kv * prompt > 0:
            by_kv = (self.kv_us * prompt - self.prompt_us * self.prompt_kv) / determinant
            by_prompt = (self.prompt_us * kv - self.kv_us * self.prompt_kv) / determinant
            if by_kv >= 0 and by_prompt >= 0:
                return _rounded(by_kv), _rounded(by_prompt)
        by_kv = self.kv_us / kv if kv > 0 else 0.0
        by_prompt = self.prompt_us / prompt if prompt > 0 else 0.0
        return _rounded(max(0.0, by_kv)), _rounded(max(0.0, by_prompt))

    @property
    def step_sd(self) -> float:
        """Noise of the log of one step's time; rounded."""
        by_kv, by_prompt = self.slopes()
        explained = by_kv * self.kv_us + by_prompt * self.prompt_us
        noise = max(0.0, 1 - explained / self.us) if self.us > 0 else 1.0
        weight = self.num_reports + STEP_SD_REPORTS
        variance = (self.relative * noise + STEP_SD_REPORTS * STEP_SD**2) / weight
        low, high = STEP_SD_RANGE
        return float(f"{min(max(math.sqrt(variance), low), high):.1g}")


def _rounded(value: float) -> float:
    """To two digits."""
    return float(f"{value:.2g}")


def _coarse(value: float) -> float:
    """To an eighth of an octave."""
    return 2.0 ** (round(8 * math.log2(value)) / 8) if value > 0 else 0.0


def cell_index(batch_size: int) -> int:
    """Index of the batch size's cells."""
    return bisect_right(BATCH_EDGES, batch_size)


def kv_of_cell(context: Context) -> float:
    """KV tokens if the batch were the smallest of its cell, with rows as long as they are.

    So they do not move with the batch: what a larger batch costs is not taken for what KV costs.
    """
    batch = max(1, context.batch_size)
    return context.num_kv_tokens / batch * BATCH_EDGES[cell_index(batch) - 1]


NAMES = tuple(
    tuple(f"time/{index}/{gamma}" for gamma in range(MAX_GAMMA + 1))
    for index in range(len(BATCH_EDGES) + 1)
)


def sums(
    policy: str, clock: float, context: Context, gamma: int, outcome: Outcome
) -> dict[str, OwnSums]:
    """What steps add to their cell, those with prompt tokens too."""
    steps, us = outcome.num_timed_steps, outcome.step_us
    if outcome.mixed_step_us:
        steps, us = outcome.num_steps, us + outcome.mixed_step_us
    batch = context.batch_size
    if not steps or not batch or not us:
        return {}
    if gamma and outcome.num_catch_up_tokens:
        # While rows catch up, only some of them draft, and a step costs less than it will.
        rows = outcome.num_steps * batch
        if not outcome.reached or outcome.reached[0] < CAUGHT_UP_SHARE * rows:
            return {}
    kv, prompt = kv_of_cell(context), float(outcome.num_prefill_tokens)
    values = (
        float(steps),
        float(us),
        float(batch * steps),
        kv * steps,
        kv * kv * steps,
        kv * us,
        us * us / steps,
        1.0,
        prompt,
        prompt * prompt / steps,
        prompt * us / steps,
        prompt * kv,
    )
    name = NAMES[cell_index(batch)][gamma]
    return {f"{policy}/{name}": OwnSums(values, HALF_LIFE, clock)}


class StepCost:
    """A fit to the cells of a profile."""

    def __init__(self, cells: Sequence[Cell], spread: Spread) -> None:
        """Fit; without any cell only the prior is left."""
        self.us_per_kv_token, self.us_per_prompt_token = slopes = spread.slopes()
        self._log_batch = np.array([cell.log_batch for cell in cells])
        self._gamma = np.array([float(cell.gamma) for cell in cells])
        y = np.array([_log_free_us(cell, *slopes) for cell in cells])
        y -= _prior(self._gamma)
        self._mean = float(y.mean()) if cells else 0.0
        variance = spread.step_sd**2
        noise = [variance / cell.num_steps + CELL_SD**2 for cell in cells]
        covariance = _kernel(self._log_batch, self._gamma, self._log_batch, self._gamma)
        self._inverse = np.linalg.inv(covariance + np.diag(noise))
        self._weights = self._inverse @ (y - self._mean)

    def log_us(self, batch_sizes: Floats, largest: int) -> Floats:
        """Log microseconds of a step without its KV reads, [n, largest + 1].

        Args:
            batch_sizes: [n], at least 1.
            largest: Largest gamma.
        """
        gammas = np.tile(np.arange(largest + 1.0), len(batch_sizes))
        at = np.repeat(np.log(batch_sizes), largest + 1)
        k = _kernel(at, gammas, self._log_batch, self._gamma)
        mean: Floats = self._mean + _prior(gammas) + k @ self._weights
        return mean.reshape(len(batch_sizes), largest + 1)

    def covariance(self, batch_sizes: Floats, largest: int) -> Floats:
        """Covariances of `log_us` between the gammas of a batch size, [n, gammas, gammas]."""
        num_gammas = largest + 1
        gammas = np.tile(np.arange(float(num_gammas)), len(batch_sizes))
        at = np.repeat(np.log(batch_sizes), num_gammas)
        k = _kernel(at, gammas, self._log_batch, self._gamma)
        blocks = k.reshape(len(batch_sizes), num_gammas, len(self._gamma))
        solved = (k @ self._inverse).reshape(blocks.shape)
        # Between gammas of one batch size the kernel does not depend on it.
        some = np.zeros(num_gammas)
        prior = _kernel(some, gammas[:num_gammas], some, gammas[:num_gammas])
        covariance: Floats = prior - solved @ blocks.transpose(0, 2, 1)
        return covariance


def _log_free_us(cell: Cell, us_per_kv_token: float, us_per_prompt_token: float) -> float:
    us = math.exp(cell.log_us)
    free = us - us_per_kv_token * cell.num_kv_tokens - us_per_prompt_token * cell.num_prompt_tokens
    return math.log(max(free, 0.2 * us))


def _prior(gammas: Floats) -> Floats:
    return PRIOR_START * (gammas > 0) + PRIOR_SLOPE * gammas


def _kernel(x: Floats, g: Floats, x2: Floats, g2: Floats) -> Floats:
    apart = np.abs(x[:, None] - x2[None, :])
    slope = SLOPE_SD**2 * np.outer(g, g2) * _matern(apart, SLOPE_LENGTH)
    start = START_SD**2 * np.outer(g > 0, g2 > 0) * _matern(apart, START_LENGTH)
    residual = RESIDUAL_SD**2 * (g[:, None] == g2[None, :]) * _matern(apart, RESIDUAL_LENGTH)
    curve = CURVE_SD**2 * _matern(apart, CURVE_LENGTH)
    covariance: Floats = LEVEL_SD**2 + curve + start + slope + residual
    return covariance


def _matern(apart: Floats, length: float) -> Floats:
    """Correlation of a once differentiable function (Matern, smoothness 3/2)."""
    scaled = apart * (math.sqrt(3) / length)
    correlation: Floats = (1 + scaled) * np.exp(-scaled)
    return correlation


def read_cell(gamma: int, found: OwnSums) -> tuple[Cell, Cell, Spread] | None:
    """A cell, the same rounded, and what its steps tell of their spread; None if it is not ours."""
    if (
        len(found.values) != NUM_VALUES
        or not -_MOST < min(found.values) <= max(found.values) < _MOST
    ):
        return None
    steps, us, rows, kv, kv2, kv_us, us2, reports, prompt, prompt2, prompt_us, prompt_kv = (
        found.values
    )
    if not steps > 0.01:
        return None
    batch, mean_us, mean_kv, mean_prompt = rows / steps, us / steps, kv / steps, prompt / steps
    if not (0.5 <= batch <= MAX_BATCH_SIZE and 1e-3 < mean_us < 1e12):
        return None
    if not (0 <= mean_kv < 1e12 and 0 <= mean_prompt < 1e12):
        return None
    relative = max(0.0, us2 - us * mean_us) / mean_us**2
    error = math.sqrt(relative / max(reports - 1, 1.0) / steps)
    cell = Cell(math.log(batch), gamma, math.log(mean_us), mean_kv, mean_prompt, steps)
    spread = Spread(
        steps,
        max(0.0, kv2 - kv * mean_kv),
        kv_us - us * mean_kv,
        max(0.0, prompt2 - prompt * mean_prompt),
        prompt_us - us * mean_prompt,
        prompt_kv - prompt * mean_kv,
        max(0.0, us2 - us * mean_us),
        relative,
        max(0.0, reports - 1),
    )
    return cell, cell.rounded(error), spread
