"""The optimum that regret is counted against: who knows the true costs and the rows' chances.

At each step it takes the gamma of most expected tokens per expected microsecond. A draft must
have prefilled a prompt before it speculates: gamma > 0 is chosen at what that costs a step in the
long run, and pays it at the step after the prompts came. Catching up after gamma 0 the optimum
never pays.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from planner_service.simulate.arrivals import Lengths
from planner_service.simulate.cost import CostTable
from planner_service.simulate.link import Ran, Word
from planner_service.simulate.rows import Rows

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_BUDGET = 1024  # draft prefill of a step


def best_gammas(arm_us: Floats, arm_tokens: Floats, arm_prefill_us: Floats) -> Ints:
    """[steps]: the gamma of most tokens per microsecond; arguments are [steps, gammas]."""
    best: Ints = np.argmax(arm_tokens / (arm_us + arm_prefill_us), axis=1)
    return best


def prefill_us(arm_tokens: Floats, truth: CostTable, lengths: Lengths) -> Floats:
    """[steps, gammas]: microseconds of draft prefill a step in the long run; 0 at gamma 0."""
    joining = arm_tokens / lengths.mean_output  # requests a step
    forwards = 1 - np.exp(-joining * max(1.0, lengths.mean_prompt / _BUDGET))
    each = truth.catch_up_us_per_token * lengths.mean_prompt + truth.catch_up_us_per_row
    cost = forwards * truth.catch_up_us + joining * each
    cost[:, 0] = 0.0
    return cost


class Clairvoyant:
    """Takes the optimum at each step, whatever switching costs."""

    def look_at(self, rows: Rows, truth: CostTable, lengths: Lengths, max_gamma: int) -> None:
        """Know the rows and the truth."""
        self._rows, self._truth, self._lengths = rows, truth, lengths
        self._max_gamma = max_gamma

    def choose(self, batch_size: int, num_kv_tokens: int) -> Word:
        """The best gamma for the rows that are there."""
        sums = self._rows.expected_sums(self._max_gamma)
        tokens = batch_size + np.concatenate([[0.0], np.cumsum(sums)])[None, :]
        us = self._truth.steps_us(np.array([batch_size]), np.array([num_kv_tokens]))
        prefill = prefill_us(tokens, self._truth, self._lengths)
        return Word(int(best_gammas(us[:, : self._max_gamma + 1], tokens, prefill)[0]))

    def ran(self, step: Ran) -> None:
        """Nothing is left to learn."""
