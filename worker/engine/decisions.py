"""Which gamma the worker trusts. Pure: time is an argument.

Order of trust: the held decision of the bucket, for its steps while the planner's stream lives
and 250 ms after it is lost; the newest table, of the same policy version, for 60 s; gamma 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from nightjar.buckets import BucketGrid
from worker.messages import Decision

GRACE_S = 0.25
TABLE_S = 60.0
ASK_AGAIN_S = 0.1  # an answer takes a millisecond or two; after this long it is taken as lost
NO_BUCKET = -1


@dataclass(frozen=True, slots=True)
class Choice:
    """A gamma for one step, and on whose word."""

    gamma: int
    exploit_gamma: int
    bucket: int
    decision_id: str = ""  # empty: the worker's own fallback
    policy_version: str = ""
    held: bool = False
    grid: int = 0  # number of the grid that the bucket is of: each new grid has another
    num_extra_drafts: int = 0


@dataclass(slots=True)
class _Held:
    decision: Decision
    num_steps_left: int


class Decisions:
    """Decisions that arrived, and what they are still good for."""

    def __init__(self, *, planned: bool, fixed_gamma: int) -> None:
        """Start without any decision.

        Args:
            planned: Whether a planner is configured; without one `fixed_gamma` always holds.
            fixed_gamma: Gamma without a planner.
        """
        gamma = 0 if planned else fixed_gamma
        self._planned = planned
        self._fallback = Choice(gamma, gamma, NO_BUCKET)
        self._connected = False
        self._lost_at = float("-inf")
        self._latest: Decision | None = None
        self._arrived_at = 0.0
        self._grid = BucketGrid(())
        self._grid_number = 0
        self._held: dict[int, _Held] = {}  # by bucket of the grid
        # Batch size, KV tokens and time of the open question: one at a time.
        self._asked: tuple[int, int, float] | None = None

    @property
    def connected(self) -> bool:
        """Whether the planner's stream is open."""
        return self._connected

    @property
    def session(self) -> bytes:
        """Session of the newest decision, to be sent back with a question."""
        return b"" if self._latest is None else self._latest.session

    def link(self, connected: bool, now: float) -> None:
        """The planner's stream opened or was lost."""
        if self._connected and not connected:
            self._lost_at = now
        self._connected = connected
        self._asked = None

    def take(self, decision: Decision, now: float) -> None:
        """A decision arrived; one of another policy version, or grid, ends all that was held."""
        grid = BucketGrid(decision.batch_size_edges, decision.kv_token_edges)
        if grid != self._grid:
            self._grid, self._grid_number = grid, self._grid_number + 1
            self._held.clear()
        elif self._latest is None or decision.policy_version != self._latest.policy_version:
            self._held.clear()
        self._latest, self._arrived_at = decision, now
        # One sent unasked, about another bucket, leaves the question open.
        if self._asked is not None and grid.bucket(*self._asked[:2]) == decision.bucket:
            self._asked = None
        if decision.bucket in decision.table and decision.hold_steps > 0:
            self._held[decision.bucket] = _Held(decision, decision.hold_steps)

    def choose(self, batch_size: int, num_kv_tokens: int, now: float) -> Choice:
        """The gamma for a batch, by the order of trust; not yet clamped to what is feasible."""
        if self._latest is None:
            return self._fallback
        bucket = self._grid.bucket(batch_size, num_kv_tokens)
        held = self._held.get(bucket)
        if held is not None and (self._connected or now - self._lost_at < GRACE_S):
            return self._choice(held.decision, bucket, held=True)
        if bucket in self._latest.table and now - self._arrived_at <= TABLE_S:
            return self._choice(self._latest, bucket, held=False)
        return Choice(0, 0, bucket, grid=self._grid_number)

    def _choice(self, decision: Decision, bucket: int, *, held: bool) -> Choice:
        gamma, exploit_gamma = decision.table[bucket]
        return Choice(
            gamma,
            exploit_gamma,
            bucket,
            decision.decision_id,
            decision.policy_version,
            held,
            self._grid_number,
            decision.num_extra_drafts,
        )

    def ran(self, choice: Choice) -> bool:
        """A step that counts ran under this choice; True if a hold ended with it."""
        held = self._held.get(choice.bucket)
        if not choice.held or held is None or held.decision.decision_id != choice.decision_id:
            return False
        held.num_steps_left -= 1
        if held.num_steps_left > 0:
            return False
        del self._held[choice.bucket]
        return True

    def asks(self, batch_size: int, num_kv_tokens: int, now: float) -> bool:
        """Whether to ask for a decision for that batch now; the question counts as asked.

        A bucket without a hold is asked about, though the table serves it meanwhile: its hold
        has ended, or it never had one. Batches that wander ask one question at a time.
        """
        if not self._planned or not self._connected:
            return False
        if self._grid.bucket(batch_size, num_kv_tokens) in self._held:
            return False
        if self._asked is not None and now - self._asked[2] < ASK_AGAIN_S:
            return False
        self._asked = (batch_size, num_kv_tokens, now)
        return True
