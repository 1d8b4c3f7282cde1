"""Watches a planner: its decisions and reports as they happen, as lines of its audit log."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc

from nightjar.errors import Unavailable
from nightjar.rpc import CHANNEL_OPTIONS
from nightjar.v1 import planner_pb2 as pb
from nightjar.v1 import planner_pb2_grpc
from planner_service.admin_client import translated

Line = dict[str, Any]


def watch(address: str, profile_key: str, *, include_reports: bool) -> Iterator[Line]:
    """What happens from now on, in the form of `audit.py`; the planner's own limits are missing.

    Raises:
        Unavailable: No planner answers, or it went away.
        UnknownName: It knows no such profile.
    """
    request = pb.WatchDecisionsRequest(profile_key=profile_key, include_reports=include_reports)
    with grpc.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        heard = False
        try:
            for message in planner_pb2_grpc.PlannerServiceStub(channel).WatchDecisions(request):
                heard = True
                yield _line(message)
        except grpc.RpcError as error:
            if heard and error.code() == grpc.StatusCode.UNAVAILABLE:
                raise Unavailable(f"the planner at {address} went away") from None
            raise translated(error, address) from None
    raise Unavailable(f"the planner at {address} ended the watch: it is stopping")


def _line(message: pb.WatchDecisionsResponse) -> Line:
    is_report = message.HasField("report")
    line: Line = {
        "kind": "report" if is_report else "decision",
        "at_ms": message.decided_at_ms,
        "profile": message.profile_key,
        "worker": message.worker_id,
    }
    if not is_report:
        return line | _decision(message.decision) | {"context": _fields(message.context)}
    told = _fields(message.report)
    return line | told | {"context": _fields(message.report.context)}


def _decision(decision: pb.Decision) -> Line:
    (row,) = [row for row in decision.table if row.bucket == decision.bucket]
    edges = list(decision.grid.batch_size_edges), list(decision.grid.kv_token_edges)
    one_a_size = edges == (list(range(1, len(edges[0]) + 1)), [])
    return {
        "decision_id": decision.decision_id,
        "version": decision.policy_version,
        "bucket": decision.bucket,
        "gamma": row.gamma,
        "exploit_gamma": row.exploit_gamma,
        "num_extra_drafts": decision.num_extra_drafts,
        "explored": decision.explored,
        "propensity": decision.propensity,
        "hold_steps": decision.hold_steps,
        "grid": None if one_a_size else edges,
    }


def _fields(message: pb.Context | pb.StepReport) -> Line:
    values = {name: getattr(message, name) for name in message.DESCRIPTOR.fields_by_name}
    return {
        name: list(value) if name in ("reached", "accepted") else value
        for name, value in values.items()
    }
