"""Policies of other packages as the planner holds them: each call crosses to their process."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint

from planner_service.context import Context, Outcome
from planner_service.observation import observe
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
from planner_service.policies.policy import Choice, Policy, PolicySpec
from planner_service.session import Session
from planner_service.sums import Stats
from planner_service.trial import PolicyFailed

AWAY_HOLD_STEPS = 8  # so that the plug-in is asked again soon
MAX_REMEMBERED = 256  # batch sizes


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
