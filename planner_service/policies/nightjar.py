"""Policy `nightjar`: the bandit of arXiv 2512.22420, one per batch size.

Steps at a batch size come in blocks of H_j = 2^(j-1); a block in bins of floor(sqrt(H_j)), the
last one cut to the block. The b-th bin of a block explores with probability 1/b, uniformly over
the gammas; otherwise it takes the gamma of least loss. The arm is held for the bin.

    loss(gamma) = seconds per token per request
                + [previous gamma is 0 and gamma > 0] * switching cost / gamma

Beyond the paper: the loss is a ratio of sums by default, since the mean of per-step ratios
overrates the loss of long drafts at small batches; draft prefill is charged to gamma > 0; a
stream that is new to a batch size starts in the block that the steps known so far have reached.
"""

from __future__ import annotations

import math
import random
from typing import NamedTuple, cast

from planner_service.context import MAX_GAMMA, Context
from planner_service.policies.policy import Choice, Parameter, Policy, PolicySpec
from planner_service.session import Numbers, Session
from planner_service.sums import Bucket, Estimator, Stats

MAX_BLOCK = 40
# Steps at which nothing can be speculated advance no bin; the worker need not ask at each.
IDLE_HOLD_STEPS = 8


class Bin(NamedTuple):
    """Where a stream stands at one batch size; an arm of -1 is yet to be drawn."""

    block: int = 1  # j, from 1
    number: int = 1  # b, from 1 in each block
    position: int = 0  # steps of the bin that ran
    arm: int = -1
    explored: int = 0
    propensity: float = 1.0

    @property
    def length(self) -> int:
        """Steps of the bin, at least 1."""
        steps = _steps(self.block)
        size = math.isqrt(steps)
        return min(size, steps - (self.number - 1) * size)

    @classmethod
    def at(cls, num_steps: int) -> Bin:
        """The bin that the next step belongs to after `num_steps` at this batch size."""
        block = min((num_steps + 1).bit_length(), MAX_BLOCK)
        start = _steps(block)
        return cls(block, (num_steps + 1 - start) // math.isqrt(start) + 1)

    @classmethod
    def read(cls, numbers: Numbers, largest: int) -> Bin | None:
        """A bin from foreign numbers; None unless it is one that we could have written."""
        if len(numbers) != len(cls._fields) or any(type(n) is not int for n in numbers[:5]):
            return None
        found = cls(*cast(tuple[int, int, int, int, int, float], numbers))
        if not (1 <= found.block <= MAX_BLOCK and -1 <= found.arm <= largest):
            return None
        fits = 1 <= found.number <= 2**found.block and 0 < found.propensity <= 1
        return found if fits and 0 <= found.position < found.length else None

    def after(self, num_steps: int) -> Bin:
        """The bin once steps ran; those past its end ran while the next answer was on its way."""
        position = self.position + num_steps
        if position < self.length:
            return self._replace(position=position)
        steps = _steps(self.block)
        if self.number * math.isqrt(steps) >= steps:
            return Bin(min(self.block + 1, MAX_BLOCK), 1)
        return Bin(self.block, self.number + 1)


def _steps(block: int) -> int:
    """Steps of a block, H_j; also the number of the block's first step, counted from 1."""
    return 1 << (block - 1)


class Nightjar(Policy):
    """The paper's bandit."""

    def __init__(self, gamma_max: int, estimator: Estimator, charge_switching: bool) -> None:
        self._gamma_max = gamma_max
        self._estimator = estimator
        self._charge_switching = charge_switching
        # Memo of a pure function: bucket -> its sums, draft prefill, largest gamma; best gamma.
        self._memo: dict[int, tuple[Bucket, float, int, tuple[int, int]]] = {}

    def select(
        self, context: Context, stats: Stats, session: Session, rng: random.Random
    ) -> tuple[Choice, Session]:
        """Hold the arm of the bin, or draw the next one."""
        bucket = context.bucket
        largest = min(self._gamma_max, context.max_gamma)
        bins = _bins(session, largest)
        prefill_us = float(f"{stats.draft_prefill_us_per_token:.3g}")
        table = self._table(stats, bins, prefill_us, largest)
        switching_s = self._switching_s(context, stats, session)
        arms = stats.buckets.get(bucket, {})
        best = self._best(arms, bucket * prefill_us, largest, switching_s)
        feasible = min(largest, context.feasible_max_gamma)
        if feasible == 0:
            choice = Choice(0, best, IDLE_HOLD_STEPS, False, 1.0, table)
            return choice, Session(0, bins)
        held = bins.pop(bucket, None) or Bin.at(stats.visits(bucket))
        if held.arm < 0:
            exploit = best
            if best > feasible:
                exploit = self._best(arms, bucket * prefill_us, feasible, switching_s)
            held = _draw(held, exploit, feasible, rng)
        bins[bucket] = held  # last in the dict: most recently decided
        gamma = min(held.arm, feasible)
        hold = held.length - held.position
        choice = Choice(gamma, best, hold, bool(held.explored), held.propensity, table)
        return choice, Session(gamma, bins)

    def _switching_s(self, context: Context, stats: Stats, session: Session) -> float:
        if not self._charge_switching or session.previous_gamma > 0:
            return 0.0
        return stats.catch_up_us_per_token * context.sum_stale_tokens / 1e6

    def _best(self, arms: Bucket, prefill_us: float, largest: int, switching_s: float) -> int:
        """Gamma of least loss; one that never ran comes first, so that each runs once.

        The largest comes first: until one was tried, nothing says that speculation is off.
        """
        best, least = 0, math.inf
        for gamma in range(largest, -1, -1):
            arm = arms.get(gamma)
            if arm is None:
                return gamma
            loss = arm.seconds_per_token(self._estimator)
            if gamma > 0:
                loss += prefill_us / 1e6 + switching_s / gamma
            if loss <= least:  # of equals the smallest gamma
                best, least = gamma, loss
        return best

    def _table(
        self, stats: Stats, bins: dict[int, Bin], prefill_us: float, largest: int
    ) -> dict[int, tuple[int, int]]:
        table: dict[int, tuple[int, int]] = {}
        for bucket, arms in stats.buckets.items():
            memo = self._memo.get(bucket)
            if not (memo and memo[0] is arms and memo[1] == prefill_us and memo[2] == largest):
                best = self._best(arms, bucket * prefill_us, largest, 0.0)
                memo = self._memo[bucket] = (arms, prefill_us, largest, (best, best))
            held = bins.get(bucket)
            table[bucket] = memo[3] if held is None or held.arm < 0 else (held.arm, memo[3][1])
        return table


def _bins(session: Session, largest: int) -> dict[int, Bin]:
    """The bins of a session, moved on by the steps that ran since."""
    bins = cast(dict[int, Bin], dict(session.numbers))  # our own, unless foreign
    if session.foreign:
        read = {bucket: Bin.read(numbers, largest) for bucket, numbers in bins.items()}
        bins = {bucket: found for bucket, found in read.items() if found is not None}
    for bucket, num_steps in session.ran.items():
        if bucket in bins:
            bins[bucket] = bins[bucket].after(num_steps)
    return bins


def _draw(held: Bin, exploit: int, feasible: int, rng: random.Random) -> Bin:
    """Draw the arm of a bin: uniform over [0, feasible] with probability 1/b, else `exploit`."""
    share = 1 / held.number
    explored = rng.random() < share
    arm = rng.randrange(feasible + 1) if explored else exploit
    propensity = share / (feasible + 1) + (1 - share if arm == exploit else 0.0)
    return held._replace(arm=arm, explored=int(explored), propensity=propensity)


SPEC = PolicySpec(
    name="nightjar",
    summary="Learns the best gamma per batch size by a bandit with blocks and bins (the paper's).",
    parameters=(
        Parameter(
            name="gamma_max",
            kind="int",
            default=5,
            minimum=0,
            maximum=MAX_GAMMA,
            help="largest gamma to try",
        ),
        Parameter(
            name="estimator",
            kind="choice",
            default="ratio_of_sums",
            choices=("ratio_of_sums", "mean_of_ratios"),
            help="how seconds per token are averaged; mean_of_ratios is the paper's, and biased",
        ),
        Parameter(
            name="switching_cost",
            kind="choice",
            default="measured",
            choices=("measured", "none"),
            help="cost of going from gamma 0 to more: measured draft catch-up, or none",
        ),
    ),
    make=lambda values: Nightjar(
        int(values["gamma_max"]),
        cast(Estimator, values["estimator"]),
        values["switching_cost"] == "measured",
    ),
)
