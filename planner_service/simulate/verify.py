"""Which drafts of a step are accepted, and how often each position was reached."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner_service.simulate.noise import Noise
from planner_service.simulate.rows import Rows

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]

# Spread of the draft's confidence q around a row's chance: Beta(c * chance, c * (1 - chance)).
# A draft is accepted with chance q, so the confidence is calibrated.
CONCENTRATION = 3.0


class Verified(NamedTuple):
    """Accepted drafts of a step; positions after the end of a row never count."""

    by_row: Ints  # [rows]: accepted drafts
    reached: list[int]  # by position
    accepted: list[int]  # by position
    expected: float  # tokens in the mean, one more a row included; -1: what `Rows` says


def verify(rows: Rows, noise: Noise, gamma: int, ready: Bools | None) -> Verified:
    """Every row drafts `gamma` tokens; those that are not ready, None: no such, draft none."""
    num_rows = len(rows)
    # One uniform a row: its first i + 1 drafts are all accepted when it lies below their chance.
    hits = noise.uniforms(num_rows) < rows.chances[:gamma]
    short = rows.short_rows(gamma)
    if ready is not None:
        hits &= ready
    if short is not None:
        hits[:, short[0]] &= short[1]
    by_row: Ints = np.add.reduce(hits, axis=0, dtype=np.int64)
    accepted: list[int] = np.add.reduce(hits, axis=1, dtype=np.int64).tolist()
    reached = [num_rows if ready is None else int(np.count_nonzero(ready)), *accepted[:-1]]
    if short is not None:
        before = np.ones((gamma, len(short[0])), bool)
        before[0] = True if ready is None else ready[short[0]]
        before[1:] = hits[:-1, short[0]]
        for i, missing in enumerate((before & ~short[1]).sum(axis=1).tolist()):
            reached[i] -= missing
    expected = -1.0
    if ready is not None:
        expected = num_rows + float(rows.chances[:gamma][_drafted(rows, gamma, ready)].sum())
    return Verified(by_row, reached, accepted, expected)


def verify_likeliest(
    rows: Rows, noise: Noise, gamma: int, num_extra: int, ready: Bools | None
) -> Verified:
    """Rows draft `num_extra` tokens more; the gamma a row likeliest of all are verified.

    Likeliest by cumulative draft log-probability (TETRIS, arXiv 2502.15197).
    """
    drafted = _drafted(rows, gamma + num_extra, ready)
    chances = rows.chances[: gamma + num_extra]
    before = np.vstack([np.ones((1, len(rows))), chances[:-1]])
    conditional = np.divide(chances, before, out=np.zeros_like(chances), where=before > 0)
    confidences = noise.confidences(conditional, CONCENTRATION)
    scores = np.where(drafted, np.cumsum(np.log(confidences), axis=0), -np.inf)
    num_drafting = len(rows) if ready is None else int(np.count_nonzero(ready))
    capacity = min(gamma * num_drafting, int(np.count_nonzero(drafted)))
    verified = np.zeros(scores.shape, bool)
    if capacity:
        verified.flat[np.argsort(-scores, axis=None, kind="stable")[:capacity]] = True
    accepted = np.logical_and.accumulate(
        noise.uniforms(scores.size).reshape(scores.shape) < confidences
    )
    hits = accepted & verified
    reached = verified.copy()
    reached[1:] &= hits[:-1]
    return Verified(
        hits.sum(axis=0),
        reached.sum(axis=1).tolist(),
        hits.sum(axis=1).tolist(),
        len(rows) + float(np.exp(scores[verified]).sum()),
    )


def _drafted(rows: Rows, gamma: int, ready: Bools | None) -> Bools:
    """[gamma, rows]: whether a row drafts that position."""
    drafted = np.ones((gamma, len(rows)), bool)
    short = rows.short_rows(gamma)
    if short is not None:
        drafted[:, short[0]] = short[1]
    if ready is not None:
        drafted &= ready
    return drafted
