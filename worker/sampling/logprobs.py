"""Log-probabilities of tokens, from the target's logits before any processor.

In float32, natural logarithm, temperature 1, row by row in a fixed order: a position's values
depend on its logits alone, to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Float32s = npt.NDArray[np.float32]
Int32s = npt.NDArray[np.int32]


def read(
    logits: Float32s, token_ids: Sequence[int], num_top: int
) -> tuple[Float32s, Int32s, Float32s]:
    """Log-probabilities of tokens, and of the likeliest at their positions.

    Args:
        logits: [m, vocab], finite or -inf in each row's maximum; left as they are.
        token_ids: [m], of the tokens that stand at these positions.
        num_top: Alternatives to report; k is the least of it and the vocabulary.

    Returns:
        Chosen [m]; ids [m, k] of the likeliest, best first, of equals the lowest id first;
        theirs [m, k].
    """
    num_lines, vocab_size = logits.shape
    k = min(num_top, vocab_size)
    chosen = np.empty(num_lines, np.float32)
    top_ids = np.empty((num_lines, k), np.int32)
    top = np.empty((num_lines, k), np.float32)
    with np.errstate(under="ignore"):
        for line, (row, token_id) in enumerate(zip(logits, token_ids, strict=True)):
            z = row - row.max()
            norm = np.log(np.exp(z).sum())  # the largest term is 1: at least 0
            chosen[line] = z[token_id] - norm
            if k:
                ids = top_ids[line] = _likeliest(row, k)
                top[line] = z[ids] - norm
    return chosen, top_ids, top


def _likeliest(row: Float32s, k: int) -> npt.NDArray[np.intp]:
    """Ids of the k largest, largest first; of equals the lowest ids."""
    least = np.partition(row, row.size - k)[row.size - k]
    ids = np.flatnonzero(row >= least)  # ascending; ties with the last may make it more than k
    order = np.argsort(-row[ids], kind="stable")
    return ids[order[:k]]
