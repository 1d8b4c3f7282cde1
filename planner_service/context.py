"""What the planner hears from workers, as plain values: profile, context of a batch, outcome.

`check` methods hold the limits of the wire; past them the core takes every value as sane.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from nightjar.errors import InvalidRequest

MAX_GAMMA = 8
MAX_BATCH_SIZE = 4096
MAX_STEPS = 1_000_000  # in one report
MAX_SUM = 10**15  # microseconds or tokens in one report; sums of millions of them stay exact
MAX_INT32 = 2**31 - 1
MAX_NAME_CHARACTERS, MAX_PROFILE_CHARACTERS = 128, 256

Proposer = Literal["draft_model", "ngram", "none"]
PROPOSERS = ("draft_model", "ngram", "none")


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What decides the cost of steps; learned times are never shared between profiles."""

    target: str
    draft: str
    proposer: str
    dtype: str
    device: str
    tensor_parallel_size: int
    engine: str

    @cached_property
    def key(self) -> str:
        """Name of the group of sums of this profile alone."""
        return "p" + _digest(*(str(value) for value in self.as_dict().values()))

    @cached_property
    def acceptance_key(self) -> str:
        """Name of the group of acceptance sums, shared by all profiles of these two models."""
        return "a" + _digest(self.target, self.draft, self.proposer)

    def as_dict(self) -> dict[str, str | int]:
        """Fields by name, in a fixed order."""
        return {
            "target": self.target,
            "draft": self.draft,
            "proposer": self.proposer,
            "dtype": self.dtype,
            "device": self.device,
            "tensor_parallel_size": self.tensor_parallel_size,
            "engine": self.engine,
        }

    def check(self, field: str) -> None:
        """Refuse what no worker sends.

        Raises:
            InvalidRequest: Names the first field outside its limits.
        """
        if not self.target:
            raise InvalidRequest(f"{field}.target", "must not be empty")
        if self.proposer not in PROPOSERS:
            raise InvalidRequest(f"{field}.proposer", f"must be one of {', '.join(PROPOSERS)}")
        for name, value in self.as_dict().items():
            if isinstance(value, str):
                check_text(f"{field}.{name}", value, MAX_PROFILE_CHARACTERS)
        check_range(f"{field}.tensor_parallel_size", self.tensor_parallel_size, 1, 1024)


class Context(NamedTuple):
    """State of a batch that a decision is made for, and what its worker can run."""

    batch_size: int  # decode rows
    num_kv_tokens: int = 0
    num_prefill_tokens: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0
    max_stale_tokens: int = 0
    sum_stale_tokens: int = 0
    draft_resident: bool = True
    cpu_utilization: float = 0.0
    feasible_max_gamma: int = MAX_GAMMA
    max_gamma: int = MAX_GAMMA  # largest the worker ever runs
    max_batch_size: int = 256  # largest batch of the worker

    @property
    def bucket(self) -> int:
        """Bucket of the grid with an edge at every batch size up to the worker's largest."""
        return min(self.batch_size, self.max_batch_size)

    @property
    def largest_gamma(self) -> int:
        """Largest gamma that may be answered now."""
        return min(self.feasible_max_gamma, self.max_gamma)

    def check(self, field: str) -> None:
        """Refuse what no worker sends.

        Raises:
            InvalidRequest: Names the first field outside its limits.
        """
        check_range(f"{field}.batch_size", self.batch_size, 0, MAX_BATCH_SIZE)
        check_range(f"{field}.feasible_max_gamma", self.feasible_max_gamma, 0, MAX_GAMMA)
        if min(self) < 0 or not math.isfinite(self.cpu_utilization):
            for name in self._fields:
                value = getattr(self, name)
                if not math.isfinite(value) or value < 0:
                    raise InvalidRequest(f"{field}.{name}", f"must be at least 0, got {value}")
        if self.sum_stale_tokens > MAX_SUM:
            raise InvalidRequest(f"{field}.sum_stale_tokens", f"must be at most {MAX_SUM}")


class Outcome(NamedTuple):
    """Sums over steps with the same bucket, gamma and decision."""

    num_steps: int
    num_timed_steps: int = 0
    step_us: int = 0
    num_timed_emitted: int = 0
    num_timed_rows: int = 0
    num_emitted: int = 0
    num_prefill_tokens: int = 0
    catch_up_us: int = 0
    num_catch_up_tokens: int = 0
    draft_prefill_us: int = 0
    reached: tuple[int, ...] = ()  # by draft position
    accepted: tuple[int, ...] = ()
    num_catch_up_steps: int = 0  # steps that caught up tokens emitted at gamma 0
    mixed_step_us: int = 0  # of the steps that are not timed, since they held prompt tokens
    propensity: float | None = None  # of the decision they ran under, where it is still known

    def check(self, field: str, gamma: int) -> None:
        """Refuse sums that no steps can have.

        Raises:
            InvalidRequest: Names the first field outside its limits.
        """
        timed, rows = self.num_timed_steps, self.num_timed_rows
        most = min(self.num_emitted, rows * (gamma + 1))
        for name, value, low, high in (
            ("gamma", gamma, 0, MAX_GAMMA),
            ("num_steps", self.num_steps, 1, MAX_STEPS),
            ("num_timed_steps", timed, 0, self.num_steps),
            ("step_us", self.step_us, 1 if timed else 0, MAX_SUM),
            ("num_emitted", self.num_emitted, 0, MAX_SUM),
            ("num_prefill_tokens", self.num_prefill_tokens, 0, MAX_SUM),
            ("catch_up_us", self.catch_up_us, 0, MAX_SUM),
            ("num_catch_up_tokens", self.num_catch_up_tokens, 0, MAX_SUM),
            ("draft_prefill_us", self.draft_prefill_us, 0, MAX_SUM),
            ("num_catch_up_steps", self.num_catch_up_steps, 0, self.num_steps),
            ("mixed_step_us", self.mixed_step_us, 0, MAX_SUM if timed < self.num_steps else 0),
            ("num_timed_rows", rows, timed, timed * MAX_BATCH_SIZE),
            ("num_timed_emitted", self.num_timed_emitted, 0, most),
        ):
            if not low <= value <= high:
                check_range(f"{field}.{name}", value, low, high)
        for name, values in (("reached", self.reached), ("accepted", self.accepted)):
            if len(values) > MAX_GAMMA:
                raise InvalidRequest(f"{field}.{name}", f"at most {MAX_GAMMA} positions")
            for i, value in enumerate(values):
                if not 0 <= value <= MAX_SUM:
                    check_range(f"{field}.{name}[{i}]", value, 0, MAX_SUM)
        if len(self.reached) != len(self.accepted):
            raise InvalidRequest(f"{field}.accepted", "must be as long as reached")
        for i, (reached, accepted) in enumerate(zip(self.reached, self.accepted, strict=True)):
            if accepted > reached:
                raise InvalidRequest(f"{field}.accepted[{i}]", f"exceeds reached ({reached})")


def check_range(field: str, value: int, low: int, high: int) -> None:
    """Refuse a whole number outside [low, high]."""
    if not low <= value <= high:
        raise InvalidRequest(field, f"must lie in [{low}, {high}], got {value}")


def check_text(field: str, value: str, most: int = MAX_NAME_CHARACTERS) -> None:
    """Refuse an over-long name, and one that would break a log line."""
    if len(value) > most:
        raise InvalidRequest(field, f"at most {most} characters, got {len(value)}")
    if not value.isprintable():
        raise InvalidRequest(field, "must hold printable characters only")


def _digest(*parts: str) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
