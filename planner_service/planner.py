"""The planner's core: decisions and learning from memory, for all streams of one process.

No gRPC and no store in here; the clock and the randomness are passed in.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from nightjar.errors import InvalidRequest, Overloaded
from planner_service.context import Context, Outcome, Profile
from planner_service.ledger import Ledger
from planner_service.live_versions import FALLBACK_VERSION, LiveVersions, OnWithdraw
from planner_service.observation import observe
from planner_service.policies.policy import Choice, Registry, check_choice, check_table
from planner_service.session import Session, pack, steps_of, unpack
from planner_service.slices import Probes
from planner_service.sums import NOTHING, Stats
from planner_service.trial import try_out, words_of
from planner_service.versions import Scope

MAX_PROFILES = 256
MAX_TRIED_PROFILES = 4  # a new policy is tried on what is known of these, most recent ones
MAX_REMEMBERED_DECISIONS = 16_384
MAX_SESSIONS = 8  # of one stream, before those of versions that ended are dropped
PROBE_SUFFIX = "-probe"  # of a probe's decision id


class Decision(NamedTuple):
    """What goes to a worker."""

    decision_id: str
    version: str
    choice: Choice
    context: Context
    session: bytes


class Report(NamedTuple):
    """Sums over steps with the same bucket, gamma and decision."""

    context: Context
    gamma: int
    decision_id: str
    outcome: Outcome


@dataclass(slots=True)
class Stream:
    """One worker's side of the conversation."""

    profile: Profile
    worker_id: str
    reports: bool = True  # False: a hold counts as run as soon as it is handed out
    version: str = ""  # of the last decision; empty until the first
    previous_gamma: int = 0
    num_steps: int = 0  # that could speculate, whichever version they ran under
    sessions: dict[str, Session] = field(default_factory=dict)  # by version: slices take turns
    outdated: Context | None = None  # of steps that ran under a decision no longer due


class _Made(NamedTuple):
    """What is remembered of a decision until its steps are reported."""

    version_id: str
    propensity: float
    is_probe: bool


class Planner(LiveVersions):
    """Decides for every stream and learns from all of them."""

    def __init__(
        self,
        *,
        registry: Registry,
        ledger: Ledger,
        incarnation: str,
        rng: random.Random,
        clock: Callable[[], float],
        on_withdraw: OnWithdraw = lambda version_id, because, at_ms: None,
        probe_share: float = 0.0,
        now_ms: Callable[[], int] = lambda: 0,
    ) -> None:
        """Know nothing yet.

        Args:
            registry: Policies that can be activated, by name.
            ledger: Where what is learned goes.
            incarnation: Name of this process among all planners there ever were.
            rng: For the policies' draws.
            clock: Seconds, monotonic.
            on_withdraw: Told of a version that was withdrawn here: its id, why, and when.
            probe_share: Share of steps that plain decoding is measured in, [0, 0.5].
            now_ms: Milliseconds since the epoch.
        """
        super().__init__(registry, Probes(probe_share), clock, now_ms, on_withdraw)
        self.ledger = ledger
        self.profiles: dict[str, Profile] = {}
        self._incarnation = incarnation
        self._rng = rng
        self._checked_table: tuple[object, int] = (None, 0)
        self._made: OrderedDict[str, _Made] = OrderedDict()  # by decision id
        self._num_decisions = 0

    def prepare(self, name: str, given: Mapping[str, str], scope: Scope) -> dict[str, str]:
        """Try a policy out for a scope; returns its parameters, defaults filled in.

        Raises:
            InvalidRequest: It is unknown, a parameter is wrong, or an answer is out of range.
        """
        if name not in self.registry:
            raise InvalidRequest(
                "name", f"unknown policy {name[:64]!r}; known: {', '.join(self.registry)}"
            )
        known = [p for p in self.profiles.values() if scope.profile_key in ("", p.key)]
        stats = [self.stats(profile) for profile in known[-MAX_TRIED_PROFILES:]]
        with self.registry[name].on_trial(given) as (policy, parameters):
            problem = try_out(policy, stats)
        if problem:
            raise InvalidRequest("name", f"policy {name!r} was tried and refused {problem}")
        return parameters

    def due_version(self, stream: Stream) -> str:
        """Id of the version that decides a stream's next step."""
        due, _ = self.due(stream.profile.key, stream.worker_id, stream.num_steps)
        return due[0].version_id if due else FALLBACK_VERSION

    def register(self, profile: Profile) -> None:
        """Know a profile; the one that was silent longest gives way if there are too many.

        What was learned for that one stays in the store, and is read again when it speaks.

        Raises:
            Overloaded: Too many are known whose sums the store does not have yet.
        """
        known = self.profiles.pop(profile.key, None)
        if known is None:
            if len(self.profiles) >= MAX_PROFILES:
                self._forget_one()
            self.ledger.track((profile.key, profile.acceptance_key))
        self.profiles[profile.key] = known or profile  # last: most recently heard

    def _forget_one(self) -> None:
        for key, silent in self.profiles.items():
            if self.ledger.forget(key):
                del self.profiles[key]
                if all(p.acceptance_key != silent.acceptance_key for p in self.profiles.values()):
                    self.ledger.forget(silent.acceptance_key)
                return
        raise Overloaded(f"the planner knows {MAX_PROFILES} profiles, its limit", 1)

    def stats(self, profile: Profile) -> Stats:
        """All that is known of a profile, with what is prior."""
        shared = self.ledger.total(profile.acceptance_key)
        prior_steps = self.ledger.prior_steps(profile.key)
        return self.ledger.total(profile.key).with_prior(shared, prior_steps, profile.key)

    def decide(self, stream: Stream, context: Context, returned: bytes = b"") -> Decision:
        """Choose for a context.

        The session that came back counts on a stream's first decision only; after that the
        stream's own is newer, since a decision may have crossed the question on the wire.

        A probe is decided as gamma 0 where the policy chose more: its id says so, it counts as
        explored, and its arm was certain. The policy does not see it: it goes on afterwards.
        """
        if not stream.version:
            stream.num_steps += steps_of(returned)
        stats = self.stats(stream.profile)
        due, left = self.due(stream.profile.key, stream.worker_id, stream.num_steps)
        is_probe = False
        for candidate in due:
            version = candidate.version_id
            before = _session(stream, version, returned)
            try:
                choice, session = self._policies[version].select(context, stats, before, self._rng)
                problem = check_choice(choice, context) or self._check_table(
                    choice, context.max_gamma
                )
            except Exception as error:  # a policy's fault must not reach the worker
                problem = words_of(error)
            if problem:
                self.withdraw(version, problem)
                continue
            is_probe, until = self.probe(candidate, stream.worker_id, stream.num_steps)
            is_probe, left = is_probe and choice.gamma > 0, min(left, until)
            if is_probe:
                choice, session = _plain(choice, left), before._replace(previous_gamma=0)
            elif choice.hold_steps > left:
                choice = choice._replace(hold_steps=left)
            stream.sessions[version] = session
            break
        else:
            version, session = FALLBACK_VERSION, Session()
            choice = Choice(0, 0, min(64, left), False, 1.0, {})
        stream.version, stream.previous_gamma = version, choice.gamma
        stream.outdated = None
        if len(stream.sessions) > MAX_SESSIONS:
            stream.sessions = {v: s for v, s in stream.sessions.items() if v in self._policies}
        self._num_decisions += 1
        decision_id = f"{self._incarnation}-{self._num_decisions}"
        if is_probe:
            decision_id += PROBE_SUFFIX
        self._made[decision_id] = _Made(version, choice.propensity, is_probe)
        if len(self._made) > MAX_REMEMBERED_DECISIONS:
            self._made.popitem(last=False)
        # The policy's bin stands still during a probe: nothing of it counts as run.
        policy_hold = 0 if is_probe else choice.hold_steps
        num_steps = stream.num_steps + (0 if stream.reports else choice.hold_steps)
        packed = pack(session, version, context.bucket, policy_hold, num_steps)
        return Decision(decision_id, version, choice, context, packed)

    def learn(self, stream: Stream, report: Report) -> None:
        """Learn from steps, to the good of every stream of the profile."""
        context, gamma, decision_id, outcome = report
        self.register(stream.profile)
        made = self._made.get(decision_id)
        outcome = outcome._replace(propensity=made.propensity if made else None)
        version = made.version_id if made else stream.version
        learned = self._update(stream, version, context, gamma, outcome)
        now = self._clock()
        if learned is not NOTHING:
            self.ledger.add(stream.profile.key, learned, now)
        if any(learned.reached):
            self.ledger.add(stream.profile.acceptance_key, learned.only_acceptance(), now)
        own = version if made and not made.is_probe else ""
        self.measure(own, stream.profile.key, context, gamma, outcome)
        if context.feasible_max_gamma == 0:
            return
        stream.num_steps += outcome.num_steps
        if version in stream.sessions and not (made and made.is_probe):
            session = stream.sessions[version].after_steps(context.bucket, outcome.num_steps)
            stream.sessions[version] = session
        if made is not None and stream.version:
            stream.outdated = context if self._is_outdated(stream, made, gamma) else None

    def _is_outdated(self, stream: Stream, made: _Made, gamma: int) -> bool:
        """Whether steps go on under what is no longer due: a hold outlived its slice or probe.

        That happens where the batch changes its bucket and comes back to a hold it had left.
        """
        due, _ = self.due(stream.profile.key, stream.worker_id, stream.num_steps)
        if not due or stream.version != due[0].version_id:
            return bool(due) or stream.version != FALLBACK_VERSION
        if made.version_id != stream.version:
            return False  # on its way while the version changed
        probe_is_due, _ = self.probe(due[0], stream.worker_id, stream.num_steps)
        return gamma > 0 if probe_is_due else made.is_probe

    def _update(
        self, stream: Stream, version: str, context: Context, gamma: int, outcome: Outcome
    ) -> Stats:
        """What steps teach, by the version that they ran under, else by the one that is due."""
        stats = self.stats(stream.profile)
        due, _ = self.due(stream.profile.key, stream.worker_id, stream.num_steps)
        for known in (version, *(candidate.version_id for candidate in due)):
            if known in self._policies:
                try:
                    return self._policies[known].update(stats, context, gamma, outcome)
                except Exception as error:  # what ran is learned even where a policy fails
                    self.withdraw(known, f"update {words_of(error)}")
        return observe(context, gamma, outcome)

    def _check_table(self, choice: Choice, max_gamma: int) -> str:
        # Constant policies answer with one table for ever: checked once.
        if self._checked_table[0] is choice.table and self._checked_table[1] == max_gamma:
            return ""
        problem = check_table(choice.table, max_gamma)
        if not problem:
            self._checked_table = (choice.table, max_gamma)
        return problem


def _session(stream: Stream, version: str, returned: bytes) -> Session:
    if not stream.version:
        return unpack(returned, version)
    session = stream.sessions.get(version, Session())
    return session._replace(previous_gamma=stream.previous_gamma)


def _plain(choice: Choice, num_steps: int) -> Choice:
    """Plain decoding for some steps, in every bucket; memory agents go by the policy's choice."""
    table = {bucket: (0, exploit) for bucket, (_, exploit) in choice.table.items()}
    return Choice(0, choice.exploit_gamma, num_steps, True, 1.0, table, choice.grid)
