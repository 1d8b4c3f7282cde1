"""The decode rows of a simulated worker, as columns: a step loops over none of them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner_service.context import MAX_GAMMA
from planner_service.simulate.arrivals import Request

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

# The draft takes the last token of a fully accepted step with its next forward anyway.
MAX_REGULAR_LAG = 1
_LEFT, _TOTAL, _PROMPT, _EMITTED = range(4)
_POSITIONS = np.arange(MAX_GAMMA)


class CatchUp(NamedTuple):
    """What the draft computed before it drafted."""

    num_emitted: int = 0  # tokens that were emitted at gamma 0
    num_prompt: int = 0  # tokens of prompts
    num_rows: int = 0


class Rows:
    """State of the decode rows; after rows came or went, `settle` is called before the next step.

    Of each row: tokens left to emit; prompt and output tokens together; tokens that the draft's
    cache lacks, of the prompt and of what was emitted at gamma 0; and the chance that its first
    i + 1 drafts are all accepted.
    """

    def __init__(self, max_rows: int) -> None:
        self.requests: list[Request] = []
        self.num_kv_tokens = 0
        self.sum_stale = 0
        self.max_stale = 0
        self.num_fresh_rows = self.num_fresh_tokens = 0  # that came since the last step
        self._numbers = np.zeros((4, max_rows), np.int64)
        self._chances = np.zeros((MAX_GAMMA, max_rows))
        self._view()
        self.settle()

    def _view(self) -> None:
        n = len(self.requests)
        self.left: Ints
        self.left, self.total, self.stale_prompt, self.stale_emitted = self._numbers[:, :n]
        self.chances: Floats = self._chances[:, :n]
        self._changed = True

    def settle(self) -> None:
        """Bring what is known of all rows up to date, once all that come and go have."""
        if self._changed:
            self._changed = False
            some = bool(self.requests)
            self.sums: Floats = self.chances.sum(axis=1)  # expected accepted drafts by position
            self.least_left = int(self.left.min()) if some else 0
            self.most_left = int(self.left.max()) if some else 0
            self.measure_staleness()

    def __len__(self) -> int:
        return len(self.requests)

    def admit(self, request: Request, chances: Floats, *, caught_up: bool = False) -> None:
        """Add a row whose prompt the target has, as the youngest."""
        n = len(self.requests)
        prompt, done = request.num_prompt_tokens, request.num_emitted
        self.requests.append(request)
        stale = 0 if caught_up else prompt + done - 1  # the last token is nobody's yet
        total = prompt + request.num_output_tokens
        self._numbers[:, n] = (total - prompt - done, total, stale, 0)
        self._chances[:, n] = chances
        self.num_kv_tokens += prompt + done
        if stale > MAX_REGULAR_LAG:
            self.num_fresh_rows += 1
            self.num_fresh_tokens += stale
        self._view()

    def remove(self, index: NDArray[np.intp]) -> list[Request]:
        """Take rows away; their requests know what they emitted."""
        gone = [self.requests[i] for i in index.tolist()]
        for request, i in zip(gone, index, strict=True):
            request.num_emitted = request.num_output_tokens - int(self.left[i])
        n = len(self.requests)
        self.num_kv_tokens -= int((self.total[index] - self.left[index]).sum())
        keep = np.ones(n, bool)
        keep[index] = False
        kept = n - len(gone)
        self._numbers[:, :kept] = self._numbers[:, :n][:, keep]
        self._chances[:, :kept] = self._chances[:, :n][:, keep]
        for i in sorted(map(int, index), reverse=True):
            del self.requests[i]
        self._view()
        return gone

    def redraw(self, chances: Floats) -> None:
        """Give every row new chances, [MAX_GAMMA, rows]."""
        self.chances[:] = chances
        self._changed = True
        self.settle()

    def measure_staleness(self) -> None:
        """Bring `sum_stale` and `max_stale` up to date."""
        stale = self.stale_prompt + self.stale_emitted
        self.sum_stale = int(stale.sum())
        self.max_stale = int(stale.max()) if len(stale) else 0

    # ---- one step ----------------------------------------------------------------------

    def emit_one_each(self) -> None:
        """Every row emits one token without a draft."""
        n = len(self.requests)
        self.left -= 1
        self.stale_emitted += 1
        self.num_kv_tokens += n
        self.sum_stale += n
        self.max_stale += 1
        self.least_left -= 1
        self.most_left -= 1

    def catch_up(self, budget: int) -> tuple[CatchUp, NDArray[np.bool_] | None]:
        """Let the draft catch up, oldest rows first; also which rows may draft, None: all."""
        stale = self.stale_prompt + self.stale_emitted
        behind = np.where(stale > MAX_REGULAR_LAG, stale, 0)
        if not behind.any():
            self.stale_prompt[:] = self.stale_emitted[:] = 0
            return CatchUp(), None
        before = np.cumsum(behind) - behind
        computed = np.clip(budget - before, 0, behind)
        of_prompt = np.minimum(computed, self.stale_prompt)
        of_emitted = computed - of_prompt
        ready = computed == behind
        caught = CatchUp(
            int(of_emitted.sum()), int(of_prompt.sum()), int(np.count_nonzero(computed))
        )
        self.stale_prompt -= of_prompt
        self.stale_emitted -= of_emitted
        self.stale_prompt[ready] = self.stale_emitted[ready] = 0
        return caught, None if ready.all() else ready

    def short_rows(self, gamma: int) -> tuple[NDArray[np.intp], NDArray[np.bool_]] | None:
        """Rows that end before gamma drafts count, and [gamma, short] which positions do."""
        if self.least_left > gamma:
            return None
        short = np.flatnonzero(self.left <= gamma)
        return short, _POSITIONS[:gamma, None] < self.left[short] - 1

    def expected_sums(self, gamma: int) -> Floats:
        """[gamma]: expected accepted drafts by position, over all rows."""
        found = self.short_rows(gamma)
        if found is None:
            return self.sums[:gamma]
        short, counts = found
        lost: Floats = (self.chances[:gamma, short] * ~counts).sum(axis=1)
        return self.sums[:gamma] - lost

    def emit(self, accepted: Ints, ready: NDArray[np.bool_] | None) -> None:
        """Rows emit what they accepted and one token more; those not ready fall behind by it."""
        emitted = accepted + 1
        self.left -= emitted
        self.num_kv_tokens += int(emitted.sum())
        if ready is not None:
            self.stale_emitted += ~ready
            self.measure_staleness()
        elif self.sum_stale:
            self.measure_staleness()
        self.least_left = int(self.left.min())
        self.most_left = int(self.left.max())

    def ended(self) -> NDArray[np.intp] | None:
        """Rows that have emitted all of their tokens; None if none has."""
        return np.flatnonzero(self.left == 0) if self.least_left == 0 else None
