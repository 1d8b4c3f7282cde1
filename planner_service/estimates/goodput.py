"""Tokens per second that each gamma is expected to yield in one context, and may well yield."""

from __future__ import annotations

import math
from collections.abc import Sequence

from planner_service.context import Context
from planner_service.estimates.model import Model
from planner_service.sums import Stats
from planner_service.switching import predict_us, step_cost


class Goodput:
    """A model and what is known, looked at from one context.

    rate(gamma) = tokens(gamma) / (time(batch, gamma, KV) + switching + prefill(gamma))

    in tokens per microsecond and row. Switching is what the caller gives; prefill is what the
    draft takes for the prompts that come along with so many tokens.
    """

    def __init__(self, model: Model, context: Context, stats: Stats) -> None:
        self._model = model
        self._context = context
        self._stats = stats
        self.us = model.step_us(context)  # by gamma
        prompt_tokens, prompt_share, self._drafting_share = model.workload
        cost = step_cost(stats)
        rows = max(1, context.batch_size)
        if cost is None:
            self._fixed_us = 0.0
            self._prefill_us = rows * stats.draft_prefill_us_per_token
        else:
            # The draft computes prompts as it catches up. That is measured at gamma 0 too, unlike
            # its prefill, which is mostly put off there and would make speculation look free.
            self._fixed_us = prompt_share * cost.fixed
            self._prefill_us = rows * prompt_tokens * cost.per_token

    def rates(self, switching_us: float = 0.0, tokens: Sequence[float] = ()) -> list[float]:
        """By gamma; of `tokens` a row and step if given, else as estimated."""
        rates = [1 / self.us[0]]
        extra_us, share = switching_us + self._fixed_us, self._drafting_share
        known = tokens or self._model.acceptance.tokens
        for drafted, step_us in zip(known[1:], self.us[1:], strict=False):
            emitted = 1 + share * (drafted - 1)
            rates.append(emitted / (step_us + extra_us + emitted * self._prefill_us))
        return rates

    def worth_trying(self, rates: Sequence[float], best: int, margin: float) -> list[int]:
        """Gammas whose rate may well exceed the best one's by a share."""
        factors = self._model.time_factors(self._context, best)
        tokens, high = self._model.acceptance
        needed = rates[best] * (1 + margin)
        return [
            gamma
            for gamma, rate in enumerate(rates)
            if gamma != best and rate * high[gamma] / tokens[gamma] / factors[gamma] > needed
        ]

    def unmeasured(self, num_gammas: int, best: int, factor: float) -> list[int]:
        """Gammas whose time, measured against the best one's, may well be less than by a factor."""
        factors = self._model.time_factors(self._context, best)[:num_gammas]
        return [gamma for gamma, low in enumerate(factors) if low < factor]

    def lately(self) -> list[float]:
        """Rates if drafts went on being accepted as in the last few rows."""
        return self.rates(tokens=self._model.tokens_lately())

    @property
    def stale_tokens(self) -> int:
        """Stale tokens beyond the one or two that a row lacks after any step."""
        return max(0, self._context.sum_stale_tokens - 2 * self._context.batch_size)

    def switching_us(self, most_tokens: float = math.inf) -> float:
        """Cost of the catch-up that drafting now would need, of so many tokens at most."""
        stale_tokens = min(self.stale_tokens, most_tokens)
        return predict_us(self._stats, stale_tokens, self._context.batch_size)
