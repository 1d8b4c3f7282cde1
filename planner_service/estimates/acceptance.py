"""Acceptance by draft position, quick to follow a change and steady without one.

The same counts are kept under three half-lives. Used is the longest one that no shorter one
contradicts: after a change the short one disagrees, and the past is dropped for all positions
at once. (The rule is Lepski's choice of a bandwidth, over exponential windows.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from planner_service.context import MAX_GAMMA, Outcome
from planner_service.own_sums import OwnSums

HALF_LIVES = (24.0, 200.0, 1600.0)  # steps, shortest first
CONTRADICTION_SDS = 2.5
PRIOR_ROWS = 6.0  # weight of a position's guess, in rows
COLD_ROWS = 32.0  # below this many own rows other profiles' acceptance is the guess
FIRST_GUESS = 0.6
_NAMES = tuple(f"acceptance/{half_life:g}" for half_life in HALF_LIVES)


class Acceptance(NamedTuple):
    """Mean tokens a row emits in a step, by gamma, as estimated and as it may well be."""

    tokens: tuple[float, ...]  # [gamma] from 0, the bonus token included
    tokens_high: tuple[float, ...]


def sums(policy: str, clock: float, outcome: Outcome) -> dict[str, OwnSums]:
    """What steps add to the counts of a policy; nothing where no draft was verified."""
    if not any(outcome.reached):
        return {}
    short = (0,) * (MAX_GAMMA - len(outcome.reached))
    values = (*outcome.reached, *short, *outcome.accepted, *short)
    return {
        f"{policy}/{name}": OwnSums(values, half_life, clock)
        for name, half_life in zip(_NAMES, HALF_LIVES, strict=True)
    }


def counts(policy: str, own: Mapping[str, OwnSums]) -> tuple[OwnSums | None, ...]:
    """A policy's counts, shortest half-life first."""
    return tuple([own.get(f"{policy}/{name}") for name in _NAMES])


def estimate(
    found: Sequence[OwnSums | None],
    prior_reached: Sequence[float],
    prior_accepted: Sequence[float],
    *,
    largest: int,
    optimism_sds: float,
) -> Acceptance:
    """Mean tokens by gamma up to `largest`, from a policy's counts and from other profiles'."""
    windows = [values for window in found if window is not None for values in (window.values,)]
    values = _steadiest(windows) if windows else (0.0,) * (2 * MAX_GAMMA)
    cold = values[0] < COLD_ROWS
    guess = FIRST_GUESS
    tokens, high = [1.0], [1.0]
    chain = chain_high = 1.0
    for i in range(largest):
        if cold and i < len(prior_reached) and prior_reached[i] > 0:
            guess = prior_accepted[i] / prior_reached[i]
        weight = values[i] + PRIOR_ROWS
        # Without counts a position is taken to be as likely as the one before it.
        rate = (values[MAX_GAMMA + i] + PRIOR_ROWS * guess) / weight
        spread = math.sqrt(max(rate * (1 - rate), 0.01) / weight)
        chain *= rate
        chain_high *= min(1.0, rate + optimism_sds * spread)
        tokens.append(tokens[-1] + chain)
        high.append(high[-1] + chain_high)
        guess = rate
    return Acceptance(tuple(tokens), tuple(high))


def _steadiest(windows: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    chosen = windows[0]
    for longer in range(1, len(windows)):
        if any(_contradict(windows[shorter], windows[longer]) for shorter in range(longer)):
            return chosen
        chosen = windows[longer]
    return chosen


def _contradict(short: tuple[float, ...], long: tuple[float, ...]) -> bool:
    """Whether any position's rates differ by more than chance explains."""
    for i in range(MAX_GAMMA):
        n, m = short[i], long[i]
        if n < 4:  # no later position was reached more often
            return False
        p, q = short[MAX_GAMMA + i] / n, long[MAX_GAMMA + i] / m
        variance = max(q * (1 - q), 0.02) * (1 / n + 1 / m)
        if (p - q) ** 2 > CONTRADICTION_SDS**2 * variance:
            return True
    return False
