"""What was learned: sums over steps, additive in any order, with the means that policies read.

A report covers several steps of one bucket and gamma. The paper's mean of per-step ratios is
therefore a mean of per-report ratios, weighted by the report's timed steps; it equals the
paper's where reports hold one step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import zip_longest
from operator import add
from types import MappingProxyType
from typing import Literal, NamedTuple

from planner_service.context import MAX_BATCH_SIZE, MAX_GAMMA
from planner_service.own_sums import MAX_NAME_CHARACTERS, OwnSums, from_text, numbers_of

Estimator = Literal["ratio_of_sums", "mean_of_ratios"]


class ArmSums(NamedTuple):
    """Timed steps of one bucket and gamma."""

    steps: float = 0
    step_us: float = 0
    emitted: float = 0
    rows: float = 0
    ratio_us: float = 0  # sum over reports of (microseconds per token per request) * steps
    ratio_steps: float = 0  # steps of the reports that had a ratio: those that emitted a token

    def seconds_per_token(self, estimator: Estimator = "ratio_of_sums") -> float:
        """Seconds per token per request, the loss; infinite where nothing was emitted."""
        if estimator == "mean_of_ratios":
            return self.ratio_us / self.ratio_steps / 1e6 if self.ratio_steps > 0 else math.inf
        if self.emitted <= 0:
            return math.inf
        return self.step_us * self.rows / self.steps / self.emitted / 1e6


class Totals(NamedTuple):
    """Sums over all buckets and gammas of a profile."""

    steps: float = 0
    timed_steps: float = 0
    emitted: float = 0
    catch_up_us: float = 0
    catch_up_tokens: float = 0
    draft_prefill_us: float = 0


_NO_ARM, _NO_TOTALS = ArmSums(), Totals()
Bucket = Mapping[int, ArmSums]  # by gamma


class Stats(NamedTuple):
    """Everything that policies learn from; never changed in place.

    `own` holds further sums that a policy keeps for itself, `latest` what it cannot express as
    sums: of that the last writer's stays. Both go by "policy/name".

    What is prior was not measured on this profile, or not since this planner knows it: a guess to
    start from. Policies read it and never add to it; it is in no store.
    """

    buckets: Mapping[int, Bucket] = MappingProxyType({})
    totals: Totals = _NO_TOTALS
    reached: tuple[float, ...] = ()  # by draft position
    accepted: tuple[float, ...] = ()
    own: Mapping[str, OwnSums] = MappingProxyType({})
    latest: Mapping[str, tuple[float, ...]] = MappingProxyType({})
    prior_reached: tuple[float, ...] = ()  # on other profiles of the same two models
    prior_accepted: tuple[float, ...] = ()
    num_prior_steps: float = 0  # of totals.steps: known when this planner first read them
    profile_key: str = ""  # whose sums these are, for memos; nothing may depend on it otherwise

    @property
    def catch_up_us_per_token(self) -> float:
        """Mean switching cost per stale token, in microseconds; 0 until it was measured."""
        tokens = self.totals.catch_up_tokens
        return self.totals.catch_up_us / tokens if tokens > 0 else 0.0

    @property
    def draft_prefill_us_per_token(self) -> float:
        """Draft prefill per delivered token, in microseconds.

        Spread over all tokens, since a prompt is prefilled once however gamma changes. While
        gamma is mostly 0 this is too low, never too high: too high would never be corrected.
        """
        emitted = self.totals.emitted
        return self.totals.draft_prefill_us / emitted if emitted > 0 else 0.0

    def visits(self, bucket: int) -> int:
        """Timed steps of a bucket, over all gammas."""
        return int(sum(arm.steps for arm in self.buckets.get(bucket, {}).values()))

    def plus(self, other: Stats) -> Stats:
        """The sum of both; of what is no sum, the other's. What is prior stays as it is here."""
        buckets = self.buckets
        if other.buckets:
            buckets = dict(buckets)
            for bucket, arms in other.buckets.items():
                merged = dict(buckets.get(bucket, ()))
                for gamma, sums in arms.items():
                    merged[gamma] = ArmSums(*map(add, merged.get(gamma, _NO_ARM), sums))
                buckets[bucket] = merged
        totals = self.totals
        if other.totals is not _NO_TOTALS:
            totals = Totals(*map(add, totals, other.totals))
        own = self.own
        if other.own:
            own = dict(own)
            for name, added in other.own.items():
                known = own.get(name)
                own[name] = known.plus(added) if known is not None else added
        return Stats(
            buckets,
            totals,
            _add(self.reached, other.reached),
            _add(self.accepted, other.accepted),
            own,
            {**self.latest, **other.latest} if other.latest else self.latest,
            self.prior_reached,
            self.prior_accepted,
            self.num_prior_steps,
            self.profile_key,
        )

    def only_acceptance(self) -> Stats:
        """The part that belongs to the pair of models."""
        return Stats(reached=self.reached, accepted=self.accepted)

    def with_prior(self, shared: Stats, num_prior_steps: float, profile_key: str = "") -> Stats:
        """This profile's sums, with what all profiles of the two models share less its own.

        The two were read at different moments, so the rest may come out below 0; it is cut.
        """
        reached: tuple[float, ...] = ()
        accepted: tuple[float, ...] = ()
        if shared.reached != self.reached:  # with no other profile they are equal
            reached = _beyond(shared.reached, self.reached)
            rest = _beyond(shared.accepted, self.accepted) + (0.0,) * len(reached)
            accepted = tuple(map(min, reached, rest))
        return Stats(*self[:6], reached, accepted, num_prior_steps, profile_key)

    def fields(self) -> dict[str, str]:
        """All sums that are not zero, by name, as text; `from_fields` is the inverse."""
        named = [
            (f"arm:{bucket}:{gamma}:{name}", value)
            for bucket, arms in self.buckets.items()
            for gamma, sums in arms.items()
            for name, value in zip(ArmSums._fields, sums, strict=True)
        ]
        named += [(f"total:{n}", v) for n, v in zip(Totals._fields, self.totals, strict=True)]
        named += [(f"reached:{i}", v) for i, v in enumerate(self.reached)]
        named += [(f"accepted:{i}", v) for i, v in enumerate(self.accepted)]
        texts = {name: repr(float(value)) for name, value in named if value != 0}
        texts.update((sums.field(name), sums.text()) for name, sums in self.own.items())
        for name, values in self.latest.items():
            texts[f"latest:{name}"] = " ".join([repr(float(value)) for value in values])
        return texts


NOTHING = Stats()


class FieldReader:
    """Reads sums back, field by field; `num_unknown` counts those that were not understood."""

    def __init__(self) -> None:
        self.num_unknown = 0
        self._buckets: dict[int, dict[int, dict[str, float]]] = {}
        self._totals: dict[str, float] = {}
        self._positions = {"reached": [0.0] * MAX_GAMMA, "accepted": [0.0] * MAX_GAMMA}
        self._own: dict[str, OwnSums] = {}
        self._latest: dict[str, tuple[float, ...]] = {}

    def take(self, name: str, text: str) -> None:
        """Read one field."""
        numbers = numbers_of(text)
        if not numbers or len(name) > 2 * MAX_NAME_CHARACTERS:
            self.num_unknown += 1
            return
        value = numbers[0]
        match name.split(":", 3):
            case ["arm", bucket, gamma, part] if (
                part in ArmSums._fields
                and _index(bucket, MAX_BATCH_SIZE)
                and _index(gamma, MAX_GAMMA)
            ):
                self._buckets.setdefault(int(bucket), {}).setdefault(int(gamma), {})[part] = value
            case ["total", part] if part in Totals._fields:
                self._totals[part] = value
            case ["reached" | "accepted" as kind, i] if _index(i, MAX_GAMMA - 1):
                self._positions[kind][int(i)] = value
            case ["own", half_life, *key] if (sums := from_text(half_life, text)) is not None:
                self._own[":".join(key)] = sums
            case ["latest", *key]:
                self._latest[":".join(key)] = tuple(numbers)
            case _:
                self.num_unknown += 1

    def stats(self) -> Stats:
        """The sums of all fields."""
        arms = {
            b: {g: ArmSums(**sums) for g, sums in row.items()} for b, row in self._buckets.items()
        }
        return Stats(
            # An arm without steps is what a torn record leaves; its means would divide by zero.
            {b: {g: s for g, s in row.items() if s.steps > 0} for b, row in arms.items()},
            Totals(**self._totals),
            tuple(self._positions["reached"]),
            tuple(self._positions["accepted"]),
            self._own,
            self._latest,
        )


def from_fields(fields: Iterable[tuple[str, str]]) -> tuple[Stats, int]:
    """Read sums back; returns them and how many fields were not understood."""
    reader = FieldReader()
    for name, text in fields:
        reader.take(name, text)
    return reader.stats(), reader.num_unknown


def _index(text: str, most: int) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 6 and int(text) <= most


def _beyond(more: tuple[float, ...], less: tuple[float, ...]) -> tuple[float, ...]:
    """What the first has beyond the second, by position, at least 0; nothing if that is all 0."""
    pairs = zip_longest(more, less, fillvalue=0.0)
    rest = tuple([a - b if a > b else 0.0 for a, b in pairs])
    return rest if any(rest) else ()


def _add(left: tuple[float, ...], right: tuple[float, ...]) -> tuple[float, ...]:
    if not right:
        return left
    if len(left) < len(right):
        left, right = right, left
    return (*map(add, left, right), *left[len(right) :])
