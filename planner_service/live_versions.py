"""The versions in use at this planner: their policies, whose turn it is, and what they brought.

Built-in policies run in this process and cannot be stopped within a call: one that raises or
answers out of range is withdrawn, one that never returns is not. Plug-ins run elsewhere, with a
limit on every call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from nightjar import log
from nightjar.errors import InvalidRequest
from planner_service.context import Context, Outcome
from planner_service.net_benefit import Benefit, FloorWatch, Meter
from planner_service.policies.policy import Policy, Registry
from planner_service.session import MAX_HOLD
from planner_service.slices import Probes, has_slice, steps_left_of_slice
from planner_service.versions import Book

FALLBACK_VERSION = "0-off"  # plain decoding, where no version can decide
MAX_MEMOS = 65_536

OnWithdraw = Callable[[str, str, int], None]  # version id, why, milliseconds since the epoch


class Candidate(NamedTuple):
    """A live version that can decide for a worker; a canary, in its slices."""

    version_id: str
    number: int
    name: str
    canary_share: float


class _Candidates(NamedTuple):
    """The versions of one worker, newest first."""

    found: tuple[Candidate, ...]
    has_canary: bool


@runtime_checkable
class Hosted(Protocol):
    """A policy that runs in another process, and is told when its version ends."""

    def end(self, *, failed: bool) -> None:
        """The version is no longer used here; told once or more."""


class LiveVersions:
    """Which version decides a worker's next step, and what becomes of it."""

    def __init__(
        self,
        registry: Registry,
        probes: Probes,
        clock: Callable[[], float],
        now_ms: Callable[[], int],
        on_withdraw: OnWithdraw,
    ) -> None:
        self.registry = registry
        self.book = Book()
        self.num_policy_faults = 0
        self.probes = probes
        self._clock, self._now_ms, self._on_withdraw = clock, now_ms, on_withdraw
        self._policies: dict[str, Policy] = {}  # by id of a live version
        self._meters: dict[str, Meter] = {}  # likewise
        self._floors: dict[str, FloorWatch] = {}  # of those that have one
        self._candidates_of: dict[tuple[str, str], _Candidates] = {}  # memo over the book

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
        kept = {id(policy) for policy in policies.values()}
        for policy in [p for p in self._policies.values() if id(p) not in kept]:
            _end(policy, failed=False)
        self.book, self._policies = book, policies
        self._candidates_of.clear()
        floors = {v.id: v.floor for v in book.versions if v.id in policies and v.floor}
        self._meters = {v: self._meters.get(v) or Meter() for v in policies}
        self._floors = {v: self._floors.get(v) or FloorWatch(floor) for v, floor in floors.items()}

    def deciding_version(self, profile_key: str, worker_id: str) -> str:
        """Id of the version that decides for a worker, canaries aside."""
        candidates = self._candidates(profile_key, worker_id).found
        whole = [c.version_id for c in candidates if not c.canary_share]
        return (*whole, FALLBACK_VERSION)[0]

    def net_benefit(self, version_id: str) -> Benefit | None:
        """What a live version's steps brought at this planner; None while not measured."""
        meter = self._meters.get(version_id)
        return meter.measured(self._clock()) if meter else None

    def due(
        self, profile_key: str, worker_id: str, num_steps: int
    ) -> tuple[Sequence[Candidate], int]:
        """Who may decide a worker's step after `num_steps`, and steps until that may change.

        The first decides; the others follow in case it fails.
        """
        found, has_canary = self._candidates(profile_key, worker_id)
        if not has_canary:
            return found, MAX_HOLD
        due = [
            c
            for c in found
            if not c.canary_share or has_slice(c.canary_share, worker_id, num_steps, c.number)
        ]
        return due, steps_left_of_slice(num_steps)

    def probe(self, candidate: Candidate, worker_id: str, num_steps: int) -> tuple[bool, int]:
        """Whether that step is a probe of plain decoding, and steps until that changes."""
        if not self.probes.share or candidate.name == "off" or not worker_id:
            return False, MAX_HOLD
        return self.probes.at(worker_id, num_steps)

    def withdraw(self, version_id: str, problem: str, *, failed: bool = True) -> None:
        """Take a version away, because its policy failed or it stayed below its floor."""
        self.num_policy_faults += failed
        _end(self._policies.get(version_id), failed=failed)
        log.get().error(
            "policy failed; its version is rolled back"
            if failed
            else "version stayed below its floor; it is rolled back",
            version=version_id,
            problem=problem,
        )
        at_ms = self._now_ms()
        self.set_book(self.book.withdraw(version_id, problem, at_ms))
        self._on_withdraw(version_id, problem, at_ms)

    def measure(
        self, version_id: str, profile_key: str, context: Context, gamma: int, outcome: Outcome
    ) -> None:
        """Count steps for their version's net benefit, and gamma 0 as everyone's baseline.

        Args:
            version_id: Version that chose them; empty for probes, and where it is not known.
            profile_key: Profile of the worker.
            context: What they ran in.
            gamma: What they ran with.
            outcome: Their sums.
        """
        if context.feasible_max_gamma == 0:  # no choice: what it cost counts, how it went does not
            gamma, outcome = (
                -1,
                Outcome(
                    0, catch_up_us=outcome.catch_up_us, draft_prefill_us=outcome.draft_prefill_us
                ),
            )
        key, now = (profile_key, context.bucket), self._clock()
        for version, meter in self._meters.items():
            is_own = version == version_id
            if is_own or gamma == 0:
                meter.add(key, gamma, outcome, now, is_own=is_own)
                if (watch := self._floors.get(version)) is not None:
                    watch.meter.add(key, gamma, outcome, now, is_own=is_own)
        watch = self._floors.get(version_id)
        if watch is not None and (problem := watch.problem(now)):
            self.withdraw(version_id, problem, failed=False)

    def _candidates(self, profile_key: str, worker_id: str) -> _Candidates:
        key = (profile_key, worker_id)
        memo = self._candidates_of.get(key)
        if memo is None:
            if len(self._candidates_of) >= MAX_MEMOS:
                self._candidates_of.clear()
            found = tuple(
                Candidate(v.id, v.number, v.name, v.scope.canary_share)
                for v in self.book.deciding(profile_key, worker_id)
                if v.id in self._policies
            )
            has_canary = any(c.canary_share > 0 for c in found)
            memo = self._candidates_of[key] = _Candidates(found, has_canary)
        return memo


def _end(policy: object, *, failed: bool) -> None:
    if isinstance(policy, Hosted):
        policy.end(failed=failed)
