"""What a choice may depend on, and the bound on load that policies share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class RequestFacts:
    """What policies know of a request."""

    beginning: bytes = b""  # the prompt's first bytes, at most those that a policy looks at


@dataclass(frozen=True, kw_only=True)
class WorkerLoad:
    """One worker as the gateway sees it now."""

    address: str
    model: str  # name that requests may use; empty until the worker said it
    ready: bool
    num_waiting: int  # by the last status
    num_running: int  # by the last status
    num_dispatched: int  # sent less ended by this gateway since the last status; may be negative
    num_free_blocks: int
    num_total_blocks: int
    max_gamma: int = 0  # largest gamma it runs; 0: it cannot draft
    gamma: float | None = None  # mean over the last statuses with requests; None: idle or unknown
    acceptance_rate: float = 0.0  # accepted over drafted tokens since its start
    planner_connected: bool = False
    fingerprint: str = ""  # of its arithmetic

    @property
    def num_requests(self) -> int:
        """Requests that the worker has, those included that no status shows yet."""
        return max(self.num_waiting + self.num_running + self.num_dispatched, 0)

    @property
    def size(self) -> int:
        """KV blocks of the pool; one where the worker has not told."""
        return max(self.num_total_blocks, 1)

    @property
    def load(self) -> float:
        """Requests that the worker has, per KV block of its pool."""
        return self.num_requests / self.size


class Policy(Protocol):
    """A way to choose; the choice depends on the arguments alone, not on their order."""

    def choose(self, request: RequestFacts, workers: Sequence[WorkerLoad]) -> WorkerLoad:
        """One of `workers`: ready ones, at least one, all of which fit the request."""


def within_bound(workers: Sequence[WorkerLoad], factor: float) -> list[WorkerLoad]:
    """The workers that one more request keeps within `factor` times their share of all requests.

    Consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, arXiv 1608.01350):
    of m requests, the new one counted, none of n workers takes more than ceil(factor m / n).
    Here a share is by KV blocks, so that a pool of twice the size may take twice as many. The
    least loaded worker is always among them, since `factor` is at least 1.
    """
    num_requests = 1 + sum(worker.num_requests for worker in workers)
    num_blocks = sum(worker.size for worker in workers)
    # For whole numbers, being below ceil(x) is being below x; products keep it exact.
    return [w for w in workers if w.num_requests * num_blocks < factor * num_requests * w.size]
