"""`WorkerService`: the worker's state, and its drain."""

from __future__ import annotations

import os
from typing import Any

import msgspec

from nightjar.v1 import worker_pb2, worker_pb2_grpc
from worker.front.state import WorkerState
from worker.memory_client import RESIDENCIES
from worker.messages import Status


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """`WorkerService`: the state of the worker, and its drain."""

    def __init__(self, state: WorkerState) -> None:
        self._state = state

    async def GetWorkerStatus(
        self, request: worker_pb2.GetWorkerStatusRequest, context: Any
    ) -> worker_pb2.GetWorkerStatusResponse:
        """Answer at any time, ready or not."""
        return worker_status(self._state)

    async def Drain(
        self, request: worker_pb2.DrainRequest, context: Any
    ) -> worker_pb2.DrainResponse:
        """Stop admission for good and wait for the calls inside."""
        self._state.admission.draining = True
        timeout_s = request.timeout_ms / 1000 if request.timeout_ms > 0 else None
        num_unfinished = await self._state.admission.wait_idle(timeout_s)
        return worker_pb2.DrainResponse(num_unfinished=num_unfinished)


def worker_status(state: WorkerState) -> worker_pb2.GetWorkerStatusResponse:
    """The worker's state at this moment; what the engine has not told yet stays zero."""
    engine = state.engine
    answer = worker_pb2.GetWorkerStatusResponse(
        worker_id=state.worker_id,
        pid=os.getpid(),
        engine_pid=engine.pid,
        progress_age_ms=int(engine.progress_age_s * 1000),
        accepting=state.serving,
        planner_connected=state.planner_connected(),
        planner_reason=state.planner_reason(),
    )
    answer.model.name = state.model_name
    answer.draft.agent_attached = state.agent_attached()
    answer.draft.agent_reason = state.agent_reason()
    if engine.ready is not None:
        ready = engine.ready
        answer.model.vocab_size = ready.vocab_size
        answer.model.max_model_len = ready.max_model_len
        answer.model.dtype = ready.dtype
        answer.model.max_gamma = ready.max_gamma
        answer.model.proposer = ready.proposer
        answer.arithmetic.mode = ready.arithmetic
        answer.arithmetic.fingerprint = ready.fingerprint
        answer.arithmetic.build = ready.build
        answer.arithmetic.device = ready.device_name
        for choice in ready.products:
            answer.arithmetic.products.add(**msgspec.structs.asdict(choice))
        if ready.arithmetic == "free":
            answer.arithmetic.reason = ready.arithmetic_reason
    if engine.status is not None:
        _add_status(answer, engine.status, engine.num_requests)
    return answer


def _add_status(
    answer: worker_pb2.GetWorkerStatusResponse, status: Status, num_requests: int
) -> None:
    # The engine's own split is up to 50 ms old; the sum is known here at once.
    answer.num_running = min(status.num_running, num_requests)
    answer.num_waiting = num_requests - answer.num_running
    answer.num_free_blocks = status.num_free_blocks
    answer.num_total_blocks = status.num_total_blocks
    answer.gamma = status.gamma
    if status.num_draft_tokens:
        answer.acceptance_rate = status.num_accepted_tokens / status.num_draft_tokens
    answer.policy_version = status.policy_version
    answer.num_steps = status.num_steps
    answer.engine_rss_bytes = status.rss_bytes
    answer.num_generated_tokens = status.num_generated_tokens
    answer.num_preemptions = status.num_preemptions
    answer.draft.residency = RESIDENCIES[status.residency]
    answer.draft.epoch = status.draft_epoch
    answer.draft.expanded = status.expanded
    answer.draft.num_expansions = status.num_expansions
    answer.draft.num_contractions = status.num_contractions
    answer.draft.num_draft_tokens = status.num_draft_tokens
    answer.draft.num_accepted_tokens = status.num_accepted_tokens
    answer.draft.num_granted_blocks = status.num_granted_blocks
