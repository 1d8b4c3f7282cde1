"""Choice of a worker by the configured policy. Pure: values in, a worker out."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

from gateway.routing.facts import Policy, RequestFacts, WorkerLoad
from gateway.routing.least_loaded import LeastLoaded
from gateway.routing.prefix_affinity import PrefixAffinity
from gateway.routing.speculation_aware import SpeculationAware

Routing = Literal["least_loaded", "prefix_affinity", "speculation_aware"]


def make_policy(routing: Routing, load_factor: float) -> Policy:
    """The policy of that name.

    Args:
        routing: Its name.
        load_factor: Most requests of a worker over its share of all, at least 1; least_loaded
            needs none.
    """
    if routing == "prefix_affinity":
        return PrefixAffinity(load_factor)
    if routing == "speculation_aware":
        return SpeculationAware(load_factor)
    return LeastLoaded()


def choose(
    policy: Policy,
    request: RequestFacts,
    workers: Sequence[WorkerLoad],
    *,
    model: str,
    fingerprint: str = "",
    excluded: Collection[str],
) -> WorkerLoad | None:
    """The policy's choice among the ready workers that serve `model`; None if there are none.

    Args:
        policy: Chooses.
        request: What the policy may know of the request.
        workers: All workers known.
        model: Name that the request gave; empty fits every worker.
        fingerprint: Of the arithmetic that an answer was begun with; empty fits every worker.
        excluded: Addresses that already failed this request.
    """
    fitting = [
        worker
        for worker in workers
        if worker.ready
        and worker.address not in excluded
        and model in ("", worker.model)
        and fingerprint in ("", worker.fingerprint)
    ]
    return policy.choose(request, fitting) if fitting else None
