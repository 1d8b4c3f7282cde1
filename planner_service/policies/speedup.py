"""The reward of bandits that look at no context: throughput per request over that of gamma 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from planner_service.context import Context, Outcome
from planner_service.sums import Stats

_MOST = 1e100  # beyond it sums are not ours


class Ran(NamedTuple):
    """Timed steps of one arm over all contexts; additive."""

    num_steps: float = 0.0
    request_s: float = 0.0  # seconds of steps, times their mean rows
    tokens: float = 0.0

    @classmethod
    def of(cls, context: Context, outcome: Outcome) -> Ran | None:
        """Timed steps of a report; None where it teaches no time."""
        steps = outcome.num_timed_steps
        if not steps or context.feasible_max_gamma == 0:
            return None
        request_s = outcome.step_us / 1e6 * outcome.num_timed_rows / steps
        return cls(float(steps), request_s, float(outcome.num_timed_emitted))

    @property
    def throughput(self) -> float:
        """Tokens per second and request, a ratio of sums."""
        return self.tokens / self.request_s if self.request_s > 0 else 0.0


def arms_of(stats: Stats, names: Sequence[str]) -> list[Ran]:
    """Sums of each arm, which begin its vector; nothing where they are not ours."""
    arms = []
    for name in names:
        sums = stats.own.get(name)
        values = sums.values[:3] if sums is not None else ()
        if len(values) == 3 and 1 <= values[0] < _MOST and 1 / _MOST < values[1] < _MOST:
            arms.append(Ran(values[0], values[1], min(max(values[2], 0.0), _MOST)))
        else:
            arms.append(Ran())
    return arms


def reference(arms: Sequence[Ran]) -> float:
    """Seconds per token and request at gamma 0; of all arms together until it is known."""
    for ran in (arms[0], Ran(*map(sum, zip(*arms, strict=True)))):
        if ran.tokens > 0:
            return ran.request_s / ran.tokens
    return 1.0
