"""The operator's calls to a planner; answers come back as plain dictionaries with proto names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from nightjar.errors import InvalidRequest, NightjarError, NotPossibleNow, Unavailable, UnknownName
from nightjar.v1 import planner_pb2 as pb
from nightjar.v1 import planner_pb2_grpc

TIMEOUT_S = 5.0
TRIAL_TIMEOUT_S = 60.0  # a plug-in is tried out in a process of its own


class AdminClient:
    """A connection to one planner; a context manager."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._channel = grpc.insecure_channel(address)
        self._stub = planner_pb2_grpc.PlannerServiceStub(self._channel)

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._channel.close()

    def list_policies(
        self, profile_key: str = "", worker_ids: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Policies, and versions that touch a scope, newest first."""
        scope = pb.PolicyScope(profile_key=profile_key, worker_ids=worker_ids)
        return self._call(self._stub.ListPolicies, pb.ListPoliciesRequest(scope=scope))

    def activate(
        self,
        name: str,
        parameters: Mapping[str, str],
        profile_key: str,
        worker_ids: Sequence[str],
        *,
        canary_share: float = 0.0,
        floor: tuple[float, float] | None = None,
    ) -> dict[str, Any]:
        """Make a version; returns it.

        Args:
            name: Policy.
            parameters: Its parameters, as text.
            profile_key: Profile it is for; empty for all.
            worker_ids: Workers it is for; empty for all.
            canary_share: Share of the steps it gets, [0, 1); 0 gives it all.
            floor: Least net benefit, and seconds that it may stay below; None for no floor.
        """
        scope = pb.PolicyScope(
            profile_key=profile_key, worker_ids=worker_ids, canary_share=canary_share
        )
        request = pb.ActivatePolicyRequest(name=name, parameters=parameters, scope=scope)
        if floor is not None:
            request.floor.min_net_benefit, request.floor.for_s = floor
        return self._call(self._stub.ActivatePolicy, request, TRIAL_TIMEOUT_S)

    def rollback(self, profile_key: str, worker_ids: Sequence[str]) -> dict[str, Any]:
        """Go back to the version before; returns it."""
        scope = pb.PolicyScope(profile_key=profile_key, worker_ids=worker_ids)
        return self._call(self._stub.RollbackPolicy, pb.RollbackPolicyRequest(scope=scope))

    def state(self, profile_key: str) -> dict[str, Any]:
        """The version that decides and what was learned."""
        request = pb.GetPolicyStateRequest(profile_key=profile_key)
        return self._call(self._stub.GetPolicyState, request)

    def _call(self, method: Any, request: Message, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
        try:
            answer = method(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise translated(error, self._address) from None
        return MessageToDict(
            answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )


def translated(error: grpc.RpcError, address: str) -> NightjarError:
    """The error of our own tree that a call's status stands for."""
    code, details = error.code(), error.details() or ""
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return Unavailable(f"no planner answers at {address}; is it running? ({details})")
    field, separator, message = details.partition(": ")
    if code == grpc.StatusCode.INVALID_ARGUMENT and separator:
        return InvalidRequest(field, message)
    if code == grpc.StatusCode.NOT_FOUND:
        return UnknownName(details)
    if code == grpc.StatusCode.FAILED_PRECONDITION:
        return NotPossibleNow(details)
    return NightjarError(f"{code.name}: {details}")
