"""Which steps count for policy `nightjar`: all, the newer the more, or those since a change.

Discount: sums of an arm are multiplied by `discount` at each step of the profile.

Restart: a batch size begins anew when the recent cost of an arm differs from its long mean, which
is the practical form of the tests of ADA-BINGREEDY (Luo, Wei, Agarwal, Langford, COLT 2018, arXiv
1708.01799). A report is one sample, the microseconds and tokens of its mean step, since steps of
one report share the machine's moods; rho is the ratio of their sums since the last restart, so
that x = us - rho * tokens has mean 0, and s is its deviation. For w in WINDOWS, with n and v the
reports of all steps and of the last w, the test is

    |mean x of the last w| > s * sqrt(2 ln(2 / CHANCE) * (1 / v + 1 / n))

Where recent reports are shorter, s grows as it would if steps were independent.

Everything stays additive. The last w steps are sums that forget, of the same effective size; a
restart is a mark that holds the sums as they stood, which are subtracted from then on. The mark
forgets within a step, so of two the later one stays, and of equal clocks their mean. What a
replica had not heard of when it made a mark counts as after it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from operator import add, sub

from planner_service.own_sums import OwnSums
from planner_service.sums import ArmSums, Bucket, Stats

WINDOWS = (8, 16, 32)
CHANCE = 1e-4  # bound of one test's false alarms, if x were Gaussian
MIN_CHANGE = 0.02  # of a step's mean cost; smaller changes move no choice
MIN_REPORTS = 16  # that a deviation is estimated from

# Weights of last-w sums fall by (w - 1) / (w + 1) a step of the arm: then (sum of weights)^2 /
# (sum of their squares), the number of equal ones with the same variance, is w.
_HALF_LIVES = tuple(math.log(0.5) / math.log((w - 1) / (w + 1)) for w in WINDOWS)
_BOUND = math.sqrt(2 * math.log(2 / CHANCE))
_MARK_HALF_LIFE = 2.0**-11  # 2^-2048 is 0: nothing is left of a mark one step later
_NO_ARM = ArmSums()
_NUM_MOMENTS = 7  # of an arm: see _evidence
_PER_GAMMA = len(_NO_ARM) + _NUM_MOMENTS
_HEAD = 2  # of a mark: how many were added up, and the visits of the batch size


class Remembered:
    """The sums that count, by batch size and gamma."""

    def __init__(self, discount: float, *, restart: bool) -> None:
        """Choose what counts.

        Args:
            discount: What a step of the profile leaves of the weight of those before, (0, 1].
            restart: Whether a detected change makes a batch size begin anew.
        """
        self.everything = discount == 1 and not restart
        self._discount, self._restart = discount, restart
        self._half_life = math.inf if discount == 1 else math.log(0.5) / math.log(discount)

    def since(self, stats: Stats, bucket: int) -> float:
        """Clock of a batch size's last restart; 0 without one."""
        mark = self._mark(stats, bucket)
        return 0.0 if mark is None else mark.at

    def visits(self, stats: Stats, bucket: int) -> int:
        """Timed steps of a batch size since its last restart."""
        mark = self._mark(stats, bucket)
        before = 0 if mark is None else round(mark.values[1] / mark.values[0])
        return max(0, stats.visits(bucket) - before)

    def arms(self, stats: Stats, bucket: int) -> Bucket:
        """Sums that count of a batch size; an arm of which no step counts is left out."""
        plain = stats.buckets.get(bucket, {})
        mark = self._mark(stats, bucket)
        if self._discount == 1 and mark is None:
            return plain
        counted: dict[int, ArmSums] = {}
        for gamma, arm in plain.items():
            sums = self._sums(stats, bucket, gamma)
            if sums is None:
                if mark is None:
                    counted[gamma] = arm  # from before this policy decided: better than nothing
                continue
            if mark is not None:
                held = _held(mark, gamma, 0, len(_NO_ARM))
                sums = sums.less(OwnSums(held, self._half_life, mark.at))
            # A whole step or more, unless nothing but rounding is left.
            if len(sums.values) == len(_NO_ARM) and min(sums.values) >= 0 and sums.values[0] > 0.5:
                counted[gamma] = ArmSums(*sums.values)
        return counted

    def learned(
        self, stats: Stats, bucket: int, gamma: int, report: ArmSums
    ) -> Mapping[str, OwnSums]:
        """What timed steps of one report add to `Stats.own`.

        The steps of a report age together, and it is one sample of the deviation.
        """
        clock, own = stats.totals.steps, {}
        if self._discount < 1:
            name = _arm_name(self._discount, bucket, gamma)
            own[name] = OwnSums(tuple(report), self._half_life, clock)
        if self._restart:
            own.update(_evidence(stats, bucket, gamma, report))
            if self._changed(stats, bucket, gamma, own):
                mark = self._new_mark(stats, bucket, gamma, report, own)
                own[_mark_name(self._discount, bucket)] = OwnSums(mark, _MARK_HALF_LIFE, clock)
        return own

    def _mark(self, stats: Stats, bucket: int) -> OwnSums | None:
        if not self._restart:
            return None
        mark = stats.own.get(_mark_name(self._discount, bucket))
        return mark if mark and len(mark.values) > _HEAD and mark.values[0] > 0.5 else None

    def _sums(self, stats: Stats, bucket: int, gamma: int) -> OwnSums | None:
        if self._discount < 1:
            return stats.own.get(_arm_name(self._discount, bucket, gamma))
        return OwnSums(tuple(stats.buckets[bucket][gamma]))

    def _changed(self, stats: Stats, bucket: int, gamma: int, added: Mapping[str, OwnSums]) -> bool:
        """Whether an arm's recent cost differs from its mean since the last restart."""
        total = _total(stats, added, _moments_name(bucket, gamma), _NUM_MOMENTS)
        mark = self._mark(stats, bucket)
        if mark is not None:
            total = tuple(map(sub, total, _held(mark, gamma, len(_NO_ARM), _PER_GAMMA)))
        reports, num_steps, us, tokens, us_us, us_tokens, tokens_tokens = total
        if reports < MIN_REPORTS or us <= 0 or tokens <= 0:
            return False
        rho = us / tokens
        squares = us_us - 2 * rho * us_tokens + rho * rho * tokens_tokens
        variance = max(0.0, squares) / (reports - 1)
        least = MIN_CHANGE * us / reports
        for window, name in zip(WINDOWS, _window_names(bucket, gamma), strict=True):
            if num_steps < 2 * window:
                break
            weight, steps, recent_us, recent_tokens = _total(stats, added, name, 4)
            if weight < 1 or steps <= 0:
                continue
            change = abs(recent_us - rho * recent_tokens) / weight
            # Weights that fall geometrically and add up to `weight` are worth so many equal ones.
            num_recent = 2 * weight - 1
            shorter = max(1.0, num_steps / reports * weight / steps)
            bound = _BOUND * math.sqrt(variance * shorter * (1 / num_recent + 1 / reports))
            if change > max(least, bound):
                return True
        return False

    def _new_mark(
        self,
        stats: Stats,
        bucket: int,
        gamma: int,
        report: ArmSums,
        added: Mapping[str, OwnSums],
    ) -> tuple[float, ...]:
        """All sums of a batch size as they stand with this report, to be subtracted later."""
        arms = stats.buckets.get(bucket, {})
        values = [1.0, stats.visits(bucket) + report.steps]
        for held in range(max([gamma, *arms]) + 1):
            if self._discount < 1:
                name = _arm_name(self._discount, bucket, held)
                # Where nothing is added, at least the clock that a mark's values count at.
                now = OwnSums(_NO_ARM, self._half_life, stats.totals.steps)
                values += _total(stats, {name: added.get(name, now)}, name, len(_NO_ARM))
            else:
                arm = arms.get(held, _NO_ARM)
                values += map(add, arm, report) if held == gamma else arm
            values += _total(stats, added, _moments_name(bucket, held), _NUM_MOMENTS)
        return tuple(values)


def _evidence(stats: Stats, bucket: int, gamma: int, report: ArmSums) -> dict[str, OwnSums]:
    """A report's moments, and its part of the sums over the last steps of its arm."""
    steps = report.steps
    us, tokens = report.step_us * report.rows / steps / steps, report.emitted / steps
    own = {
        _moments_name(bucket, gamma): OwnSums(
            (1.0, steps, us, tokens, us * us, us * tokens, tokens * tokens)
        )
    }
    # Their clock is the arm's own count of steps: the last w are its own, however long ago.
    arm = stats.buckets.get(bucket, {}).get(gamma, _NO_ARM)
    recent = (1.0, steps, us, tokens)
    for name, half_life in zip(_window_names(bucket, gamma), _HALF_LIVES, strict=True):
        own[name] = OwnSums(recent, half_life, arm.steps)
    return own


def _total(stats: Stats, added: Mapping[str, OwnSums], name: str, size: int) -> tuple[float, ...]:
    """What is known under a name, with what is being added; zeros where nothing is."""
    sums, more = stats.own.get(name), added.get(name)
    if more is not None:
        sums = more if sums is None else sums.plus(more)
    values = () if sums is None else sums.values
    # Of another length only where the store holds what we did not write.
    return values if len(values) == size else (values + (0.0,) * size)[:size]


def _held(mark: OwnSums, gamma: int, first: int, end: int) -> tuple[float, ...]:
    """Numbers [first, end) of a mark's part for an arm; zeros where it had none."""
    start = _HEAD + gamma * _PER_GAMMA
    values, count = mark.values[start + first : start + end], mark.values[0]
    if count != 1:
        values = tuple([value / count for value in values])
    return (
        values if len(values) == end - first else (values + (0.0,) * (end - first))[: end - first]
    )


@lru_cache(maxsize=65_536)
def _arm_name(discount: float, bucket: int, gamma: int) -> str:
    return f"nightjar/arm@{discount!r}:{bucket}:{gamma}"


@lru_cache(maxsize=16_384)
def _mark_name(discount: float, bucket: int) -> str:
    return f"nightjar/restart@{discount!r}:{bucket}"


@lru_cache(maxsize=65_536)
def _moments_name(bucket: int, gamma: int) -> str:
    return f"nightjar/moments:{bucket}:{gamma}"


@lru_cache(maxsize=65_536)
def _window_names(bucket: int, gamma: int) -> tuple[str, ...]:
    return tuple(f"nightjar/last{window}:{bucket}:{gamma}" for window in WINDOWS)
