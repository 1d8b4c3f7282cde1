"""Which drafts of a batch are verified, where rows draft more than that."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import itemgetter


def likeliest(log_probabilities: Sequence[Sequence[float]], capacity: int) -> list[int]:
    """How many of each row's drafts are among the `capacity` likeliest of all (TETRIS).

    A draft is as likely as its row's drafts up to it together: sums of log-probabilities fall
    along a row, so what is taken of it is a prefix, and taking the largest sums one by one is
    optimal (Wu et al. 2025, arXiv 2502.15197). Ties go to the lowest (position, row).

    Args:
        log_probabilities: By row and draft, each at most 0.
        capacity: Drafts that may be taken; all are if there are fewer.
    """
    sums = [list(accumulate(row)) for row in log_probabilities]
    longest = max(map(len, sums), default=0)
    drafts = [
        (row[position], index)
        for position in range(longest)
        for index, row in enumerate(sums)
        if position < len(row)
    ]
    drafts.sort(key=itemgetter(0), reverse=True)  # stable, in reverse too: ties stay as listed
    taken = [0] * len(sums)
    for _, index in drafts[:capacity]:
        taken[index] += 1
    return taken
