"""Replays a policy over a log: with which probability it would have drawn each arm, bin by bin.

The policy is asked in every context in which an arm was drawn. It learns from what was logged, so
a policy that would have drawn other arms learns here from those of the log, and it begins from
nothing. The session of a stream goes on as if the logged arm had been its own.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping

from nightjar.errors import NightjarError
from planner_service.bins import Arm, Bin, Event, is_probe
from planner_service.context import Context
from planner_service.policies.policy import Choice, Policy, check_choice
from planner_service.session import Session
from planner_service.sums import NOTHING, Stats

MAX_DRAWS = 24  # per bin
MAX_DRAWS_FOR_LOGGED = 72  # while none showed the arm that was logged
DRAWS_OF_A_HELD_ARM = (
    6  # draws of one arm alone, with the probability it had, after which it is held
)
_SEEN = 0.9999  # of the probability: enough

Probabilities = Mapping[Arm, float]


class Replay:
    """Policy `policy` over one profile's log."""

    def __init__(self, policy: Policy, seed: int) -> None:
        self._policy = policy
        self._rng = random.Random(seed)
        self._stats: Stats = NOTHING
        self._sessions: dict[str, Session] = {}  # by worker
        # Of each stream's last draw, by bucket and over all: some hold an arm whatever the bucket.
        self._held: dict[tuple[str, int | None], Probabilities] = {}
        self._arms: set[Arm] = set()  # ever drawn
        self.unseen: dict[Bin, float] = {}  # probability of arms that no draw showed

    def run(self, events: Iterable[Event]) -> dict[Bin, Probabilities]:
        """The probability of each arm at each draw at which there was a choice.

        Raises:
            NightjarError: The policy fails.
        """
        found: dict[Bin, Probabilities] = {}  # as far as draws showed them
        for event in events:
            worker = event.drawn.worker_id if isinstance(event, Bin) else event.worker_id
            session = self._sessions.get(worker, Session())
            if isinstance(event, Bin):
                if event.is_choice:
                    found[event], session = self._draw(event, session)
                gamma = event.drawn.arm.gamma
                self._sessions[worker] = session._replace(previous_gamma=gamma)
                continue
            context, outcome = event.context, event.outcome
            try:
                learned = self._policy.update(self._stats, context, event.gamma, outcome)
            except Exception as error:  # whatever a policy raises
                raise NightjarError(
                    f"the policy failed to learn from {context}: {error!r}"
                ) from error
            self._stats = self._stats.plus(learned)
            if context.feasible_max_gamma > 0 and not is_probe(event):
                self._sessions[worker] = session.after_steps(context.bucket, outcome.num_steps)
        return {drawn: self._spread(drawn, seen) for drawn, seen in found.items()}

    def _draw(self, drawn: Bin, session: Session) -> tuple[Probabilities, Session]:
        """Ask until the arms drawn hold nearly all probability, or often enough."""
        logged, context = drawn.drawn.arm, drawn.drawn.context
        keys = [(drawn.drawn.worker_id, bucket) for bucket in (context.bucket, None)]
        held = [self._held.get(key, {}) for key in keys]
        seen: dict[Arm, float] = {}
        kept: Session | None = None
        for number in range(MAX_DRAWS_FOR_LOGGED):
            if number >= MAX_DRAWS and logged in seen:
                break
            choice, after = self._ask(context, session)
            arm = Arm(choice.gamma, choice.num_extra_drafts)
            seen[arm] = choice.propensity
            if kept is None or arm == logged:
                kept = after
            if sum(seen.values()) >= _SEEN:
                break
            if (
                number >= DRAWS_OF_A_HELD_ARM and len(seen) == 1
            ):  # in the middle of a bin of its own?
                for its in held:
                    if its.get(arm) == seen[arm]:
                        return its, kept
        assert kept is not None
        self._arms |= set(seen)
        self._held.update(dict.fromkeys(keys, seen))
        return seen, kept

    def _ask(self, context: Context, session: Session) -> tuple[Choice, Session]:
        try:
            choice, after = self._policy.select(context, self._stats, session, self._rng)
            problem = check_choice(choice, context)
        except Exception as error:  # whatever a policy raises
            problem = f"raised {error!r}"
        if problem:
            raise NightjarError(f"the policy failed in {context}: {problem}")
        return choice, after

    def _spread(self, drawn: Bin, seen: Probabilities) -> Probabilities:
        """Give the probability that no draw showed to the policy's other arms, evenly.

        Exact where it explores evenly, as most do; else wrong by `unseen` at most.
        """
        total = sum(seen.values())
        largest = drawn.drawn.context.largest_gamma
        others = [arm for arm in self._arms if arm not in seen and arm.gamma <= largest]
        if total > 1 or not others:  # rounding, or propensities that a policy only estimates
            return {arm: share / total for arm, share in seen.items()}
        left = 1 - total
        if left > 1 - _SEEN:
            self.unseen[drawn] = left
        return {**seen, **dict.fromkeys(others, left / len(others))}
