"""Finds plug-ins among the installed packages, and makes policies of them that run elsewhere.

A plug-in is an entry point of group `nightjar.policies` that loads a `PolicySpec`. Nothing of it
is ever imported here: what it is, its process says.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from nightjar import log
from planner_service.context import Context, Outcome
from planner_service.plugins.child import Made
from planner_service.plugins.process import Away, PluginProcess
from planner_service.plugins.wire import (
    MAX_OWN_NAMES,
    Nonsense,
    names_of,
    read_answer,
    read_update,
    sent_session,
    sent_stats,
)
from planner_service.policies.policy import Choice, Parameter, Policy, PolicySpec, Registry
from planner_service.session import Session
from planner_service.sums import Stats, observe
from planner_service.trial import PolicyFailed

GROUP = "nightjar.policies"
AWAY_HOLD_STEPS = 8  # so that the plug-in is asked again soon
MAX_REMEMBERED = 256  # batch sizes
KINDS = ("int", "float", "choice", "text")
NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")


class PluginPolicy(Policy):
    """A policy in the process of the plug-ins.

    While the process is away it goes on with what it answered last for the batch size, and with
    plain decoding where it never did. Of `update`, its own sums count; the common ones are made
    here, so that a plug-in cannot spoil what other policies learn from.
    """

    def __init__(self, process: PluginProcess, plugin: str, name: str, made: Made) -> None:
        self._process, self._plugin, self._name, self._made = process, plugin, name, made
        self._last: dict[int, tuple[int, int]] = {}  # gamma and unexplored gamma by batch size

    def select(
        self, context: Context, stats: Stats, session: Session, rng: random.Random
    ) -> tuple[Choice, Session]:
        """What the plug-in chooses.

        Raises:
            PolicyFailed: It raised, hung, ended its process, or answered nonsense.
        """
        question = {
            "verb": "select",
            "context": context,
            "stats": sent_stats(stats, context.batch_size, self._name),
            "session": sent_session(session),
            "seed": rng.getrandbits(53),
        }
        try:
            choice, after = read_answer(self._process.ask(self._made, question))
        except Away:
            gamma, exploit = self._last.get(context.bucket, (0, 0))
            gamma, exploit = min(gamma, context.largest_gamma), min(exploit, context.max_gamma)
            choice = Choice(gamma, exploit, AWAY_HOLD_STEPS, False, 1.0, {})
            return choice, session._replace(previous_gamma=gamma)
        except Nonsense as error:
            raise PolicyFailed(f"answered nonsense: {error}") from None
        if type(choice.gamma) is int and type(choice.exploit_gamma) is int:
            self._last.pop(context.bucket, None)
            self._last[context.bucket] = (choice.gamma, choice.exploit_gamma)
            if len(self._last) > MAX_REMEMBERED:
                del self._last[next(iter(self._last))]
        return choice, after

    def update(self, stats: Stats, context: Context, gamma: int, outcome: Outcome) -> Stats:
        """The common sums, with what the plug-in adds to its own.

        Raises:
            PolicyFailed: As `select`.
        """
        added = observe(context, gamma, outcome)
        if context.feasible_max_gamma == 0 or not self._made.learns:
            return added
        question = {
            "verb": "update",
            "context": context,
            "stats": sent_stats(stats, context.batch_size, self._name),
            "gamma": gamma,
            "outcome": outcome,
        }
        try:
            own, latest = read_update(self._process.ask(self._made, question), self._name)
        except Away:
            return added
        except Nonsense as error:
            raise PolicyFailed(f"answered nonsense: {error}") from None
        if len(names_of(self._name, {*stats.own, *own, *stats.latest, *latest})) > MAX_OWN_NAMES:
            raise PolicyFailed(f"keeps sums under more than {MAX_OWN_NAMES} names")
        return added._replace(own={**added.own, **own}, latest=latest)

    def end(self, *, failed: bool) -> None:
        """The version is no longer used here."""
        self._process.drop(self._made, failed=failed)


@dataclass(frozen=True, kw_only=True)
class PluginSpec(PolicySpec):
    """A policy of another package; it is tried out in a process that runs nothing else."""

    plugin: str
    point: EntryPoint = field(repr=False)
    limit_s: float

    @contextmanager
    def on_trial(self, given: Mapping[str, str]) -> Iterator[tuple[Policy, dict[str, str]]]:
        """Make the policy in a process of its own, which ends with the block."""
        values, parameters = self.read(given)
        process = PluginProcess({self.plugin: self.point}, self.limit_s, patient=True)
        try:
            process.load()
            made = process.make(self.plugin, values)
            yield PluginPolicy(process, self.plugin, self.name, made), parameters
        finally:
            process.close()


def installed() -> dict[str, EntryPoint]:
    """Entry points of installed packages, by "package version: name"."""
    found: dict[str, EntryPoint] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        name = f"{point.dist.name} {point.dist.version}" if point.dist else "an unknown package"
        found.setdefault(f"{name}: {point.name}", point)
    return found


def load_plugins(taken: Registry, limit_s: float) -> tuple[Registry, PluginProcess | None]:
    """Policies of installed packages, and the process they run in; None where there are none.

    What is broken, or has a name that is taken, is said and left out.
    """
    points = installed()
    if not points:
        return {}, None
    process = PluginProcess(points, limit_s)
    specs: dict[str, PolicySpec] = {}
    for plugin, told in process.load().items():
        try:
            spec = _spec(process, plugin, points[plugin], told)
        except (ValueError, TypeError, KeyError) as error:
            process.leave_out(plugin, str(error))
            continue
        if spec.name in taken or spec.name in specs:
            process.leave_out(plugin, f"there is another policy {spec.name!r}")
            continue
        specs[spec.name] = spec
        log.get().info("plug-in loaded", plugin=plugin, policy=spec.name)
    return specs, process


def _spec(
    process: PluginProcess, plugin: str, point: EntryPoint, told: Mapping[str, Any]
) -> PluginSpec:
    name = told["name"]
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(f"a policy cannot be named {name!r:.40}: small letters, digits and _")
    return PluginSpec(
        name=name,
        summary=f"{told['summary']:.300} (plug-in of {plugin.partition(':')[0]})",
        parameters=tuple(_parameter(fields) for fields in told["parameters"]),
        additive=bool(told["additive"]),
        make=lambda values: PluginPolicy(process, plugin, name, process.make(plugin, values)),
        plugin=plugin,
        point=point,
        limit_s=process.limit_s,
    )


def _parameter(fields: dict[str, Any]) -> Parameter:
    texts = [fields[name] for name in ("name", "help", "kind", "form")]
    texts += fields["choices"]
    numbers = [fields["minimum"], fields["maximum"]]
    if not all(isinstance(text, str) for text in texts) or fields["kind"] not in KINDS:
        raise ValueError(f"a parameter says {texts!r:.120} of itself")
    if not all(type(number) in (int, float) for number in numbers):
        raise ValueError(f"parameter {fields['name']!r:.40} lies in {numbers!r:.80}")
    if type(fields["default"]) not in (int, float, str):
        raise ValueError(f"parameter {fields['name']!r:.40} has no default")
    return Parameter(**{**fields, "choices": tuple(fields["choices"])})
