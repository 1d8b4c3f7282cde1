"""How many drafts each row of a step gets, and which rows the draft model catches up first.

The draft's cache lacks what was prefilled or emitted while gamma was 0. That staleness is kept
by block alone: nothing is done at gamma 0, and everything else follows from the fill.
"""

from __future__ import annotations

from dataclasses import dataclass

from nightjar import log
from worker.engine.block_manager import BlockManager
from worker.engine.decisions import Choice
from worker.engine.plan import Plan
from worker.engine.sequence import PlannedRow, Sequence
from worker.speculative.proposer import Capabilities

# The token just chosen and, after every draft was accepted, the last of them: these the draft
# takes with its first forward anyway. Anything more is caught up.
MAX_REGULAR_LAG = 2


@dataclass(frozen=True, slots=True)
class Staleness:
    """Tokens that the draft's cache lacks of what the target's holds, and what follows."""

    max_tokens: int
    sum_tokens: int
    feasible_gamma: int  # 0 also while every row that should draft is still catching up


class Drafting:
    """Plans the drafts of a step."""

    def __init__(
        self,
        blocks: BlockManager,
        proposer: Capabilities | None,
        *,
        max_gamma: int,
        max_catchup_tokens: int,
    ) -> None:
        self.usable = proposer is not None
        self.max_gamma = max_gamma if proposer is not None else 0
        self._blocks = blocks
        self._proposer = proposer
        self._max_catchup_tokens = max_catchup_tokens
        self._has_cache = proposer is not None and proposer.has_cache
        self._told_without_extra = False

    @property
    def draft_resident(self) -> bool:
        """False while there is a draft model whose weights are away."""
        return self.usable or not self._has_cache

    def set_resident(self, resident: bool) -> None:
        """Say whether the draft model, if any, is in its place; n-grams do without."""
        self.usable = self._proposer is not None and (resident or not self._has_cache)

    def num_draft_computed(self, sequence: Sequence) -> int:
        """Tokens [0, n) of a row whose KV the draft's cache holds."""
        blocks = self._blocks
        if sequence.draft_hint_version != blocks.draft.version:
            sequence.draft_hint_version, sequence.draft_hint = blocks.draft.version, 0
        num_tokens, sequence.draft_hint = blocks.draft.computed(
            sequence.block_table, sequence.draft_hint
        )
        return num_tokens

    def plan(self, plan: Plan, choice: Choice, budget: int) -> Staleness:
        """Set the step's gamma, each decode row's gamma and catch-up, and what is verified.

        With extra drafts a row drafts more than the step's gamma, and the target takes the
        likeliest of all rows' drafts, as many as gamma for each row that drafts: rows that are
        sure of their drafts, or may have more, use what others leave.

        Args:
            plan: A plan that holds its decode rows, oldest first, and nothing else.
            choice: What the decision says; anything out of range is clamped.
            budget: Tokens that the step has left for drafts.
        """
        rows = plan.rows
        lags = [self._lag(row) for row in rows] if self._has_cache else [1] * len(rows)
        limit = min(self.max_gamma, budget // len(rows)) if self.usable else 0
        caps = [self._row_cap(row, choice.gamma) for row in rows] if limit > 0 else [0]
        plan.possible_gamma = min(limit, max(caps))
        wanted = min(choice.gamma, plan.possible_gamma)
        if wanted > 0:
            longest = min(wanted + self._extra(choice), self.max_gamma)
            left = self._max_catchup_tokens
            for row, cap, lag in zip(rows, caps, lags, strict=True):
                if cap > 0:
                    left -= self._plan_row(row, min(longest, cap), lag, left)
            drafting = [row for row in rows if row.gamma]
            if len(drafting) == 1:  # with nobody to choose between, its first are verified
                drafting[0].gamma = min(drafting[0].gamma, wanted)
            gammas = [row.gamma for row in drafting]
            plan.gamma = min(wanted, max(gammas, default=0))
            plan.num_verified = min(sum(gammas), wanted * len(gammas))
        feasible = plan.possible_gamma if plan.gamma or wanted <= 0 else 0
        # The newest token, which the target's cache lacks as well, is no staleness.
        return Staleness(max(lags) - 1, sum(lags) - len(lags), feasible)

    def _lag(self, row: PlannedRow) -> int:
        """Set where a row's draft cache will end, as far as it is known; tokens it then lacks.

        A row that drafts in flight lacks 1 or, if all is accepted, 2; which of them nobody asks.
        `draft_start` is then what was filled before: a fill from there covers what the flight
        filled too, for it retires first.
        """
        row.draft_version = self._blocks.draft.version
        row.draft_start = self.num_draft_computed(row.sequence)
        flight = row.sequence.flight
        if flight is not None and not self._was_forgotten(flight):
            if flight.gamma:
                return 1
            if flight.num_catch_up:
                row.draft_start = flight.draft_start + flight.num_catch_up
        return row.bound - row.draft_start

    def _was_forgotten(self, flight: PlannedRow) -> bool:
        """Whether what a row's step in flight adds to the draft's cache will not count."""
        touches = flight.gamma > 0 or flight.num_catch_up > 0
        return self._has_cache and touches and flight.draft_version != self._blocks.draft.version

    def _extra(self, choice: Choice) -> int:
        """Drafts of each row above gamma; none where nothing says which are the likeliest."""
        assert self._proposer is not None
        if choice.num_extra_drafts > 0 and not self._proposer.has_probabilities:
            if not self._told_without_extra:
                self._told_without_extra = True
                log.get().warning(
                    "extra drafts are ignored: this proposer's have no probabilities to choose by",
                    policy_version=choice.policy_version,
                )
            return 0
        return max(0, choice.num_extra_drafts)

    def _row_cap(self, row: PlannedRow, wanted: int) -> int:
        """Most drafts that a row could use now: they and one more token must have room.

        Where the draft model ends before what is `wanted` of it, the request is told so.
        """
        assert self._proposer is not None
        sequence, flight = row.sequence, row.sequence.flight
        if sequence.draft_broken or (flight is not None and self._was_forgotten(flight)):
            return 0
        blocks = self._blocks
        num_slots = (len(sequence.block_table) + blocks.num_free) * blocks.block_size
        cap = min(sequence.max_num_tokens - row.bound - 1, num_slots - row.bound)
        if sequence.params.max_gamma is not None:
            cap = min(cap, sequence.params.max_gamma)
        most = max(0, self._proposer.max_row_gamma(row.bound))
        if self._has_cache and most < min(cap, wanted):
            sequence.limit_speculation("the draft model's context ended")
        return max(0, min(cap, most))

    def _plan_row(self, row: PlannedRow, gamma: int, lag: int, max_catch_up: int) -> int:
        """Give a row its drafts, their slots, and its catch-up; returns the tokens caught up."""
        blocks, table = self._blocks, row.sequence.block_table
        if not blocks.grow(table, row.bound + gamma):
            gamma = min(gamma, len(table) * blocks.block_size - row.bound)
            if gamma <= 0:
                return 0
        row.gamma = gamma
        if not self._has_cache or lag <= MAX_REGULAR_LAG:
            return 0
        row.num_catch_up = min(lag - 1, max_catch_up)
        if row.num_catch_up < lag - 1:
            row.gamma = 0
        return row.num_catch_up
