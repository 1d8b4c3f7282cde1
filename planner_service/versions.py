"""Which policy decides for whom: versions, their scopes and their history, as plain values.

The newest live version whose scope holds a worker decides for it; a canary, only in its share of
the worker's slices of steps. Activating adds one; rolling back, a fault or a floor takes one away,
so that what it hid decides again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from nightjar.errors import NotPossibleNow

MAX_VERSIONS = 64  # that the history keeps
MAX_REASON_CHARACTERS = 512
Reason = Literal["operator", "rollback", "default"]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Scope:
    """Whom a version is for; empty means all."""

    profile_key: str = ""
    worker_ids: tuple[str, ...] = ()
    canary_share: float = 0.0  # of the slices of steps, (0, 1); 0 means all of them

    def holds(self, profile_key: str, worker_id: str) -> bool:
        """Whether a worker is in the scope."""
        return self.profile_key in ("", profile_key) and (
            not self.worker_ids or worker_id in self.worker_ids
        )

    @property
    def is_canary(self) -> bool:
        """Whether it has a share of the slices only."""
        return self.canary_share > 0

    @property
    def whole(self) -> Scope:
        """The same workers, with all of their slices."""
        return replace(self, canary_share=0.0)

    def covers(self, other: Scope) -> bool:
        """Whether a later version for this scope leaves none for `other` to decide.

        A worker has one canary at a time, the newest; a canary never hides more than canaries.
        """
        return self.includes(other) and (other.is_canary or not self.is_canary)

    def includes(self, other: Scope) -> bool:
        """Whether all workers of `other` are in this scope too."""
        if self.profile_key not in ("", other.profile_key):
            return False
        return not self.worker_ids or (
            bool(other.worker_ids) and set(other.worker_ids) <= set(self.worker_ids)
        )


EVERYONE = Scope()


@dataclass(frozen=True, kw_only=True)
class Floor:
    """Withdraws a version whose measured net benefit stays below it."""

    min_net_benefit: float  # tokens per second against plain decoding, less 1
    for_s: float  # that it may stay below


@dataclass(frozen=True, kw_only=True)
class Version:
    """A policy with its parameters, made for a scope."""

    number: int
    name: str
    parameters: Mapping[str, str]
    scope: Scope
    activated_at_ms: int
    reason: Reason
    live: bool = True  # neither rolled back nor withdrawn
    floor: Floor | None = None
    withdrawn_because: str = ""  # in words, once it is no longer live
    withdrawn_at_ms: int = 0

    @property
    def id(self) -> str:
        """Name of the version, for example "7-fixed"."""
        return f"{self.number}-{self.name}"


@dataclass(frozen=True, kw_only=True)
class Book:
    """All versions, oldest first, and tokens of the last changes, so that none is made twice."""

    versions: tuple[Version, ...] = ()
    next_number: int = 1
    changes: tuple[str, ...] = ()

    def deciding(self, profile_key: str, worker_id: str) -> Iterator[Version]:
        """Live versions for a worker, newest first; the first one decides.

        A canary among them only in its slices; of several canaries the newest alone is there.
        """
        has_canary = False
        for version in reversed(self.versions):
            if version.live and version.scope.holds(profile_key, worker_id):
                if version.scope.is_canary:
                    if has_canary:
                        continue
                    has_canary = True
                yield version

    def is_active(self, version: Version) -> bool:
        """Whether a version decides for anyone: no newer live one covers its scope."""
        newer = (v for v in self.versions if v.live and v.number > version.number)
        return version.live and not any(v.scope.covers(version.scope) for v in newer)

    def activate(
        self,
        name: str,
        parameters: Mapping[str, str],
        scope: Scope,
        now_ms: int,
        reason: Reason,
        *,
        floor: Floor | None = None,
    ) -> Book:
        """Add a version; the last of the result."""
        added = Version(
            number=self.next_number,
            name=name,
            parameters=dict(parameters),
            scope=scope,
            activated_at_ms=now_ms,
            reason=reason,
            floor=floor,
        )
        versions = (*self.versions, added)
        book = replace(self, versions=versions, next_number=self.next_number + 1)
        while len(book.versions) > MAX_VERSIONS:
            # The oldest that decides for nobody; if all decide for someone, the oldest.
            idle = [v for v in book.versions if not book.is_active(v)]
            gone = min(idle or book.versions, key=lambda v: (v.live, v.number))
            book = replace(book, versions=tuple(v for v in book.versions if v is not gone))
        return book

    def rollback(self, scope: Scope, now_ms: int) -> tuple[Book, Version]:
        """Take the newest version of exactly these workers away; returns what decides instead.

        A scope without a share means canaries too: the newest goes, whichever it is.

        Raises:
            NotPossibleNow: Nothing was activated for this scope, or nothing came before.
        """
        own = [
            v
            for v in self.versions
            if v.live and (v.scope == scope or (v.scope.whole == scope and not scope.is_canary))
        ]
        if not own:
            raise NotPossibleNow("no version was activated for exactly this scope")
        gone = own[-1]
        left = [v for v in self.versions if v is not gone and v.live]
        left = [v for v in left if v.scope.covers(scope.whole)]
        if not left:
            raise NotPossibleNow(f"version {gone.id} has no predecessor to go back to")
        restored = left[-1]
        swapped = {gone.number: _ended(gone, "rolled back by an operator", now_ms)}
        if restored.scope == gone.scope:  # a wider version, or one below a canary, never stopped
            restored = replace(restored, activated_at_ms=now_ms, reason="rollback")
            swapped[restored.number] = restored
        versions = tuple(swapped.get(v.number, v) for v in self.versions)
        return replace(self, versions=versions), restored

    def withdraw(self, version_id: str, because: str, now_ms: int) -> Book:
        """Take one version away because it failed; no change if it is not live."""
        versions = tuple(
            _ended(v, because, now_ms) if v.id == version_id and v.live else v
            for v in self.versions
        )
        return self if versions == self.versions else replace(self, versions=versions)

    def marked(self, token: str) -> Book:
        """The book with a change's token."""
        return replace(self, changes=(*self.changes[1 - MAX_VERSIONS :], token))


def _ended(version: Version, because: str, now_ms: int) -> Version:
    because = because[:MAX_REASON_CHARACTERS]
    return replace(version, live=False, withdrawn_because=because, withdrawn_at_ms=now_ms)


Change = Callable[[Book], Book]


def to_json(book: Book) -> str:
    """Text of a book; `from_json` is the inverse."""
    rows = [
        {
            **vars(v),
            "parameters": dict(v.parameters),
            "scope": vars(v.scope),
            "floor": vars(v.floor) if v.floor else None,
        }
        for v in book.versions
    ]
    body = {"next_number": book.next_number, "changes": book.changes, "versions": rows}
    return json.dumps(body, separators=(",", ":"))


def from_json(text: str) -> Book:
    """Read a book; what books did not hold at first may be missing from it.

    Raises:
        ValueError: The text is not a book.
    """
    try:
        body = json.loads(text)
        versions = tuple(_version(row) for row in body["versions"])
        next_number = _is(body["next_number"], int)
        changes = tuple(_is(token, str) for token in _is(body["changes"], list))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a book of versions: {error}") from None
    numbers = [v.number for v in versions]
    if numbers != sorted(set(numbers)) or (numbers and numbers[-1] >= next_number):
        raise ValueError("not a book of versions: numbers do not ascend")
    return Book(versions=versions, next_number=next_number, changes=changes)


def _version(row: object) -> Version:
    found = _is(row, dict)
    scope = _is(found["scope"], dict)
    reason = found["reason"]
    if reason not in ("operator", "rollback", "default"):
        raise ValueError(f"reason {reason!r}")
    named = {_is(k, str): _is(v, str) for k, v in _is(found["parameters"], dict).items()}
    workers = tuple(_is(worker, str) for worker in _is(scope["worker_ids"], list))
    share = _number(scope.get("canary_share", 0.0))
    if not 0 <= share < 1:
        raise ValueError(f"canary_share {share!r}")
    return Version(
        number=_is(found["number"], int),
        name=_is(found["name"], str),
        parameters=named,
        scope=Scope(
            profile_key=_is(scope["profile_key"], str), worker_ids=workers, canary_share=share
        ),
        activated_at_ms=_is(found["activated_at_ms"], int),
        reason=reason,
        live=_is(found["live"], bool),
        floor=_floor(found.get("floor")),
        withdrawn_because=_is(found.get("withdrawn_because", ""), str),
        withdrawn_at_ms=_is(found.get("withdrawn_at_ms", 0), int),
    )


def _floor(row: object) -> Floor | None:
    if row is None:
        return None
    found = _is(row, dict)
    floor = Floor(min_net_benefit=_number(found["min_net_benefit"]), for_s=_number(found["for_s"]))
    if floor.for_s <= 0:
        raise ValueError(f"for_s {floor.for_s!r}")
    return floor


def _number(value: object) -> float:
    number = float(value) if type(value) is int else _is(value, float)
    if not math.isfinite(number):
        raise ValueError(f"{number!r} is not finite")
    return number


def _is(value: object, kind: type[T]) -> T:
    if type(value) is not kind:
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value
