"""The planner's core: decisions and learning from memory, for all streams of one process.

No gRPC and no store in here; the clock and the randomness are passed in.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from nightjar import log
from nightjar.errors import InvalidRequest, Overloaded
from planner_service.context import Context, Outcome, Profile
from planner_service.ledger import Ledger
from planner_service.policies.policy import Choice, Policy, Registry, check_choice, check_table
from planner_service.session import Session, pack, unpack
from planner_service.sums import NOTHING, Stats, observe
from planner_service.trial import try_out
from planner_service.versions import Book, Scope

MAX_PROFILES = 256
MAX_TRIED_PROFILES = 4  # a new policy is tried on what is known of these, most recent ones
MAX_REMEMBERED_DECISIONS = 16_384
FALLBACK_VERSION = "0-off"  # plain decoding, where no version can decide


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
    session: Session | None = None  # None until the first decision
    version: str = ""


class Planner:
    """Decides for every stream and learns from all of them."""

    def __init__(
        self,
        *,
        registry: Registry,
        ledger: Ledger,
        incarnation: str,
        rng: random.Random,
        clock: Callable[[], float],
        on_withdraw: Callable[[str], None] = lambda version_id: None,
    ) -> None:
        self.registry = registry
        self.ledger = ledger
        self.book = Book()
        self.profiles: dict[str, Profile] = {}
        self.num_policy_faults = 0
        self._incarnation = incarnation
        self._rng = rng
        self._clock = clock
        self._on_withdraw = on_withdraw
        self._policies: dict[str, Policy] = {}  # by id of a live version
        self._deciding: dict[tuple[str, str], tuple[str, ...]] = {}  # memo over the book
        self._checked_table: tuple[object, int] = (None, 0)
        self._propensities: OrderedDict[str, float] = OrderedDict()
        self._num_decisions = 0

    # ---- versions ----------------------------------------------------------------------

    def set_book(self, book: Book) -> None:
        """Decide by these versions from now on."""
        known = {v.id: (v.name, v.parameters) for v in self.book.versions}
        policies: dict[str, Policy] = {}
        for version in (v for v in book.versions if v.live):
            if version.id in self._policies and known.get(version.id) == (
                version.name,
                version.parameters,
            ):
                policies[version.id] = self._policies[version.id]
                continue
            try:
                policies[version.id] = self.registry[version.name].build(version.parameters)[0]
            except (KeyError, InvalidRequest) as error:
                log.get().warning(
                    "version left out: this planner cannot run it",
                    version=version.id,
                    reason=str(error),
                )
        self.book, self._policies = book, policies
        self._deciding.clear()

    def prepare(self, name: str, given: Mapping[str, str], scope: Scope) -> dict[str, str]:
        """Try a policy out for a scope; returns its parameters, defaults filled in.

        Raises:
            InvalidRequest: It is unknown, a parameter is wrong, or an answer is out of range.
        """
        if name not in self.registry:
            raise InvalidRequest(
                "name", f"unknown policy {name[:64]!r}; known: {', '.join(self.registry)}"
            )
        policy, parameters = self.registry[name].build(given)
        known = [p for p in self.profiles.values() if scope.profile_key in ("", p.key)]
        problem = try_out(policy, [self.stats(profile) for profile in known[-MAX_TRIED_PROFILES:]])
        if problem:
            raise InvalidRequest("name", f"policy {name!r} was tried and refused {problem}")
        return parameters

    def deciding_version(self, profile_key: str, worker_id: str) -> str:
        """Id of the version that decides for a worker."""
        return (*self._candidates(profile_key, worker_id), FALLBACK_VERSION)[0]

    def _candidates(self, profile_key: str, worker_id: str) -> tuple[str, ...]:
        key = (profile_key, worker_id)
        found = self._deciding.get(key)
        if found is None:
            if len(self._deciding) >= 4 * MAX_REMEMBERED_DECISIONS:
                self._deciding.clear()
            versions = self.book.deciding(profile_key, worker_id)
            found = self._deciding[key] = tuple(v.id for v in versions if v.id in self._policies)
        return found

    def _withdraw(self, version_id: str, problem: str) -> None:
        self.num_policy_faults += 1
        log.get().error(
            "policy failed; its version is rolled back", version=version_id, problem=problem
        )
        self.set_book(self.book.withdraw(version_id))
        self._on_withdraw(version_id)

    # ---- the two verbs -----------------------------------------------------------------

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
        return self.ledger.total(profile.key).with_prior(shared, prior_steps)

    def decide(self, stream: Stream, context: Context, returned: bytes = b"") -> Decision:
        """Choose for a context.

        The session that came back counts on a stream's first decision only; after that the
        stream's own is newer, since a decision may have crossed the question on the wire.
        """
        stats = self.stats(stream.profile)
        for version in self._candidates(stream.profile.key, stream.worker_id):
            session = _session(stream, version, returned)
            try:
                choice, session = self._policies[version].select(context, stats, session, self._rng)
                problem = check_choice(choice, context) or self._check_table(
                    choice, context.max_gamma
                )
            except Exception as error:  # a policy's fault must not reach the worker
                problem = f"raised {type(error).__name__}: {error}"
            if not problem:
                break
            self._withdraw(version, problem)
        else:
            version, session = FALLBACK_VERSION, Session()
            choice = Choice(0, 0, 64, False, 1.0, {})
        stream.session, stream.version = session, version
        self._num_decisions += 1
        decision_id = f"{self._incarnation}-{self._num_decisions}"
        self._propensities[decision_id] = choice.propensity
        if len(self._propensities) > MAX_REMEMBERED_DECISIONS:
            self._propensities.popitem(last=False)
        packed = pack(session, version, context.bucket, choice.hold_steps)
        return Decision(decision_id, version, choice, context, packed)

    def learn(self, stream: Stream, report: Report) -> None:
        """Learn from steps, to the good of every stream of the profile."""
        context, gamma, decision_id, outcome = report
        self.register(stream.profile)
        outcome = outcome._replace(propensity=self._propensities.get(decision_id))
        learned = self._update(stream, context, gamma, outcome)
        now = self._clock()
        if learned is not NOTHING:
            self.ledger.add(stream.profile.key, learned, now)
        if any(learned.reached):
            self.ledger.add(stream.profile.acceptance_key, learned.only_acceptance(), now)
        if stream.session is not None and context.feasible_max_gamma > 0:
            stream.session = stream.session.after_steps(context.bucket, outcome.num_steps)

    def _update(self, stream: Stream, context: Context, gamma: int, outcome: Outcome) -> Stats:
        stats = self.stats(stream.profile)
        for version in self._candidates(stream.profile.key, stream.worker_id):
            try:
                return self._policies[version].update(stats, context, gamma, outcome)
            except Exception as error:  # what ran is learned even where a policy fails
                self._withdraw(version, f"update raised {type(error).__name__}: {error}")
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
    if stream.session is None:
        return unpack(returned, version)
    if stream.version == version:
        return stream.session
    return Session(stream.session.previous_gamma)
