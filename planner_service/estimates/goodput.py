"""Tokens per second that each gamma is expected to yield in one context, and may well yield."""

from __future__ import annotations

import math
from collections.abc import Sequence

from planner_service.context import Context
from planner_service.estimates.model import Beyond, Model
from planner_service.sums import Stats
from planner_service.switching import predict_us, step_cost

MAX_STEP_TOKENS = 1024  # that a step catches up, at most, in the workers' default


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
        workload, cost, rows = model.workload, step_cost(stats), max(1, context.batch_size)
        if workload.draft_prompts_us >= 0:
            prompts_us, prefill_us = workload.draft_prompts_us, 0.0
        elif cost is not None:
            # The draft computes prompts as it catches up. That is measured at gamma 0 too, unlike
            # its prefill, which is mostly put off there and would make speculation look free.
            prompts_us, prefill_us = cost.fixed, workload.prompt_tokens * cost.per_token
        else:
            prompts_us, prefill_us = 0.0, stats.draft_prefill_us_per_token
        self._rows = rows
        self._beyond = Beyond(
            workload.drafting_share, prompts_us, workload.prompt_steps, prefill_us
        )

    def rates(self, switching_us: float = 0.0, tokens: Sequence[float] = ()) -> list[float]:
        """By gamma; of `tokens` a row and step if given, else as estimated."""
        rates = [1 / self.us[0]]
        share, prompts_us, prompt_steps, prefill_us, _ = self._beyond
        known = tokens or self._model.acceptance.tokens
        for drafted, step_us in zip(known[1:], self.us[1:], strict=False):
            emitted = 1 + share * (drafted - 1)
            num_emitted = self._rows * emitted
            more_us = switching_us + prefill_us * num_emitted
            more_us -= prompts_us * math.expm1(-prompt_steps * num_emitted)
            rates.append(emitted / (step_us + more_us))
        return rates

    def table(self, largest: int, switching_us: float) -> dict[int, tuple[int, int]]:
        """Best gamma of all buckets; switching costs as much a row as it does here."""
        beyond = self._beyond._replace(switching_us=switching_us / self._rows).coarse()
        return self._model.table(self._context.max_batch_size, largest, beyond)

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

    def expected_gain(self, rates: Sequence[float], gamma: int, best: int) -> float:
        """Share by which knowing a gamma's rate may be expected to raise the best one's.

        Rates are lognormal, as uncertain as `worth_trying` takes them (expected improvement).
        """
        tokens, high = self._model.acceptance
        factor = self._model.time_factors(self._context, best)[gamma]
        spread = math.log(high[gamma] / tokens[gamma] / factor) / self._model.optimism_sds
        worse = math.log(rates[best] / rates[gamma])
        if spread <= 0:
            return max(0.0, -worse)
        z = worse / spread
        density = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
        return spread * density - worse * math.erfc(z / math.sqrt(2)) / 2

    def unmeasured(self, num_gammas: int, best: int, factor: float) -> list[int]:
        """Gammas whose time, measured against the best one's, may well be less than by a factor."""
        factors = self._model.time_factors(self._context, best)[:num_gammas]
        return [gamma for gamma, low in enumerate(factors) if low < factor]

    def lately(self) -> list[float]:
        """Rates if drafts went on being accepted as in the rows of the last step that drafted."""
        return self.rates(tokens=self._model.tokens_lately(self._rows))

    @property
    def stale_tokens(self) -> int:
        """Stale tokens beyond the one or two that a row lacks after any step."""
        return max(0, self._context.sum_stale_tokens - 2 * self._context.batch_size)

    @property
    def catch_up_steps(self) -> float:
        """Steps until all rows draft."""
        budget = max(MAX_STEP_TOKENS - self._rows, MAX_STEP_TOKENS // 4)
        return self.stale_tokens / budget

    def switching_us(self, most_tokens: float = math.inf) -> float:
        """Cost of the catch-up that drafting now would need, of so many tokens at most."""
        stale_tokens = min(self.stale_tokens, most_tokens)
        if not stale_tokens:
            return 0.0
        # Until it has caught up, half of the rows in the mean pay for drafts that are not theirs.
        waiting_us = max(0.0, self.us[:2][-1] - self.us[0]) / 2
        waiting_us *= self.catch_up_steps * stale_tokens / self.stale_tokens
        return predict_us(self._stats, stale_tokens, self._rows) + waiting_us
