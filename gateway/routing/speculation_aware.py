"""Keeps batches small where speculation is about to stop paying, and fills those where it has.

A decode step of a small batch waits for weights, and drafts ride along almost free. In a larger one
each draft token costs arithmetic: gamma falls, and beyond some size 0 is best. A request more
costs a batch on its way there part of its gain; one already at 0 has no such gain left.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.routing.facts import RequestFacts, WorkerLoad, within_bound
from gateway.routing.least_loaded import least_loaded

# Below this mean gamma a batch counts as one at 0; above 0, since policies explore.
AT_ZERO = 0.5
# From this mean gamma on a batch has arithmetic to spare, and requests ride along almost free:
# keeping such a batch small cost up to 5 % of the throughput in benchmarks/simulated_routing.py.
AMPLE = 1.5


class SpeculationAware:
    """Where a batch runs at gamma 0 by choice, requests avoid those whose gamma is 1.

    An idle worker comes first. Then, if a worker runs at gamma 0, the least loaded of those that
    need not be spared and are within the bound; else the least loaded of all. Of equal ones
    that comes first where fewer drafted tokens are accepted, as least is lost there.

    Args:
        factor: Most requests that a worker is filled to, over its share; at least 1.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def choose(self, request: RequestFacts, workers: Sequence[WorkerLoad]) -> WorkerLoad:
        """A worker by what its batch would lose."""
        del request
        idle = [worker for worker in workers if worker.num_requests == 0]
        if idle:  # alone in a batch a request gains most, and no other batch loses anything
            return least_loaded(idle)
        if any(map(runs_at_zero, workers)):
            open_to_one_more = within_bound(workers, self._factor)
            workers = [w for w in open_to_one_more if not is_spared(w)] or workers
        least = min(worker.load for worker in workers)
        equal = [worker for worker in workers if worker.load == least]
        lost = min(map(_num_accepted, equal))
        return least_loaded([worker for worker in equal if _num_accepted(worker) == lost])


def runs_at_zero(worker: WorkerLoad) -> bool:
    """Whether drafts do not pay off for the worker's batch, as far as its status tells.

    Only a planner that chose 0 where it could have drafted has said so. Gamma 0 for want of a
    planner or of a draft tells nothing of how full the batch is, and neither does a gamma that
    no status has shown with requests running.
    """
    chooses = worker.planner_connected and worker.max_gamma > 0
    return chooses and worker.gamma is not None and worker.gamma < AT_ZERO


def is_spared(worker: WorkerLoad) -> bool:
    """Whether the worker's batch drafts, and is near the size at which that ceases to pay."""
    return worker.gamma is not None and AT_ZERO <= worker.gamma < AMPLE


def _num_accepted(worker: WorkerLoad) -> float:
    """Draft tokens accepted in a step of one row, about."""
    return worker.acceptance_rate * (worker.gamma or 0.0)
