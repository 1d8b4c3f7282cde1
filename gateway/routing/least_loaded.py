"""The worker with the fewest requests per KV block."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.routing.facts import RequestFacts, WorkerLoad


def least_loaded(workers: Sequence[WorkerLoad]) -> WorkerLoad:
    """The least loaded worker; of equal ones that with more free blocks, then the lower address."""
    return min(workers, key=lambda w: (w.load, -w.num_free_blocks, w.address))


class LeastLoaded:
    """Spreads requests evenly, whatever they ask."""

    def choose(self, request: RequestFacts, workers: Sequence[WorkerLoad]) -> WorkerLoad:
        """The least loaded worker."""
        del request
        return least_loaded(workers)
