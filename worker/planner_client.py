"""One `Plan` stream to the planner, for ever: reports out, decisions in, nothing ever waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import islice
from typing import Any

import grpc
import msgspec

from nightjar import log
from nightjar.buckets import BucketGrid
from nightjar.v1 import planner_pb2, planner_pb2_grpc
from worker.front.reconnect import CONNECTING, first_of, keep_open
from worker.messages import Context, Decision, PlannerLink, Ready, Reports, StepSums, SumsKey

MAX_REPORTS = 512  # in one message; the planner takes twice as many
ASK_AGAIN_S = 1.0  # an open stream loses no question: a planner that slow is not asked at once
# Not added up, and no fields of a `StepReport`.
_GROUPING = ("grid", "bucket")


class PlannerClient:
    """Keeps the stream open, and adds reports up while it is not.

    What waits is bounded: reports with equal keys are one entry, and new decisions and grids,
    hence new keys, come over an open stream alone. One question at a time is under way.
    """

    def __init__(
        self,
        address: str,
        worker_id: str,
        ready: Ready,
        to_engine: Callable[[Decision | PlannerLink], None],
    ) -> None:
        self._address = address
        self._to_engine = to_engine
        self._max_gamma = ready.max_gamma
        self._hello = planner_pb2.PlanHello(
            worker_id=worker_id,
            profile=profile(ready),
            max_gamma=ready.max_gamma,
            max_batch_size=ready.max_batch_size,
        )
        self._sums: dict[SumsKey, StepSums] = {}
        self._ask: Context | None = None  # asked, not sent
        self._unanswered: Context | None = None  # sent, no decision yet
        self._asked_at = 0.0  # time of the loop's clock at which that was sent
        self._session = b""
        self._pending = asyncio.Event()
        self._answered = False
        self.connected = False
        self._reason = CONNECTING

    @property
    def reason(self) -> str:
        """Why no stream is open; empty while one is."""
        return "" if self.connected else self._reason

    def _tell(self, reason: str) -> None:
        self._reason = reason

    def report(self, reports: Reports) -> None:
        """Take over sums and a question; never waits."""
        for sums in reports.reports:
            held = self._sums.get(sums.key)
            self._sums[sums.key] = sums if held is None else added(held, sums)
        if reports.ask is not None:
            self._ask = reports.ask
        self._session = reports.session
        self._pending.set()

    async def run(self) -> None:
        """Keep the stream open until cancelled."""
        await keep_open("planner", self._address, self._serve, self._tell)

    async def _serve(self, channel: grpc.aio.Channel) -> bool:
        """One stream, from hello to its end; whether a decision came over it."""
        call: Any = planner_pb2_grpc.PlannerServiceStub(channel).Plan()
        self._answered = False
        try:
            await call.write(planner_pb2.PlanRequest(hello=self._hello))
            # The question of a stream that was lost is asked again on this one.
            self._ask, self._unanswered = self._ask or self._unanswered, None
            self._pending.set()
            self._link(True)
            await first_of(self._read(call), self._write(call))
        finally:
            call.cancel()
            self._link(False)
        return self._answered

    async def _read(self, call: Any) -> None:
        while (response := await call.read()) is not grpc.aio.EOF:
            self._answered = True
            self._decide(response.decision)

    async def _write(self, call: Any) -> None:
        while True:
            await self._pending.wait()
            self._pending.clear()
            request = self._next_request()
            # At most once: what is handed to a stream that then breaks is not sent again.
            if request.reports or request.HasField("ask"):
                await call.write(request)

    def _next_request(self) -> planner_pb2.PlanRequest:
        """What is to be sent: as many sums as one message takes, with the last the question."""
        keys = list(islice(self._sums, MAX_REPORTS))
        request = planner_pb2.PlanRequest(
            reports=[step_report(self._sums.pop(key)) for key in keys], session=self._session
        )
        now = asyncio.get_running_loop().time()
        if self._sums:
            self._pending.set()
        elif self._ask is not None and (
            self._unanswered is None or now - self._asked_at >= ASK_AGAIN_S
        ):
            request.ask.CopyFrom(context_proto(self._ask))
            self._ask, self._unanswered, self._asked_at = None, self._ask, now
        return request

    def _decide(self, decision: planner_pb2.Decision) -> None:
        self._unanswered = None
        self._pending.set()  # the next question may have waited for this answer
        message = decision_message(decision, self._max_gamma)
        if message is None:
            log.get().warning("ignored a senseless decision", decision_id=decision.decision_id)
            return
        if self._ask is not None:
            grid = BucketGrid(message.batch_size_edges, message.kv_token_edges)
            if grid.bucket(self._ask.batch_size, self._ask.num_kv_tokens) == message.bucket:
                self._ask = None  # answered before it was sent
        self._to_engine(message)

    def _link(self, connected: bool) -> None:
        if connected != self.connected:
            self.connected = connected
            self._to_engine(PlannerLink(connected=connected))
            log.get().info("planner", address=self._address, connected=connected)


def profile(ready: Ready) -> planner_pb2.Profile:
    """What decides the cost of this worker's steps."""
    return planner_pb2.Profile(
        target=ready.target_identity,
        draft=ready.draft_identity,
        proposer=ready.proposer,
        dtype=ready.dtype,
        device=ready.device,
        tensor_parallel_size=1,
        engine=f"nightjar/{ready.build}/{ready.arithmetic}",
    )


def added(first: StepSums, second: StepSums) -> StepSums:
    """Sums over the steps of both; the context is that of the last step, hence the second's."""
    fields = {
        name: getattr(first, name) + getattr(second, name)
        for name in second.__struct_fields__
        if name not in (*_GROUPING, "context", "gamma", "decision_id", "reached", "accepted")
    }
    return msgspec.structs.replace(
        second,
        reached=_added(first.reached, second.reached),
        accepted=_added(first.accepted, second.accepted),
        **fields,
    )


def _added(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
    size = max(len(first), len(second))
    padded = [counts + (0,) * (size - len(counts)) for counts in (first, second)]
    return tuple(map(sum, zip(*padded, strict=True)))


def step_report(sums: StepSums) -> planner_pb2.StepReport:
    """Sums as they travel: the fields have the same names."""
    fields = {
        name: getattr(sums, name)
        for name in sums.__struct_fields__
        if name not in (*_GROUPING, "context")
    }
    return planner_pb2.StepReport(context=context_proto(sums.context), **fields)


def context_proto(context: Context) -> planner_pb2.Context:
    """A context as it travels: the fields have the same names."""
    return planner_pb2.Context(**msgspec.structs.asdict(context))


def decision_message(decision: planner_pb2.Decision, max_gamma: int) -> Decision | None:
    """A decision for the engine, its drafts cut to `max_gamma`; None if it makes no sense."""
    in_range = decision.num_extra_drafts >= 0 and all(
        row.gamma >= 0 and row.exploit_gamma >= 0 for row in decision.table
    )
    table = {
        row.bucket: (min(row.gamma, max_gamma), min(row.exploit_gamma, max_gamma))
        for row in decision.table
    }
    edges = (tuple(decision.grid.batch_size_edges), tuple(decision.grid.kv_token_edges))
    ascending = all(list(each) == sorted(set(each)) for each in edges)
    if not (decision.decision_id and in_range and ascending and decision.hold_steps >= 1):
        return None
    return Decision(
        decision_id=decision.decision_id,
        policy_version=decision.policy_version,
        batch_size_edges=edges[0],
        kv_token_edges=edges[1],
        table=table,
        bucket=decision.bucket,
        hold_steps=decision.hold_steps,
        explored=decision.explored,
        session=decision.session,
        # Of gamma and these together the engine cuts what a row drafts.
        num_extra_drafts=min(decision.num_extra_drafts, max_gamma),
    )
