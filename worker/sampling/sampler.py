"""From logits to token ids, row by row in float32 and in a fixed order, for draft and target alike.

A row's id depends on its logits, its parameters and its position alone, never on its
neighbours in the call. Processors apply in this order: temperature, top_k, top_p, min_p.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from worker.messages import SamplingParams
from worker.sampling import noise

Float32s = npt.NDArray[np.float32]

UNUSABLE = -1
# Divided by less, gaps between float32 logits are decided before any noise: greedy, ties too.
GREEDY_UP_TO = 1e-4
_NORMAL = np.float32(np.finfo(np.float32).tiny)


def sample(
    logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
) -> list[int]:
    """Choose a token per row: argmax of log p + Gumbel noise (Gumbel-max), p after processors.

    Sets of tokens are cut by value: tokens that tie with the last one kept are kept too.
    Of equal scores the lowest id wins. Temperatures up to 1e-4 and a top_k of 1 are greedy.

    Args:
        logits: [n, vocab] float32 on the CPU; left as they are.
        params: Of each row's request.
        positions: Absolute index, in its sequence, of the token each row chooses.

    Returns:
        Ids; -1 where a row holds NaN or +inf, or nothing but -inf.
    """
    if logits.dtype != torch.float32 or not len(logits) == len(params) == len(positions):
        raise ValueError("float32 logits and as many parameters and positions as rows")
    rows: Float32s = logits.detach().numpy()
    with np.errstate(over="ignore", under="ignore"):  # -inf and 0 are what is meant
        return [
            _sample_row(row, one, position)
            for row, one, position in zip(rows, params, positions, strict=True)
        ]


def log_probabilities(
    logits: torch.Tensor, params: Sequence[SamplingParams], token_ids: Sequence[int]
) -> list[float]:
    """How likely the tokens are that `sample` chose: log p at the row's temperature, at most 0.

    Of a greedy row it is that of the plain softmax, where temperature would always make it 0.
    top_k, top_p and min_p are left out: they cost more than they tell, since among the tokens
    that they leave they raise every log p alike.

    Args:
        logits: [n, vocab] float32 on the CPU; left as they are.
        params: Of each row's request.
        token_ids: What `sample` chose from these logits; -inf is returned where that is -1.
    """
    rows: Float32s = logits.detach().numpy()
    with np.errstate(over="ignore", under="ignore"):
        return [
            -np.inf if token_id < 0 else _log_probability(row, one, token_id)
            for row, one, token_id in zip(rows, params, token_ids, strict=True)
        ]


def _log_probability(logits: Float32s, params: SamplingParams, token_id: int) -> float:
    z = logits - logits.max()
    if not is_greedy(params):
        z *= np.float32(1 / params.temperature)
    chosen = z[token_id]
    # The largest weight is 1: their sum is at least that, and its logarithm at least 0.
    return float(chosen - np.log(np.exp(z, out=z).sum()))


def is_greedy(params: SamplingParams) -> bool:
    """Whether the largest logit is taken, without noise."""
    return params.temperature <= GREEDY_UP_TO or params.top_k == 1


def _sample_row(logits: Float32s, params: SamplingParams, position: int) -> int:
    best = int(logits.argmax())  # the first NaN, if any; else the lowest id of the largest
    top = logits[best]
    if not np.isfinite(top):
        return UNUSABLE
    if is_greedy(params):
        return best
    z = logits - top
    z *= np.float32(1 / params.temperature)
    kept = _kept(z, params)
    if kept is None:
        z += noise.row(params.seed, position, len(z))
        return int(z.argmax())
    scores = z[kept] + noise.of_tokens(params.seed, position, kept)
    return int(kept[scores.argmax()])


def _kept(z: Float32s, params: SamplingParams) -> npt.NDArray[np.intp] | None:
    """Ids that the processors leave, ascending; None for all. z: [vocab], its maximum is 0."""
    top_k = params.top_k if 0 < params.top_k < len(z) else 0
    if not top_k and params.top_p >= 1 and params.min_p <= 0:
        return None
    weights = np.exp(z)  # p up to a factor; the largest is 1
    if top_k:
        weights[z < _kth_largest(z, top_k)] = 0
    floor = _NORMAL
    if params.top_p < 1:
        floor = max(floor, _nucleus_floor(weights, params.top_p))
    if params.min_p > 0:
        floor = max(floor, np.float32(params.min_p))
    return np.flatnonzero(weights >= floor)


def _kth_largest(z: Float32s, k: int) -> np.float32:
    """The same value as from all of z sorted, found among few candidates where they suffice."""
    for floor in (-8, -24):
        some = z[z >= floor]
        if some.size >= k:
            return np.float32(np.partition(some, some.size - k)[some.size - k])
    return np.float32(np.partition(z, z.size - k)[z.size - k])


def _nucleus_floor(weights: Float32s, top_p: float) -> np.float32:
    """The smallest weight of the fewest largest ones that hold `top_p` of the sum.

    Sorted prefixes are added one by one in float64, so a prefix's sum is the same whether the
    rest was sorted or not: the largest few are tried first, all only where they hold too little.
    """
    goal = top_p * weights.sum(dtype=np.float64)
    for floor in (2**-8, 2**-16, 0):
        falling = np.sort(weights[weights >= floor])[::-1]
        held = np.cumsum(falling, dtype=np.float64)
        index = int(np.searchsorted(held, goal))
        if index < held.size:
            return np.float32(falling[index])
    return np.float32(0)  # rounding put the goal above the sum of all: all stay
