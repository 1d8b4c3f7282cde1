"""PlannerService over gRPC: messages in and out, streams, and who is told of what."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from nightjar import log
from nightjar.errors import InvalidRequest
from nightjar.v1 import planner_pb2 as pb
from planner_service import server_messages as read
from planner_service.admin_server import AdminServicer, wall_ms
from planner_service.audit import AuditLog
from planner_service.context import MAX_BATCH_SIZE, MAX_GAMMA, Context
from planner_service.planner import Decision, Planner, Report, Stream
from planner_service.sync import Sync
from planner_service.versions import Scope
from planner_service.watchers import Watchers

MAX_CLIENTS = 4096  # callers of SelectGamma whose sessions are remembered


class _Worker:
    """An open Plan stream: what it said last, and what it is still to be sent."""

    def __init__(self, stream: Stream, max_gamma: int, max_batch_size: int) -> None:
        self.stream = stream
        self.max_gamma, self.max_batch_size = max_gamma, max_batch_size
        self.last_ask: Context | None = None
        self.num_bad_reports = 0


Outbox = asyncio.Queue[pb.PlanResponse | Exception | None]  # unasked decisions, and the end
Write = Callable[[pb.PlanResponse], Awaitable[None]]


class PlannerServicer(AdminServicer):
    """Serves one `Planner`."""

    def __init__(self, planner: Planner, sync: Sync, audit: AuditLog | None = None) -> None:
        super().__init__(planner, sync)
        self._audit = audit
        self._workers: dict[Outbox, _Worker] = {}
        self._sessions: OrderedDict[tuple[str, str], bytes] = OrderedDict()  # of SelectGamma
        self._watchers = Watchers[pb.WatchDecisionsResponse]()
        self._outboxes: set[Outbox] = set()
        sync.tell(self.push)

    # ---- workers -----------------------------------------------------------------------

    async def Plan(  # type: ignore[override]  # the stubs know only of handlers that generate
        self, request_iterator: AsyncIterator[pb.PlanRequest], context: Any
    ) -> None:
        """Reports in, decisions out; also unasked ones when another version decides.

        Answers are written by the task that reads, which saves them a turn of the event loop.
        """
        outbox: Outbox = asyncio.Queue()
        self._outboxes.add(outbox)
        writing = asyncio.Lock()  # one write at a time

        async def write(response: pb.PlanResponse) -> None:
            async with writing:
                await context.write(response)

        reader = asyncio.create_task(self._read(context, write, outbox))
        try:
            while (item := await outbox.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                await write(item)
        finally:
            self._outboxes.discard(outbox)
            self._workers.pop(outbox, None)
            reader.cancel()

    async def _read(self, context: Any, write: Write, outbox: Outbox) -> None:
        """Answer each message within the turn it arrives in."""
        try:
            while (request := await context.read()) is not grpc.aio.EOF:
                worker = self._workers.get(outbox)
                if worker is None:
                    worker = self._workers[outbox] = self._greet(request)
                elif request.HasField("hello"):
                    raise InvalidRequest("hello", "only the first message introduces the worker")
                self._learn(worker, request)
                if request.HasField("ask"):
                    limits = (worker.max_gamma, worker.max_batch_size)
                    worker.last_ask = read.context(request.ask, "ask", *limits)
                    await write(self._answer(worker, worker.last_ask, request.session))
                elif worker.stream.outdated is not None and worker.last_ask is not None:
                    # What ran was cut to what was feasible; the question knew what could be.
                    feasible = worker.last_ask.feasible_max_gamma
                    asked = worker.stream.outdated._replace(feasible_max_gamma=feasible)
                    await write(self._answer(worker, asked, b""))
            outbox.put_nowait(None)
        except Exception as error:  # goes to the stream's own handler, which maps it to a status
            outbox.put_nowait(error)
        finally:
            self._workers.pop(outbox, None)

    def _greet(self, request: pb.PlanRequest) -> _Worker:
        if not request.HasField("hello"):
            raise InvalidRequest("hello", "the first message must introduce the worker")
        hello = request.hello
        if not hello.worker_id:
            raise InvalidRequest("hello.worker_id", "must not be empty")
        name = read.worker_id(hello.worker_id, "hello.worker_id")
        profile = read.profile(hello.profile, "hello.profile")
        limits = read.limits(hello)
        self._planner.register(profile)
        log.get().info("worker connected", worker=name, profile=profile.key)
        return _Worker(Stream(profile, name), *limits)

    def _learn(self, worker: _Worker, request: pb.PlanRequest) -> None:
        """Learn from each report; a bad one is left out, so that the others still teach."""
        if len(request.reports) > read.MAX_REPORTS:
            raise InvalidRequest("reports", f"at most {read.MAX_REPORTS}")
        for i, message in enumerate(request.reports):
            try:
                report = read.report(
                    message, f"reports[{i}]", worker.max_gamma, worker.max_batch_size
                )
            except InvalidRequest as error:
                worker.num_bad_reports += 1
                if worker.num_bad_reports.bit_count() == 1:  # 1, 2, 4, ...: a log, not a flood
                    log.get().warning(
                        "report left out",
                        worker=worker.stream.worker_id,
                        reason=str(error),
                        so_far=worker.num_bad_reports,
                    )
                continue
            self._heard(report, worker.stream)

    def _answer(self, worker: _Worker, asked: Context, session: bytes) -> pb.PlanResponse:
        decision = self._planner.decide(worker.stream, asked, session)
        return pb.PlanResponse(decision=self._watched(decision, worker.stream))

    def push(self) -> None:
        """Decide anew for every open stream whose version is no longer the one that decides."""
        for outbox, worker in list(self._workers.items()):
            stream = worker.stream
            due = self._planner.due_version(stream)
            if worker.last_ask is not None and stream.version != due:
                outbox.put_nowait(self._answer(worker, worker.last_ask, b""))

    def close(self) -> None:
        """End every open stream, so that workers go to another replica at once."""
        for outbox in self._outboxes:
            outbox.put_nowait(None)
        self._watchers.close()

    # ---- other clients -----------------------------------------------------------------

    async def SelectGamma(
        self, request: pb.SelectGammaRequest, context: Any
    ) -> pb.SelectGammaResponse:
        """Decide once; the session is the one sent, else the one remembered for the client."""
        stream = self._client(request.profile, request.client_id)
        asked = read.context(request.context, "context", MAX_GAMMA, 256)
        if asked.batch_size > asked.max_batch_size:
            asked = asked._replace(max_batch_size=MAX_BATCH_SIZE)
        key = (stream.profile.key, stream.worker_id)
        session = request.session or self._sessions.get(key, b"")
        decision = self._planner.decide(stream, asked, session)
        if stream.worker_id:
            self._sessions[key] = decision.session
            self._sessions.move_to_end(key)
            if len(self._sessions) > MAX_CLIENTS:
                self._sessions.popitem(last=False)
        return pb.SelectGammaResponse(decision=self._watched(decision, stream))

    async def ReportReward(
        self, request: pb.ReportRewardRequest, context: Any
    ) -> pb.ReportRewardResponse:
        """Learn from all reports, or from none if one is bad."""
        stream = self._client(request.profile, request.client_id)
        if len(request.reports) > read.MAX_REPORTS:
            raise InvalidRequest("reports", f"at most {read.MAX_REPORTS}")
        reports = [
            read.report(message, f"reports[{i}]", MAX_GAMMA, MAX_BATCH_SIZE)
            for i, message in enumerate(request.reports)
        ]
        for report in reports:
            self._heard(report, stream)
        return pb.ReportRewardResponse(num_accepted=len(reports))

    def _client(self, message: pb.Profile, name: str) -> Stream:
        profile = read.profile(message, "profile")
        name = read.worker_id(name, "client_id")
        self._planner.register(profile)
        return Stream(profile, name, reports=False)

    # ---- those who watch ----------------------------------------------------------------

    async def WatchDecisions(
        self, request: pb.WatchDecisionsRequest, context: Any
    ) -> AsyncIterator[pb.WatchDecisionsResponse]:
        """Every decision from now on, in order; a slow reader misses the oldest ones."""
        key = self.known(Scope(profile_key=request.profile_key)).profile_key
        async for item in self._watchers.watch(key, include_reports=request.include_reports):
            yield item

    def _watched(self, decision: Decision, stream: Stream) -> pb.Decision:
        message, now_ms = read.decision_message(decision), wall_ms()
        self._watchers.tell(
            "decision",
            stream.profile.key,
            lambda: read.watched_message(message, decision.context, stream, now_ms),
        )
        if self._audit is not None:
            self._audit.decided(decision, stream, now_ms)
        return message

    def _heard(self, report: Report, stream: Stream) -> None:
        self._planner.learn(stream, report)
        now_ms = wall_ms()
        self._watchers.tell(
            "report", stream.profile.key, lambda: read.watched_report(report, stream, now_ms)
        )
        if self._audit is not None:
            self._audit.reported(report, stream, now_ms)
