"""What a policy is: two pure verbs, and a specification that says how to make one."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from nightjar.buckets import BucketGrid
from nightjar.errors import InvalidRequest
from planner_service.context import MAX_GAMMA, Context, Outcome
from planner_service.observation import observe
from planner_service.session import Session
from planner_service.sums import Stats

ParameterValue = int | float | str
# Steps at which nothing can be speculated advance no hold; the worker need not ask at each.
IDLE_HOLD_STEPS = 8
MAX_VALUE_CHARACTERS = 64
MAX_TEXT_CHARACTERS = 1024  # in a parameter of kind "text"


class Choice(NamedTuple):
    """A policy's answer for one context."""

    gamma: int  # in [0, context.largest_gamma]
    exploit_gamma: int  # the choice without exploration, in [0, context.max_gamma]
    hold_steps: int  # steps of this bucket until the next select, at least 1
    explored: bool
    propensity: float  # with which the held arm was drawn, (0, 1]
    table: Mapping[int, tuple[int, int]]  # other buckets -> (gamma, exploit_gamma)
    grid: BucketGrid | None = None  # of the table; None: one bucket a batch size
    # Each row drafts gamma + this many; of the whole batch the gamma * rows likeliest drafts are
    # verified, by cumulative log-probability. 0: every row's own gamma.
    num_extra_drafts: int = 0


class Policy(Protocol):
    """Decides gamma and learns from what ran; no I/O, no clock, no state of its own."""

    def select(
        self, context: Context, stats: Stats, session: Session, rng: random.Random
    ) -> tuple[Choice, Session]:
        """Choose a gamma; the session returned is passed to the next select of this stream."""
        ...

    def update(self, stats: Stats, context: Context, gamma: int, outcome: Outcome) -> Stats:
        """What steps that ran in `context` with `gamma` add to `stats`; never `stats` itself.

        Replicas share what they learn by adding, so what is returned must count whenever and
        in whatever order it is added: of `stats` it may depend on the clock, `totals.steps`.
        A policy whose `latest` depends on more says so in its specification.
        """
        return observe(context, gamma, outcome)


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter of a policy: its type, default, range and meaning."""

    name: str
    kind: Literal["int", "float", "choice", "text"]
    default: ParameterValue
    help: str
    minimum: float = -math.inf
    maximum: float = math.inf
    choices: tuple[str, ...] = ()
    problem: Callable[[str], str] = lambda text: ""  # what is wrong with a text, in words
    form: str = "text"  # words for what texts it takes

    @property
    def allowed(self) -> str:
        """Words for what values it takes."""
        if self.kind == "choice":
            return "one of " + ", ".join(self.choices)
        if self.kind == "text":
            return self.form
        kind = "a whole number" if self.kind == "int" else "a number"
        return f"{kind} in [{self.minimum:g}, {self.maximum:g}]"

    def parse(self, text: str) -> ParameterValue:
        """Read a value.

        Raises:
            InvalidRequest: It has the wrong type or lies outside the range.
        """
        field = f"parameters.{self.name}"
        if self.kind == "text":
            if len(text) > MAX_TEXT_CHARACTERS:
                raise InvalidRequest(
                    field, f"at most {MAX_TEXT_CHARACTERS} characters, got {len(text)}"
                )
            if problem := self.problem(text):
                raise InvalidRequest(field, f"must be {self.form}: {problem}")
            return text
        if len(text) <= MAX_VALUE_CHARACTERS:
            if self.kind == "choice" and text in self.choices:
                return text
            if self.kind == "int" and re.fullmatch(r"[+-]?[0-9]{1,18}", text):
                value: float = int(text)
                if self.minimum <= value <= self.maximum:
                    return value
            if self.kind == "float" and re.fullmatch(r"[+-]?[0-9.]+(e[+-]?[0-9]+)?", text.lower()):
                try:
                    value = float(text)
                except ValueError:
                    value = math.nan
                if self.minimum <= value <= self.maximum:
                    return value
        raise InvalidRequest(field, f"must be {self.allowed}, got {text[:MAX_VALUE_CHARACTERS]!r}")


def gamma_max(default: int) -> Parameter:
    """The parameter that bounds the arms."""
    return Parameter(
        name="gamma_max",
        kind="int",
        default=default,
        minimum=0,
        maximum=MAX_GAMMA,
        help="largest gamma to try",
    )


@dataclass(frozen=True, kw_only=True)
class PolicySpec:
    """A policy that can be activated."""

    name: str
    summary: str
    parameters: tuple[Parameter, ...]
    make: Callable[[Mapping[str, ParameterValue]], Policy]
    additive: bool = True  # False: keeps `latest`, of which the last writer's stays

    def build(self, given: Mapping[str, str]) -> tuple[Policy, dict[str, str]]:
        """Make the policy; returns it and all its parameters as text, defaults filled in.

        Raises:
            InvalidRequest: A parameter is unknown, or its value is not allowed.
        """
        values, texts = self.read(given)
        return self.make(values), texts

    def read(self, given: Mapping[str, str]) -> tuple[dict[str, ParameterValue], dict[str, str]]:
        """All parameters, defaults filled in, as values and as text; raises as `build` does."""
        known = {parameter.name: parameter for parameter in self.parameters}
        for name in given:
            if name not in known:
                takes = f"takes {', '.join(known)}" if known else "takes no parameters"
                shown = name[:MAX_VALUE_CHARACTERS]
                raise InvalidRequest(f"parameters.{shown}", f"policy {self.name!r} {takes}")
        values = {n: p.parse(given[n]) if n in given else p.default for n, p in known.items()}
        return values, {name: str(value) for name, value in values.items()}

    @contextmanager
    def on_trial(self, given: Mapping[str, str]) -> Iterator[tuple[Policy, dict[str, str]]]:
        """The same, only to be tried out while the block lasts."""
        yield self.build(given)


Registry = Mapping[str, PolicySpec]


def check_choice(choice: Choice, context: Context) -> str:
    """What is wrong with an answer, its table aside, in words; empty if nothing is."""
    for name, value, low, high in (
        ("gamma", choice.gamma, 0, context.largest_gamma),
        ("exploit_gamma", choice.exploit_gamma, 0, context.max_gamma),
        ("hold_steps", choice.hold_steps, 1, 2**20),
    ):
        if type(value) is not int or not low <= value <= high:
            return f"{name} {value!r} is not a whole number in [{low}, {high}]"
    if not 0 < choice.propensity <= 1:
        return f"propensity {choice.propensity!r} does not lie in (0, 1]"
    extra, most = choice.num_extra_drafts, context.largest_gamma - choice.gamma
    if type(extra) is not int or not 0 <= extra <= most:
        return f"num_extra_drafts {extra!r} is not a whole number in [0, {most}]"
    return ""


def check_table(table: Mapping[int, tuple[int, int]], max_gamma: int) -> str:
    """What is wrong with a table, in words; empty if nothing is."""
    for pair in set(table.values()):
        for value in pair:
            if type(value) is not int or not 0 <= value <= max_gamma:
                return f"table entry {value!r} is not a whole number in [0, {max_gamma}]"
    return ""
