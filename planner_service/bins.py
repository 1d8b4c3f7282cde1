"""From the lines of an audit log to bins: what was drawn once, held, and how it went.

A bin is a decision with the steps that ran under it in the bucket it was asked for. A decision may
be for the rest of what an earlier one drew: then both have the same number of the draw.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, cast

from nightjar.buckets import BucketGrid
from nightjar.errors import InvalidRequest
from planner_service.context import Context, Outcome, check_range, check_text
from planner_service.planner import PROBE_SUFFIX

MAX_HOLD = 2**20
T = TypeVar("T", Context, Outcome)


class Arm(NamedTuple):
    """What a policy draws."""

    gamma: int
    num_extra_drafts: int = 0

    def __str__(self) -> str:
        extra = f" +{self.num_extra_drafts} drafted" if self.num_extra_drafts else ""
        return f"gamma {self.gamma}{extra}"


class Drawn(NamedTuple):
    """A line about a decision."""

    at_ms: int
    profile_key: str
    worker_id: str
    decision_id: str
    version: str
    bucket: int
    arm: Arm
    explored: bool
    propensity: float
    hold_steps: int
    grid: BucketGrid | None  # None: the bucket is the batch size
    context: Context


class Heard(NamedTuple):
    """A line about a report."""

    at_ms: int
    profile_key: str
    worker_id: str
    decision_id: str
    gamma: int  # that ran
    context: Context
    outcome: Outcome


@dataclass(slots=True, eq=False)
class Bin:
    """A decision and how it went. Tokens and seconds are of steps without prompt tokens."""

    drawn: Drawn
    draw: int  # number of the draw
    num_timed_steps: int = 0
    tokens: int = 0
    seconds: float = 0.0  # with the catch-up and the draft's prefill that fall on those steps

    @property
    def is_choice(self) -> bool:
        """Whether a policy chose: it could have speculated, and this is no probe."""
        return self.drawn.context.largest_gamma > 0 and not is_probe(self.drawn)

    def add(self, heard: Heard) -> None:
        """Steps ran under it."""
        outcome = heard.outcome
        self.num_timed_steps += outcome.num_timed_steps
        self.tokens += outcome.num_timed_emitted
        charged_us = outcome.catch_up_us
        if self.drawn.arm.gamma > 0:
            charged_us += outcome.draft_prefill_us
        timed_share = outcome.num_timed_steps / outcome.num_steps
        self.seconds += (outcome.step_us + charged_us * timed_share) / 1e6

    def goes_on_with(self, later: Drawn) -> bool:
        """Whether the stream's next decision may be for the rest of this draw.

        A new draw may look the same; that makes intervals wider, never too narrow.
        """
        first = self.drawn
        same = (first.arm, first.propensity, first.explored)
        return same == (later.arm, later.propensity, later.explored) and first.propensity < 1


def is_probe(line: Drawn | Heard) -> bool:
    """Whether it is about plain decoding that no policy chose, to measure what it gives."""
    return line.decision_id.endswith(PROBE_SUFFIX)


Event = Bin | Heard  # a draw, or steps that ran


@dataclass(slots=True)
class Log:
    """A log put together: what happened in order, and steps that belong to no bin, by reason."""

    events: list[Event] = field(default_factory=list)
    num_steps: int = 0
    steps_left_out: Counter[str] = field(default_factory=Counter)

    @property
    def bins(self) -> list[Bin]:
        """Bins in which a choice could be made and of which a time is known."""
        return [
            event
            for event in self.events
            if isinstance(event, Bin) and event.is_choice and event.num_timed_steps > 0
        ]


PROBE = "ran in a probe of plain decoding, which no policy chose"
NO_DECISION = "ran under no decision: no draft was feasible, or the planner was away"
NOT_IN_LOG = "ran under a decision that is not in the log"
OTHER_BUCKET = "ran in another bucket than their decision was asked for"


def put_together(lines: Iterable[Drawn | Heard]) -> Log:
    """Bins and reports in the order of time.

    Raises:
        InvalidRequest: A decision is there twice.
    """
    log = Log()
    by_id: dict[str, Bin] = {}
    last: dict[tuple[str, str, str, int], Bin] = {}
    for line in sorted(lines, key=lambda line: line.at_ms):  # stable: a file is in order
        if isinstance(line, Drawn):
            if line.decision_id in by_id:
                raise InvalidRequest(
                    "log", f"decision {line.decision_id} is there twice; is a file given twice?"
                )
            key = (line.profile_key, line.worker_id, line.version, line.bucket)
            before = last.get(key)
            goes_on = before is not None and before.goes_on_with(line)
            draw = before.draw if before and goes_on else len(by_id)
            by_id[line.decision_id] = last[key] = Bin(line, draw)
            log.events.append(last[key])
            continue
        found = by_id.get(line.decision_id)
        if found is not None:
            known = line.outcome._replace(propensity=found.drawn.propensity)
            line = line._replace(outcome=known)  # noqa: PLW2901  # as the planner itself does
        log.events.append(line)
        log.num_steps += line.outcome.num_steps
        if is_probe(line):
            log.steps_left_out[PROBE] += line.outcome.num_steps
        elif line.decision_id == "":
            log.steps_left_out[NO_DECISION] += line.outcome.num_steps
        elif found is None:
            log.steps_left_out[NOT_IN_LOG] += line.outcome.num_steps
        elif _bucket(line.context, found.drawn.grid) != found.drawn.bucket:
            log.steps_left_out[OTHER_BUCKET] += line.outcome.num_steps
        else:
            found.add(line)
    return log


def _bucket(context: Context, grid: BucketGrid | None) -> int:
    if grid is None:
        return context.bucket
    return grid.bucket(context.batch_size, context.num_kv_tokens)


def parse(text: str) -> Drawn | Heard:
    """Read a line.

    Raises:
        ValueError: It is no line of an audit log; says why.
    """
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("is no JSON") from None
    if not isinstance(line, dict):
        raise ValueError("is no object")
    try:
        match line.get("kind"):
            case "decision":
                return _drawn(line)
            case "report":
                return _heard(line)
    except InvalidRequest as error:
        raise ValueError(str(error)) from None
    except KeyError as error:
        raise ValueError(f"{error.args[0]} is missing") from None
    raise ValueError("is neither a decision nor a report")


def _drawn(line: dict[str, Any]) -> Drawn:
    context = _tuple(Context, line["context"], "context")
    context.check("context")
    drawn = Drawn(
        **_head(line),
        version=_is(line["version"], str, "version"),
        bucket=_is(line["bucket"], int, "bucket"),
        arm=Arm(
            _is(line["gamma"], int, "gamma"),
            _is(line.get("num_extra_drafts", 0), int, "num_extra_drafts"),
        ),
        explored=_is(line["explored"], bool, "explored"),
        propensity=float(_is(line["propensity"], float, "propensity")),
        hold_steps=_is(line["hold_steps"], int, "hold_steps"),
        grid=_grid(line.get("grid")),
        context=context,
    )
    check_range("gamma", drawn.arm.gamma, 0, context.largest_gamma)
    check_range("hold_steps", drawn.hold_steps, 1, MAX_HOLD)
    if not 0 < drawn.propensity <= 1:
        raise InvalidRequest("propensity", f"must lie in (0, 1], got {drawn.propensity}")
    return drawn


def _heard(line: dict[str, Any]) -> Heard:
    gamma = _is(line["gamma"], int, "gamma")
    context = _tuple(Context, line["context"], "context")
    context.check("context")
    outcome = _tuple(Outcome, line, "report")
    outcome.check("report", gamma)
    return Heard(**_head(line), gamma=gamma, context=context, outcome=outcome)


def _head(line: dict[str, Any]) -> dict[str, Any]:
    head = {
        "at_ms": _is(line["at_ms"], int, "at_ms"),
        "profile_key": _is(line["profile"], str, "profile"),
        "worker_id": _is(line["worker"], str, "worker"),
        "decision_id": _is(line["decision_id"], str, "decision_id"),
    }
    check_text("decision_id", head["decision_id"])
    return head


def _tuple(kind: type[T], values: Any, field: str) -> T:
    """A named tuple of what an object says; what it does not say is the default.

    A planner of another version may say more: that is left alone.
    """
    if not isinstance(values, dict):
        raise InvalidRequest(field, "must be an object")
    read: dict[str, Any] = {}
    for name in kind._fields:
        default = kind._field_defaults.get(name, 0)
        if default is None or (name not in values and name in kind._field_defaults):
            continue
        value = values[name]
        if isinstance(default, tuple):
            numbers = _is(value, list, f"{field}.{name}")
            read[name] = tuple([_is(n, int, f"{field}.{name}") for n in numbers])
        else:
            read[name] = _is(value, type(default), f"{field}.{name}")
    return kind(**read)


def _grid(edges: Any) -> BucketGrid | None:
    if edges is None:
        return None
    pair = _is(edges, list, "grid")
    if len(pair) != 2:
        raise InvalidRequest("grid", "must be two lists of edges")
    rows, columns = ([_is(edge, int, "grid") for edge in _is(row, list, "grid")] for row in pair)
    return BucketGrid(tuple(rows), tuple(columns))


def _is(value: object, kind: type, field: str) -> Any:
    """The value, if it is of that kind; a whole number is a float too, a bool is no number."""
    if type(value) is kind or (kind is float and type(value) is int):
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidRequest(field, "must be finite")
        if kind is int and not -(2**63) <= cast(int, value) < 2**63:
            raise InvalidRequest(field, "is too large")
        return cast(Any, value)
    raise InvalidRequest(field, f"must be {_WORDS[kind]}, got {str(value)[:40]!r}")


_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    list: "a list",
}
