"""Policy `model_guided`: a measured model of acceptance and step time, and few experiments.

Tokens by gamma follow from acceptance by draft position, which every step measures for all
shorter gammas at once; step time follows from a fit over batch size, gamma and KV tokens. The
gamma of most tokens per second is run:

    rate(gamma) = batch * tokens(gamma)
                  / (time(batch, gamma, KV) + [previous gamma is 0 and gamma > 0] * switching / h)

with h the steps that speculation has tended to stay on. An experiment is made only where it can
change the decision: with a set probability one of the gammas whose rate may well exceed the best
one's is drawn for a few steps. At gamma 0, which teaches no acceptance, gamma 1 is probed for one
step at intervals that keep its cost below a set share.

The estimators are those of SmartSpec (arXiv 2406.14066) in spirit: a goodput model; the rest,
forgetting, change detection, contexts with KV tokens and rationed experiments, is Nightjar's own.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import NamedTuple

from planner_service.context import MAX_GAMMA, Context, Outcome
from planner_service.estimates.model import GRID, Model, sums
from planner_service.policies.policy import Choice, Parameter, Policy, PolicySpec
from planner_service.session import Session
from planner_service.sums import Stats, observe
from planner_service.switching import predict_us

NAME = "model_guided"
HOLD_STEPS = 16
UNSURE_HOLD_STEPS = 4  # while experiments are worth making
EXPERIMENT_STEPS, PROBE_STEPS, SECOND_PROBE_STEPS, SECOND_PROBE_AFTER = 2, 1, 4, 8
DOUBT_SHARE = 0.02  # of decisions, to trials that the model sees no reason for
MARGIN = 0.02  # of the rate, that an experiment must promise
OPTIMISM_SDS = 1.5
# At gamma 0 a probe must be able to pay if acceptance is as good as this.
GOOD_TOKENS = tuple(sum(0.9**i for i in range(gamma + 1)) for gamma in range(MAX_GAMMA + 1))
MAX_PROBE_TOKENS = 1024  # that a step catches up, at most, in the workers' default
MAX_PROBE_INTERVAL = 1000.0
FIRST_ON_STEPS, MAX_ON_STEPS = 64.0, 4096.0
_MOST = 1e9


class Memory(NamedTuple):
    """What a stream remembers."""

    since_draft: float = 0.0  # steps since something was drafted
    favoured: float = 0.0  # 1 if, switching apart, speculation was best when last asked
    # Steps in which it was, and how often they began; the older count less. Not the steps that
    # speculated: a switch that seems dear would then keep itself from ever being made.
    on_steps: float = 0.0
    on_runs: float = 0.0

    @property
    def on_length(self) -> float:
        """Steps that speculation tends to stay best."""
        return (self.on_steps + FIRST_ON_STEPS) / (self.on_runs + 1)

    def after(self, num_steps: int, gamma: int) -> Memory:
        """Once steps ran with a gamma."""
        since_draft = min(self.since_draft + num_steps, _MOST) if gamma == 0 else 0.0
        if not self.favoured:
            return self._replace(since_draft=since_draft)
        kept = 1.0 if self.on_steps < MAX_ON_STEPS else 0.5
        return Memory(since_draft, 1.0, kept * self.on_steps + num_steps, kept * self.on_runs)

    def judged(self, favoured: bool) -> Memory:
        """Once it is known whether speculation is best now, switching apart."""
        begins = favoured and not self.favoured
        return self._replace(favoured=float(favoured), on_runs=self.on_runs + begins)


class ModelGuided(Policy):
    """Goodput by a measured model, with rationed experiments."""

    def __init__(self, gamma_max: int, experiment_share: float, probe_cost: float) -> None:
        self._gamma_max = gamma_max
        self._experiment_share = experiment_share
        self._probe_cost = probe_cost
        self._model = Model(NAME, gamma_max, optimism_sds=OPTIMISM_SDS)

    def update(self, stats: Stats, context: Context, gamma: int, outcome: Outcome) -> Stats:
        """Counts by position, and the time of the cell that ran."""
        learned = observe(context, gamma, outcome)
        if context.feasible_max_gamma == 0:
            return learned
        own = sums(NAME, stats, context, gamma, outcome)
        return learned._replace(own={**learned.own, **own} if learned.own else own)

    def select(
        self, context: Context, stats: Stats, session: Session, rng: random.Random
    ) -> tuple[Choice, Session]:
        """The best gamma, an experiment, or a probe."""
        memory = _memory(session).after(sum(session.ran.values()), session.previous_gamma)
        model = self._model
        model.read(stats)
        largest = min(self._gamma_max, context.max_gamma)
        feasible = min(largest, context.feasible_max_gamma)
        settled = self._rates(context, stats, 0.0)
        memory = memory.judged(max(settled[1 : feasible + 1], default=0.0) > settled[0])
        stale_us = _switching_us(context, stats)
        rates = self._rates(context, stats, stale_us / memory.on_length) if stale_us else settled
        best = max(range(largest + 1), key=rates.__getitem__)
        gamma = exploit = max(range(feasible + 1), key=rates.__getitem__)
        off = session.previous_gamma == 0 or _stale_tokens(context) > 0
        hold, explored, propensity = HOLD_STEPS, False, 1.0
        if feasible > 0:
            if off and exploit == 0:
                trials, share, hold, trial_hold = self._probes(
                    context, stats, memory, rates[: feasible + 1]
                )
            else:
                trials = self._worth_trying(context, rates[: feasible + 1], exploit)
                share, trial_hold = self._experiment_share, EXPERIMENT_STEPS
                hold = UNSURE_HOLD_STEPS if trials else HOLD_STEPS
                if not trials:
                    trials = [other for other in range(feasible + 1) if other != exploit]
                    share = min(share, DOUBT_SHARE)
            if trials and share > 0:
                explored, propensity = rng.random() < share, 1 - share
                if explored:
                    gamma, propensity, hold = rng.choice(trials), share / len(trials), trial_hold
        table = model.table(context.max_batch_size, largest)
        choice = Choice(gamma, best, hold, explored, propensity, table, GRID)
        return choice, Session(gamma, {0: memory})

    def _rates(self, context: Context, stats: Stats, switching_us: float) -> list[float]:
        """Tokens per microsecond and row, by gamma."""
        rows = max(1, context.batch_size)
        prefill_us = rows * stats.draft_prefill_us_per_token
        us = self._model.step_us(context)
        rates = [1 / us[0]]
        for tokens, step_us in zip(self._model.acceptance.tokens[1:], us[1:], strict=False):
            rates.append(tokens / (step_us + switching_us + tokens * prefill_us))
        return rates

    def _worth_trying(self, context: Context, rates: Sequence[float], best: int) -> list[int]:
        """Gammas whose rate may well exceed the best one's."""
        factors = self._model.time_factors(context.batch_size, best)
        tokens, high, _ = self._model.acceptance
        needed = rates[best] * (1 + MARGIN)
        return [
            gamma
            for gamma, rate in enumerate(rates)
            if gamma != best and rate * high[gamma] / tokens[gamma] / factors[gamma] > needed
        ]

    def _probes(
        self, context: Context, stats: Stats, memory: Memory, rates: Sequence[float]
    ) -> tuple[list[int], float, int, int]:
        """What to try while plain decoding is best.

        Trying means to catch up, so it waits until that costs a small share of the time; but
        where the last probe went so well that speculation might pay, a longer one follows soon.

        Returns:
            Gammas, the probability of trying one, steps to wait if none is tried, and to try.
        """
        us = self._model.step_us(context)
        drafting = range(1, len(rates))
        trials = self._worth_trying(context, rates, 0)
        if not trials and any(GOOD_TOKENS[g] / us[g] > rates[0] for g in drafting):
            trials = [1]
        step_us = max(0.0, us[1] - us[0]) + _switching_us(context, stats, MAX_PROBE_TOKENS)
        interval = min(step_us / (self._probe_cost * us[0]), MAX_PROBE_INTERVAL)
        steps = PROBE_STEPS
        lately = self._model.acceptance.tokens_lately
        if any(lately[g] / us[g] > rates[0] * (1 + MARGIN) for g in drafting):
            interval, steps = min(interval, SECOND_PROBE_AFTER), SECOND_PROBE_STEPS
        left = interval - memory.since_draft
        return trials, float(left <= 0), max(1, min(HOLD_STEPS, math.ceil(left))), steps


def _switching_us(context: Context, stats: Stats, most_tokens: float = math.inf) -> float:
    """Cost of the catch-up that drafting now would need."""
    stale_tokens = min(_stale_tokens(context), most_tokens)
    return predict_us(stats, stale_tokens, context.batch_size) if stale_tokens else 0.0


def _stale_tokens(context: Context) -> int:
    """Stale tokens beyond the one or two that a row lacks after any step."""
    return max(0, context.sum_stale_tokens - 2 * context.batch_size)


def _memory(session: Session) -> Memory:
    """A stream's memory; a fresh one where it is not ours."""
    numbers = session.numbers.get(0)
    if numbers is None or len(numbers) != len(Memory._fields):
        return Memory()
    if session.foreign and not all(0 <= number <= _MOST for number in numbers):
        return Memory()
    return Memory(*numbers)


SPEC = PolicySpec(
    name=NAME,
    summary="Computes the best gamma from measured acceptance and step times; tries little.",
    parameters=(
        Parameter(
            name="gamma_max",
            kind="int",
            default=5,
            minimum=0,
            maximum=MAX_GAMMA,
            help="largest gamma to use",
        ),
        Parameter(
            name="experiment_share",
            kind="float",
            default=0.3,
            minimum=0,
            maximum=1,
            help="probability of a trial where one may change the decision; 0 for none",
        ),
        Parameter(
            name="probe_cost",
            kind="float",
            default=0.015,
            minimum=0.0001,
            maximum=1,
            help="share of time that probes may cost while plain decoding is best",
        ),
    ),
    make=lambda values: ModelGuided(
        int(values["gamma_max"]), float(values["experiment_share"]), float(values["probe_cost"])
    ),
)
