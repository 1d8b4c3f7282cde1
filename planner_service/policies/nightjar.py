"""Policy `nightjar`: the bandit of arXiv 2512.22420, one per batch size.

Steps at a batch size come in blocks of H_j = 2^(j-1); a block in bins of floor(sqrt(H_j)), the
last one cut to the block. The b-th bin of a block explores with probability 1/b, uniformly over
the gammas; otherwise it takes the gamma of least loss. The arm is held for the bin.

    loss(gamma) = seconds per token per request
                + [previous gamma is 0 and gamma > 0] * switching cost / gamma

Beyond the paper: the loss is a ratio of sums by default, since the mean of per-step ratios
overrates the loss of long drafts at small batches; draft prefill is charged to gamma > 0; a
stream that is new to a batch size starts in the block that the steps known so far have reached;
sums may forget, and with `restart=test` the policy is ADA-BINGREEDY (see remembered.py). As
published: estimator=mean_of_ratios, discount=1, restart=none, switching_cost=table.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple, cast

from planner_service.context import Context, Outcome
from planner_service.observation import observe
from planner_service.policies.bins import Bin, bins_of
from planner_service.policies.loss import first_or_least, least_loss, nearest
from planner_service.policies.policy import (
    IDLE_HOLD_STEPS,
    Choice,
    Parameter,
    Policy,
    PolicySpec,
    gamma_max,
)
from planner_service.policies.remembered import Remembered
from planner_service.session import Session
from planner_service.sums import Bucket, Estimator, Stats
from planner_service.switching import predict_us, table_us

# After it, a gamma without times has run, and always with prompt tokens, which teach no time: to
# run it first for ever would settle on what is not known.
LAST_FIRST_BLOCK = 6

SWITCHING_US: dict[str, Callable[[Context, Stats], float]] = {
    "measured": lambda at, stats: predict_us(stats, at.sum_stale_tokens, at.batch_size),
    "table": lambda at, stats: table_us(stats, at.max_stale_tokens, at.batch_size),
    "none": lambda at, stats: 0.0,
}


class _Known(NamedTuple):
    """What follows from the sums of one batch size: a memo of a pure function."""

    plain: Bucket  # the sums themselves; with the next, what it was computed from
    wanted: tuple[float, int]  # draft prefill in microseconds a token, largest gamma
    arms: Bucket  # that count
    since: float  # clock of the last restart
    best: tuple[int, int]  # gamma of least loss, twice: the table's row


class Nightjar(Policy):
    """The paper's bandit."""

    def __init__(
        self, gamma_max: int, estimator: Estimator, switching_cost: str, remembered: Remembered
    ) -> None:
        self._gamma_max = gamma_max
        self._estimator = estimator
        self._switching_us = SWITCHING_US[switching_cost]
        self._remembered = remembered
        self._memo: dict[int, _Known] = {}

    def select(
        self, context: Context, stats: Stats, session: Session, rng: random.Random
    ) -> tuple[Choice, Session]:
        """Hold the arm of the bin, or draw the next one."""
        bucket = context.bucket
        largest = min(self._gamma_max, context.max_gamma)
        bins = bins_of(session, largest)
        prefill_us = float(f"{stats.draft_prefill_us_per_token:.3g}")
        table = self._table(stats, bins, prefill_us, largest)
        switching_s = 0.0
        if session.previous_gamma == 0:
            switching_s = self._switching_us(context, stats) / 1e6
        known = self._memo.get(bucket) if bucket in stats.buckets else None
        arms = known.arms if known else {}
        if known and not switching_s:
            best = known.best[0]
        else:
            best = self._best(arms, bucket * prefill_us, largest, switching_s)
        feasible = min(largest, context.feasible_max_gamma)
        if feasible == 0:
            choice = Choice(0, best, IDLE_HOLD_STEPS, False, 1.0, table)
            return choice, Session(0, bins)
        since = known.since if known else 0.0
        held = bins.pop(bucket, None)
        if held is None or held.since != since:
            held = Bin.at(self._remembered.visits(stats, bucket), since)
        if held.arm < 0:
            exploit = best
            if held.block > LAST_FIRST_BLOCK and len(arms) <= largest:
                # Of the gammas that were timed, here or at the nearest batch size.
                near = arms or nearest(stats.buckets, bucket)
                prefill_s = bucket * prefill_us / 1e6
                exploit = best = least_loss(near, largest, prefill_s, switching_s, self._estimator)
            if exploit > feasible:
                exploit = self._best(arms, bucket * prefill_us, feasible, switching_s)
            held = held.draw(exploit, feasible, rng)
        bins[bucket] = held  # last in the dict: most recently decided
        gamma = min(held.arm, feasible)
        hold = held.length - held.position
        choice = Choice(gamma, best, hold, bool(held.explored), held.propensity, table)
        return choice, Session(gamma, bins)

    def update(self, stats: Stats, context: Context, gamma: int, outcome: Outcome) -> Stats:
        """The common sums and, where not every step counts alike, those of what counts.

        A restart that it finds takes effect when the bin under way ends: its arm is held.
        """
        added = observe(context, gamma, outcome)
        if self._remembered.everything or not added.buckets:
            return added
        report = added.buckets[context.bucket][gamma]
        own = self._remembered.learned(stats, context.bucket, gamma, report)
        return added._replace(own={**added.own, **own})

    def _best(self, arms: Bucket, prefill_us: float, largest: int, switching_s: float) -> int:
        return first_or_least(arms, largest, prefill_us / 1e6, switching_s, self._estimator)

    def _table(
        self, stats: Stats, bins: dict[int, Bin], prefill_us: float, largest: int
    ) -> dict[int, tuple[int, int]]:
        """The arm held, else the gamma of least loss, by batch size; brings the memo up to date."""
        table: dict[int, tuple[int, int]] = {}
        memo, wanted = self._memo, (prefill_us, largest)
        for bucket, plain in stats.buckets.items():
            known = memo.get(bucket)
            # Own sums come with plain ones, never alone: the plain ones stand for both.
            if known is None or known.plain is not plain or known.wanted != wanted:
                arms = self._remembered.arms(stats, bucket)
                best = self._best(arms, bucket * prefill_us, largest, 0.0)
                since = self._remembered.since(stats, bucket)
                known = memo[bucket] = _Known(plain, wanted, arms, since, (best, best))
            table[bucket] = known.best
        for bucket, held in bins.items():
            if held.arm >= 0 and bucket in table and held.since == memo[bucket].since:
                table[bucket] = (held.arm, table[bucket][1])
        return table


SPEC = PolicySpec(
    name="nightjar",
    summary="Learns the best gamma per batch size by a bandit with blocks and bins (the paper's).",
    parameters=(
        gamma_max(5),
        Parameter(
            name="estimator",
            kind="choice",
            default="ratio_of_sums",
            choices=("ratio_of_sums", "mean_of_ratios"),
            help="how seconds per token are averaged; mean_of_ratios is the paper's, and biased",
        ),
        Parameter(
            name="discount",
            kind="float",
            default=1.0,
            minimum=1e-6,
            maximum=1.0,
            help="weight that a step leaves of those before it; 1 forgets nothing",
        ),
        Parameter(
            name="restart",
            kind="choice",
            default="none",
            choices=("none", "test"),
            help="test: a batch size begins anew where an arm's recent cost left its mean "
            "(ADA-BINGREEDY)",
        ),
        Parameter(
            name="switching_cost",
            kind="choice",
            default="measured",
            choices=tuple(SWITCHING_US),
            help="cost of going from gamma 0 to more: a model of measured catch-up by stale tokens "
            "and batch, the paper's table C(L, B) of the same, or none",
        ),
    ),
    make=lambda values: Nightjar(
        int(values["gamma_max"]),
        cast(Estimator, values["estimator"]),
        str(values["switching_cost"]),
        Remembered(float(values["discount"]), restart=values["restart"] == "test"),
    ),
)
