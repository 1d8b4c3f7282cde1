"""Choice of a worker: the least loaded of those that are ready. Pure: values in, a name out."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


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

    @property
    def load(self) -> float:
        """Requests that the worker has, per KV block of its pool."""
        requests = self.num_waiting + self.num_running + self.num_dispatched
        return max(requests, 0) / max(self.num_total_blocks, 1)


def choose(
    workers: Sequence[WorkerLoad], *, model: str, excluded: Collection[str]
) -> WorkerLoad | None:
    """The least loaded ready worker that serves `model`, or None.

    Equal loads go to the one with more free blocks, then to the lower address, so that
    the choice depends on the arguments alone.

    Args:
        workers: All workers known.
        model: Name that the request gave; empty fits every worker.
        excluded: Addresses that already failed this request.
    """
    fitting = [
        worker
        for worker in workers
        if worker.ready and worker.address not in excluded and model in ("", worker.model)
    ]
    return min(fitting, key=lambda w: (w.load, -w.num_free_blocks, w.address), default=None)
