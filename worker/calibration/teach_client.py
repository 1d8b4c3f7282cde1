"""Teaches a planner what a calibration measured, as any worker of this machine would."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from nightjar.errors import NightjarError, Unavailable
from nightjar.v1 import planner_pb2, planner_pb2_grpc
from worker.messages import Ready, StepSums
from worker.planner_client import profile, step_report

CLIENT_ID = "calibration"
TIMEOUT_S = 10.0
MAX_REPORTS = 512  # in one call; the planner takes twice as many


def greet(address: str) -> None:
    """See that a planner answers.

    Raises:
        NightjarError: It does not.
    """
    with grpc.insecure_channel(address) as channel:
        stub = planner_pb2_grpc.PlannerServiceStub(channel)
        try:
            stub.ListPolicies(planner_pb2.ListPoliciesRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            raise _translated(error, address) from None


class CalibrationClient:
    """A connection to the planner under the profile of a worker like this engine."""

    def __init__(self, address: str, ready: Ready) -> None:
        self._address = address
        self.profile = profile(ready)

    def teach(self, reports: Sequence[StepSums]) -> int:
        """Report steps; returns how many reports the planner took.

        Raises:
            Unavailable: No planner answers.
            NightjarError: It refuses them.
        """
        num_accepted = 0
        with grpc.insecure_channel(self._address) as channel:
            stub = planner_pb2_grpc.PlannerServiceStub(channel)
            for start in range(0, len(reports), MAX_REPORTS):
                request = planner_pb2.ReportRewardRequest(
                    profile=self.profile,
                    reports=[step_report(sums) for sums in reports[start : start + MAX_REPORTS]],
                    client_id=CLIENT_ID,
                )
                try:
                    answer = stub.ReportReward(request, timeout=TIMEOUT_S)
                except grpc.RpcError as error:
                    raise _translated(error, self._address) from None
                num_accepted += answer.num_accepted
        return num_accepted


def _translated(error: grpc.RpcError, address: str) -> NightjarError:
    code, details = error.code(), error.details() or ""
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return Unavailable(f"no planner answers at {address}; is it running? ({details})")
    return NightjarError(f"the planner at {address} refuses: {code.name}: {details}")
