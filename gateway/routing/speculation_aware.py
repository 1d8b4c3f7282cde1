"""Keeps batches small where speculation pays, and fills those where it has ceased to.

A decode step of a small batch waits for weights, and drafts ride along almost free; in a large
batch each draft token costs arithmetic, until gamma 0 is best. A request more costs a batch
that drafts part of its gain; one that runs at gamma 0 has no such gain left to lose.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.routing.facts import RequestFacts, WorkerLoad, within_bound
from gateway.routing.least_loaded import least_loaded

# Below this mean gamma a batch counts as one at 0; above 0, since policies explore.
AT_ZERO = 0.5


class SpeculationAware:
    """Idle workers first, then the least loaded of those at gamma 0 within the bound, then any.

    Among the rest the least loaded is taken; of equal ones that where fewer drafted tokens are
    accepted, as least is lost there.

    Args:
        factor: Most requests that a worker at gamma 0 is filled to, over its share; at least 1.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def choose(self, request: RequestFacts, workers: Sequence[WorkerLoad]) -> WorkerLoad:
        """A worker by what its batch would lose."""
        del request
        idle = [worker for worker in workers if worker.num_requests == 0]
        if idle:  # alone in a batch a request gains most, and no other batch loses anything
            return least_loaded(idle)
        at_zero = [w for w in within_bound(workers, self._factor) if runs_at_zero(w)]
        if at_zero:
            return least_loaded(at_zero)
        least = min(worker.load for worker in workers)
        equal = [worker for worker in workers if worker.load == least]
        lost = min(map(_num_accepted, equal))
        return least_loaded([worker for worker in equal if _num_accepted(worker) == lost])


def runs_at_zero(worker: WorkerLoad) -> bool:
    """Whether drafts do not pay off for the worker's batch, as far as its status tells.

    Gamma 0 for want of a planner says nothing of what pays; such a worker, and one whose gamma
    no status has shown with requests running, is neither filled nor spared.
    """
    if worker.max_gamma == 0:
        return True
    return worker.planner_connected and worker.gamma is not None and worker.gamma < AT_ZERO


def _num_accepted(worker: WorkerLoad) -> float:
    """Draft tokens accepted in a step of one row, about."""
    return worker.acceptance_rate * (worker.gamma or 0.0)
