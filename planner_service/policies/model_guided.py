"""Policy `model_guided`: a measured model of acceptance and step time, and few experiments.

Tokens by gamma follow from acceptance by draft position, which every step measures for all
shorter gammas at once; step time follows from a fit over batch size, gamma and KV tokens. The
gamma of most tokens per second is run:

    rate(gamma) = batch * tokens(gamma)
                  / (time(batch, gamma, KV) + [gamma > 0] * (catch-up / h + draft prefill))

with catch-up what the stale tokens take, and h the steps that speculation tends to stay best. An
experiment is made only where it can change the decision: with a set probability one of the gammas
whose rate may well exceed the best one's is drawn for a few steps. At gamma 0, which teaches no
acceptance, gamma 1 is probed for one step at intervals that keep its cost below a set share; what
steps of a gamma take is tried there once the gain that is expected of knowing it exceeds its cost.

The estimators are those of SmartSpec (arXiv 2406.14066) in spirit: a goodput model; the rest,
forgetting, change detection, contexts with KV tokens and rationed experiments, is Nightjar's own.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from planner_service.context import MAX_GAMMA, Context, Outcome
from planner_service.estimates.goodput import MAX_STEP_TOKENS, Goodput
from planner_service.estimates.model import GRID, Model, sums
from planner_service.observation import observe
from planner_service.policies.policy import (
    IDLE_HOLD_STEPS,
    Choice,
    Parameter,
    Policy,
    PolicySpec,
    gamma_max,
)
from planner_service.session import Session
from planner_service.sums import Stats

NAME = "model_guided"
HOLD_STEPS = 16
UNSURE_STEPS = 4  # while experiments are worth making
EXPERIMENT_STEPS, PROBE_STEPS, SECOND_PROBE_STEPS, SECOND_PROBE_AFTER = 2, 1, 4, 8
# Of decisions, to trials that the model sees no reason for: of gammas whose time is known to such
# a factor, and of those whose time is not.
DOUBT_SHARE, UNMEASURED_SHARE, UNMEASURED_FACTOR = 0.02, 0.15, 0.8
MARGIN = 0.02  # of the rate, that an experiment must promise
OPTIMISM_SDS = 1.5
# At gamma 0 a probe must be able to pay if acceptance is as good as this.
GOOD_TOKENS = tuple(sum(0.9**i for i in range(gamma + 1)) for gamma in range(MAX_GAMMA + 1))
MAX_PROBE_INTERVAL = 1000.0
LEAST_GAIN = 0.4  # by such tokens, as a share of the rate; below it probes get no rarer
LASTING_STEPS = 2500.0  # that the time of a step is of use, once it was measured
FIRST_ON_STEPS, MAX_ON_STEPS = 64.0, 4096.0
MAX_MODELS = 64
_MOST = 1e9


class Memory(NamedTuple):
    """What a stream remembers."""

    since_draft: float = 0.0  # steps since something was drafted
    favoured: float = 0.0  # 1 if, switching apart, speculation was best when last asked
    # Steps in which it was, and how often they began; the older count less. Not the steps that
    # speculated: a switch that seems dear would then keep itself from ever being made.
    on_steps: float = 0.0
    on_runs: float = 0.0
    # What was drawn last, and steps for which it still holds: in whatever bucket, since a batch
    # at a bucket's edge would otherwise end a trial, and draw another, at every step.
    left: float = 0.0
    trial: float = -1.0  # gamma; -1: the best one
    propensity: float = 1.0

    @property
    def on_length(self) -> float:
        """Steps that speculation tends to stay best."""
        return (self.on_steps + FIRST_ON_STEPS) / (self.on_runs + 1)

    def after(self, num_steps: int, gamma: int) -> Memory:
        """Once steps ran with a gamma."""
        kept = 1.0 if self.on_steps < MAX_ON_STEPS else 0.5
        return self._replace(
            since_draft=min(self.since_draft + num_steps, _MOST) if gamma == 0 else 0.0,
            on_steps=kept * self.on_steps + (num_steps if self.favoured else 0),
            on_runs=kept * self.on_runs,
            left=max(0.0, self.left - num_steps),
        )

    def drawn(
        self,
        trials: Sequence[int],
        share: float,
        rng: random.Random,
        trial_steps: float,
        other_steps: float,
    ) -> Memory:
        """With probability `share` one of the trials for some steps, else the best for others."""
        if trials and rng.random() < share:
            chosen = float(rng.choice(trials))
            return self._replace(left=trial_steps, trial=chosen, propensity=share / len(trials))
        return self._replace(left=other_steps, trial=-1.0, propensity=1 - share if trials else 1.0)


class ModelGuided(Policy):
    """Goodput by a measured model, with rationed experiments."""

    def __init__(self, gamma_max: int, experiment_share: float, probe_cost: float) -> None:
        self._gamma_max = gamma_max
        self._experiment_share = experiment_share
        self._probe_cost = probe_cost
        self._models: OrderedDict[str, Model] = OrderedDict()  # memos, by profile

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
        model = self._model(stats)
        largest = min(self._gamma_max, context.max_gamma)
        feasible = min(largest, context.feasible_max_gamma)
        goodput = Goodput(model, context, stats)
        rates = goodput.rates()
        favoured = float(feasible > 0 and max(rates[1 : feasible + 1]) > rates[0])
        if favoured != memory.favoured:
            memory = memory._replace(favoured=favoured, on_runs=memory.on_runs + favoured)
        switching_us = 0.0
        if stale := goodput.stale_tokens:
            switching_us = goodput.switching_us() / memory.on_length
            rates = goodput.rates(switching_us)
        best = rates.index(max(rates[: largest + 1]))
        del rates[feasible + 1 :]
        exploit = best if best <= feasible else rates.index(max(rates))
        if memory.trial > feasible:  # it cannot run any more: another is drawn
            memory = memory._replace(left=0.0, trial=-1.0, propensity=1.0)
        if memory.left == 0 and feasible > 0:
            if exploit == 0 and (stale or session.previous_gamma == 0):
                memory = self._probe(goodput, memory, rates, rng)
            else:
                memory = self._draw(goodput, memory, rates, exploit, rng)
        explored = 0 <= memory.trial <= feasible
        gamma = int(memory.trial) if explored else exploit
        hold = min(HOLD_STEPS, math.ceil(memory.left)) or IDLE_HOLD_STEPS
        if explored and gamma > 1 and goodput.catch_up_steps >= 1:  # by the cheapest drafts
            gamma, hold = 1, min(hold, math.ceil(goodput.catch_up_steps))
        table = goodput.table(largest, switching_us)
        choice = Choice(gamma, best, hold, explored, memory.propensity, table, GRID)
        return choice, Session(gamma, {0: memory})

    def _model(self, stats: Stats) -> Model:
        model = self._models.get(stats.profile_key)
        if model is None:
            model = Model(NAME, self._gamma_max, optimism_sds=OPTIMISM_SDS)
            self._models[stats.profile_key] = model
            if len(self._models) > MAX_MODELS:
                self._models.popitem(last=False)
        model.read(stats)
        return model

    def _draw(
        self,
        goodput: Goodput,
        memory: Memory,
        rates: Sequence[float],
        best: int,
        rng: random.Random,
    ) -> Memory:
        """The best gamma, or with a set probability one that may be better."""
        if goodput.catch_up_steps >= 1:  # before all rows draft, nothing shows what a gamma costs
            return memory.drawn((), 0.0, rng, 0, min(HOLD_STEPS, math.ceil(goodput.catch_up_steps)))
        share = self._experiment_share
        if trials := goodput.worth_trying(rates, best, MARGIN):
            return memory.drawn(trials, share, rng, EXPERIMENT_STEPS, UNSURE_STEPS)
        # The model itself may be wrong, most of all of what never ran at such a batch size.
        doubt = UNMEASURED_SHARE
        trials = goodput.unmeasured(len(rates), best, UNMEASURED_FACTOR)
        if not trials:
            doubt, trials = DOUBT_SHARE, [gamma for gamma in range(len(rates)) if gamma != best]
        return memory.drawn(trials, min(share, doubt), rng, EXPERIMENT_STEPS, HOLD_STEPS)

    def _probe(
        self,
        goodput: Goodput,
        memory: Memory,
        rates: Sequence[float],
        rng: random.Random,
    ) -> Memory:
        """Plain decoding, which is best, or a trial if one is due.

        Trying means to catch up, so it waits until that costs a small share of the time, or of
        what may be gained if that is less; but where the last probe went so well that speculation
        might pay, a longer one follows soon.
        """
        num_gammas, plain_us, behind = len(rates), goodput.us[0], math.ceil(goodput.catch_up_steps)

        def cost_of(gamma: int, steps: int) -> float:
            """In steps of plain decoding; catching up comes first, by drafts of one token."""
            first_us, own_us = (max(0.0, goodput.us[g] - plain_us) for g in (1, gamma))
            us = min(steps, behind) * first_us + max(0, steps - behind) * own_us
            return (us + goodput.switching_us(steps * MAX_STEP_TOKENS)) / plain_us

        # What a gamma costs shows once all rows draft; a step more runs until the next word comes.
        steps, cost = behind + EXPERIMENT_STEPS, 0.0
        trials = goodput.worth_trying(rates, 0, MARGIN)
        if trials:
            gains = {
                gamma: LASTING_STEPS * goodput.expected_gain(rates, gamma, 0)
                - cost_of(gamma, steps + 1)
                for gamma in trials
            }
            trials = [max(trials, key=gains.__getitem__)]
            cost = cost_of(trials[0], steps + 1)
            if gains[trials[0]] < 0:
                trials = []
        interval = cost / self._probe_cost
        again = max(goodput.lately()[:num_gammas]) > rates[0] * (1 + MARGIN)
        good = max(goodput.rates(tokens=GOOD_TOKENS)[:num_gammas]) / rates[0] - 1
        if not trials and good > 0:
            trials, steps = [1], SECOND_PROBE_STEPS if again else PROBE_STEPS
            cost = cost_of(1, steps + 1)
            interval = cost / (self._probe_cost * min(1.0, max(good, LEAST_GAIN)))
        interval = min(interval, MAX_PROBE_INTERVAL)
        if again:
            interval = min(interval, SECOND_PROBE_AFTER)
        wait = interval - memory.since_draft
        share = 1.0 if trials and wait <= 0 else 0.0
        return memory.drawn(trials, share, rng, steps, max(1, min(HOLD_STEPS, math.ceil(wait))))


def _memory(session: Session) -> Memory:
    """A stream's memory; a fresh one where it is not ours."""
    numbers = session.numbers.get(0)
    if numbers is None or len(numbers) != len(Memory._fields):
        return Memory()
    memory = Memory(*numbers)
    if session.foreign:
        plain = min(memory._replace(trial=0.0)) >= 0 and max(memory) <= _MOST
        trial = memory.trial == int(memory.trial) >= -1
        if not (plain and trial and 0 < memory.propensity <= 1):
            return Memory()
    return memory


SPEC = PolicySpec(
    name=NAME,
    summary="Computes the best gamma from measured acceptance and step times; tries little.",
    parameters=(
        gamma_max(5),
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
            default=0.03,
            minimum=0.0001,
            maximum=1,
            help="share of the time that probes may cost while plain decoding is best; the less, "
            "the less speculation could gain",
        ),
    ),
    make=lambda values: ModelGuided(
        int(values["gamma_max"]), float(values["experiment_share"]), float(values["probe_cost"])
    ),
)
