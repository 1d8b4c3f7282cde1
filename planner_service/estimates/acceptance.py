"""Acceptance by draft position, quick to follow a change and steady without one.

The same counts are kept under several half-lives, in rows that had a draft verified. Used is the
longest one that no shorter one contradicts: after a change a short one disagrees, and the past
is dropped for all positions at once. (The rule is Lepski's choice of a bandwidth.)
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, chain
from typing import NamedTuple

from planner_service.context import Outcome
from planner_service.own_sums import OwnSums

HALF_LIVES = (8.0, 40.0, 200.0, 1000.0, 8000.0)  # rows, shortest first
CONTRADICTION_SDS = 2.5
_VARIANCES = CONTRADICTION_SDS**2
NUM_COMPARED = 2  # positions in which windows are compared; later ones are seldom reached
PRIOR_ROWS = 6.0  # weight of a position's guess, in rows
COLD_ROWS = 32.0  # below this many own rows other profiles' acceptance is the guess
FIRST_GUESS = 0.6


class Acceptance(NamedTuple):
    """Mean tokens a row emits in a step, [gamma] from 0, the bonus token included."""

    tokens: tuple[float, ...]
    tokens_high: tuple[float, ...]  # as it may well be


def sums(policy: str, num_rows: float, outcome: Outcome) -> dict[str, OwnSums]:
    """What steps add to the counts of a policy; nothing where no draft was verified.

    Args:
        policy: Whose sums they are.
        num_rows: Rows that had a draft verified before, ever: the clock of these sums.
        outcome: Of the steps.
    """
    if not any(outcome.reached):
        return {}
    rows = outcome.reached[0]
    values = list(chain.from_iterable(zip(outcome.reached, outcome.accepted, strict=True)))
    found = {}
    for name, half_life in _names(policy):
        kept = _kept(rows, half_life)
        counted = tuple([value * kept for value in values])
        found[name] = OwnSums(counted, half_life, num_rows + rows)
    return found


@lru_cache(maxsize=16)
def _names(policy: str) -> tuple[tuple[str, float], ...]:
    return tuple((f"{policy}/acceptance/{half_life:g}", half_life) for half_life in HALF_LIVES)


def _kept(rows: float, half_life: float) -> float:
    """Share of a report's rows that counts at its end, since they came one after the other."""
    age = rows * math.log(2) / half_life
    return -math.expm1(-age) / age if age > 1e-6 else 1.0


def counts(policy: str, own: Mapping[str, OwnSums]) -> tuple[OwnSums | None, ...]:
    """A policy's counts, shortest half-life first."""
    return tuple([own.get(name) for name, _ in _names(policy)])


def estimate(
    found: Sequence[OwnSums | None],
    prior_reached: Sequence[float],
    prior_accepted: Sequence[float],
    *,
    largest: int,
    optimism_sds: float,
) -> Acceptance:
    """Mean tokens by gamma up to `largest`, from a policy's counts and from other profiles'."""
    windows = [window.values for window in found if window is not None and _sane(window.values)]
    counts = _steadiest(windows) if windows else ()
    cold = not counts or counts[0] < COLD_ROWS
    guess = FIRST_GUESS
    tokens, high = [1.0], [1.0]
    prefix = prefix_high = 1.0
    for i in range(largest):
        if cold and i < len(prior_reached) and prior_reached[i] > 0:
            guess = prior_accepted[i] / prior_reached[i]
        reached, accepted = counts[2 * i : 2 * i + 2] or (0.0, 0.0)
        weight = reached + PRIOR_ROWS
        # Without counts a position is taken to be as likely as the one before it.
        rate = min((accepted + PRIOR_ROWS * guess) / weight, 1.0)
        spread = math.sqrt(max(rate * (1 - rate), 0.01) / weight)
        prefix *= rate
        prefix_high *= min(1.0, rate + optimism_sds * spread)
        tokens.append(tokens[-1] + prefix)
        high.append(high[-1] + prefix_high)
        guess = rate
    return Acceptance(tuple(tokens), tuple(high))


def lately(
    found: Sequence[OwnSums | None], usual: float, largest: int, num_rows: int
) -> tuple[float, ...]:
    """Mean tokens by gamma, going by the first draft of the last few rows alone.

    Args:
        found: A policy's counts.
        usual: Rate that a row more is taken to have.
        largest: Largest gamma.
        num_rows: That a step has: about as many are looked at, and a few at least.
    """
    shortest = max(0, bisect_right(HALF_LIVES, num_rows) - 1)
    last = found[shortest] if shortest < len(found) else None
    reached, accepted = last.values[:2] if last and _sane(last.values) else (0.0, 0.0)
    rate = min((accepted + usual) / (reached + 1), 1.0)
    return tuple(accumulate([rate**i for i in range(largest + 1)]))


def _sane(values: tuple[float, ...]) -> bool:
    """Whether these may be counts; what a store holds may not be ours."""
    return min(values) >= 0 and max(values) < 1e15 and len(values) % 2 == 0


def _steadiest(windows: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    chosen = windows[0]
    for number in range(1, len(windows)):
        longer = windows[number]
        for shorter in windows[:number]:
            if _contradict(shorter, longer):
                return chosen
        chosen = longer
    return chosen


def _contradict(short: tuple[float, ...], long: tuple[float, ...]) -> bool:
    """Whether the rates of the first positions differ by more than chance explains."""
    for i in range(0, min(len(short), 2 * NUM_COMPARED), 2):
        n, m = short[i], long[i]
        if n < 4 or m < n:  # no later position was reached more often
            return False
        q = long[i + 1] / m
        variance = q - q * q if 0.02 < q < 0.98 else 0.02
        apart = short[i + 1] / n - q
        if apart * apart > _VARIANCES * variance * (1 / n + 1 / m):
            return True
    return False
