"""The planner client against an in-process planner, over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import fake_engine
import grpc
import msgspec
import pytest
from conditions import until

from nightjar import rpc
from nightjar.v1 import planner_pb2 as pb
from nightjar.v1 import planner_pb2_grpc
from worker.messages import Context, Decision, PlannerLink, Reports, StepSums
from worker.planner_client import PlannerClient, added

CONTEXT = Context(
    batch_size=2,
    num_kv_tokens=100,
    num_prefill_tokens=0,
    num_waiting=1,
    num_free_blocks=50,
    max_stale_tokens=3,
    sum_stale_tokens=4,
    draft_resident=True,
    cpu_utilization=0.5,
    feasible_max_gamma=5,
)


def sums(
    num_steps: int,
    gamma: int = 2,
    batch_size: int = 2,
    accepted: tuple[int, ...] = (),
    grid: int = 1,
    bucket: int = 0,
    decision_id: str = "d1",
) -> StepSums:
    """Sums whose numbers all follow from `num_steps`."""
    return StepSums(
        grid=grid,
        bucket=bucket,
        context=msgspec.structs.replace(CONTEXT, batch_size=batch_size),
        gamma=gamma,
        decision_id=decision_id,
        num_steps=num_steps,
        num_timed_steps=num_steps,
        step_us=100 * num_steps,
        num_timed_emitted=3 * num_steps,
        num_timed_rows=2 * num_steps,
        num_emitted=3 * num_steps,
        num_prefill_tokens=0,
        catch_up_us=num_steps,
        num_catch_up_tokens=num_steps,
        num_catch_up_steps=num_steps,
        mixed_step_us=0,
        draft_prefill_us=0,
        reached=(2 * num_steps,),
        accepted=accepted,
    )


def reports(*entries: StepSums, ask: Context | None = None, session: bytes = b"") -> Reports:
    """One message of the engine."""
    return Reports(reports=list(entries), ask=ask, session=session)


class Planner(planner_pb2_grpc.PlannerServiceServicer):
    """Keeps what it is sent; answers each question with gamma 3, unless told otherwise."""

    def __init__(self) -> None:
        self.received: list[pb.PlanRequest] = []
        self.read = asyncio.Event()  # cleared: the stream is left unread
        self.read.set()
        self.gamma, self.extra, self.hang_up_at_ask = 3, 0, False
        self.silent, self.num_owed = False, 0  # silent: questions are answered later

    async def Plan(self, stream: Any, context: Any) -> AsyncIterator[pb.PlanResponse]:
        """Answer every question."""
        async for request in stream:
            self.received.append(request)
            if request.HasField("ask"):
                if self.hang_up_at_ask:
                    self.hang_up_at_ask = False
                    return
                self.num_owed += 1
            while self.num_owed and not self.silent:
                self.num_owed -= 1
                yield pb.PlanResponse(decision=decision(len(self.received), self.gamma, self.extra))
            await self.read.wait()

    def asked(self) -> list[int]:
        """Batch sizes that were asked about."""
        return [r.ask.batch_size for r in self.received if r.HasField("ask")]

    def steps(self) -> list[tuple[int, int]]:
        """(gamma, steps) of every report received."""
        return [(r.gamma, r.num_steps) for request in self.received for r in request.reports]


def decision(number: int, gamma: int, extra: int = 0) -> pb.Decision:
    """A decision for two buckets."""
    made = pb.Decision(decision_id=f"d{number}", policy_version="1-fixed", hold_steps=10)
    made.table.add(bucket=0, gamma=gamma, exploit_gamma=1)
    made.table.add(bucket=1, gamma=0, exploit_gamma=0)
    made.grid.batch_size_edges.extend([2, 5])
    made.session, made.num_extra_drafts = b"s", extra
    return made


@asynccontextmanager
async def planner_at(address: str, planner: Planner) -> AsyncIterator[None]:
    """Serve a planner there."""
    server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
    planner_pb2_grpc.add_PlannerServiceServicer_to_server(planner, server)
    server.add_insecure_port(address)
    await server.start()
    try:
        yield
    finally:
        await server.stop(0)


@asynccontextmanager
async def client_of(address: str) -> AsyncIterator[tuple[PlannerClient, list[Any]]]:
    """A running client, and what it tells the engine."""
    told: list[Any] = []
    client = PlannerClient(address, "w1", fake_engine.ready(), told.append)
    task = asyncio.create_task(client.run())
    try:
        yield client, told
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_hello_comes_first_and_a_question_is_answered(tmp_path: Path) -> None:
    """The stream opens with who speaks; reports and a question follow, a decision returns."""
    planner = Planner()
    address = f"unix:{tmp_path}/planner.sock"
    async with planner_at(address, planner), client_of(address) as (client, told):
        await until(lambda: client.connected, "connected")
        assert told == [PlannerLink(connected=True)]
        client.report(reports(sums(4, accepted=(3,)), ask=CONTEXT, session=b"before"))
        await until(lambda: len(told) == 2, "a decision came")
        hello, question = planner.received
        assert hello.hello.worker_id == "w1"
        assert hello.hello.max_gamma == 5
        assert hello.hello.profile.target == "target"
        assert hello.hello.profile.engine == "nightjar/eager/exact"
        assert question.session == b"before"
        assert question.ask.batch_size == 2
        assert question.ask.cpu_utilization == 0.5
        assert question.reports[0].step_us == 400
        assert list(question.reports[0].accepted) == [3]
        assert question.reports[0].context.num_kv_tokens == 100
        assert told[1] == Decision(
            decision_id="d2",
            policy_version="1-fixed",
            batch_size_edges=(2, 5),
            kv_token_edges=(),
            table={0: (3, 1), 1: (0, 0)},
            bucket=0,
            hold_steps=10,
            explored=False,
            session=b"s",
        )


async def test_reports_made_while_the_planner_is_away_are_added_up(tmp_path: Path) -> None:
    """Nothing is dropped: sums of one decision, gamma and bucket arrive as one report."""
    planner = Planner()
    address = f"unix:{tmp_path}/planner.sock"
    async with client_of(address) as (client, told):
        for i in range(1, 101):
            client.report(reports(sums(i), sums(1, gamma=0)))
        client.report(reports(sums(7, batch_size=4)))
        assert told == []
        async with planner_at(address, planner):
            await until(lambda: len(planner.received) == 2, "the reports came")
            assert sorted(planner.steps()) == [(0, 100), (2, 7), (2, 5050)]
            assert planner.received[1].reports[0].step_us in (505_000, 10_000)


async def test_the_stream_is_opened_again_and_the_question_asked_again(tmp_path: Path) -> None:
    """A planner that goes away unanswering, and one that restarts, get hello and question anew."""
    planner = Planner()
    planner.hang_up_at_ask = True
    address = f"unix:{tmp_path}/planner.sock"
    async with client_of(address) as (client, told):
        async with planner_at(address, planner):
            await until(lambda: client.connected, "connected")
            client.report(reports(ask=CONTEXT))
            await until(lambda: any(isinstance(m, Decision) for m in told), "an answer")
            assert [bool(r.HasField("hello")) for r in planner.received] == [True, False] * 2
            links = [m.connected for m in told if isinstance(m, PlannerLink)]
            assert links == [True, False, True]
        await until(lambda: not client.connected, "the loss was seen")
        client.report(reports(sums(3)))
        async with planner_at(address, planner):
            await until(lambda: client.connected, "connected again")
            await until(lambda: (2, 3) in planner.steps(), "what waited was sent")


async def test_only_sums_with_equal_keys_are_added_up(tmp_path: Path) -> None:
    """Steps of another grid's bucket, batch size or decision stay apart, each with its context."""
    planner = Planner()
    address = f"unix:{tmp_path}/planner.sock"
    async with client_of(address) as (client, _):
        for _ in range(3):
            client.report(reports(sums(1, decision_id="")))
            client.report(reports(sums(10, grid=2, decision_id="")))  # bucket 0 is another now
            client.report(reports(sums(100, bucket=1, batch_size=5)))
            client.report(reports(sums(1000, bucket=1, batch_size=6)))
            client.report(reports(sums(10000, bucket=1, batch_size=6, decision_id="d2")))
        async with planner_at(address, planner):
            await until(lambda: len(planner.received) == 2, "the reports came")
            got = [(r.num_steps, r.context.batch_size) for r in planner.received[1].reports]
            assert sorted(got) == [(3, 2), (30, 2), (300, 5), (3000, 6), (30000, 6)]
            assert all(r.num_catch_up_steps == r.num_steps for r in planner.received[1].reports)


async def test_many_sums_travel_in_messages_that_the_planner_takes(tmp_path: Path) -> None:
    """After an outage on a fine grid no message is too large; the question comes last."""
    planner = Planner()
    address = f"unix:{tmp_path}/planner.sock"
    async with client_of(address) as (client, told):
        for _ in range(2):
            client.report(reports(*(sums(1, bucket=b) for b in range(1300)), ask=CONTEXT))
        async with planner_at(address, planner):
            await until(lambda: any(isinstance(m, Decision) for m in told), "an answer")
    assert [len(r.reports) for r in planner.received] == [0, 512, 512, 276]
    assert [r.HasField("ask") for r in planner.received] == [False, False, False, True]
    assert planner.steps() == [(2, 2)] * 1300


async def test_one_question_is_under_way_at_a_time(tmp_path: Path) -> None:
    """While the planner owes an answer the newest question waits, unless that answers it."""
    planner = Planner()
    planner.silent = True
    address = f"unix:{tmp_path}/planner.sock"
    async with planner_at(address, planner), client_of(address) as (client, told):
        await until(lambda: client.connected, "connected")
        for batch_size in (2, 3, 4):
            ask = msgspec.structs.replace(CONTEXT, batch_size=batch_size)
            client.report(reports(sums(batch_size), ask=ask))
            await until(lambda n=batch_size: (2, n) in planner.steps(), "sums")  # type: ignore[misc]
        assert planner.asked() == [2]
        planner.silent = False
        client.report(reports(sums(9)))
        await until(lambda: len(told) == 3, "both answers")
        assert planner.asked() == [2, 4]
        planner.silent = True
        client.report(reports(ask=CONTEXT))
        await until(lambda: len(planner.asked()) == 3, "asked")
        client.report(reports(ask=msgspec.structs.replace(CONTEXT, batch_size=1)))
        planner.silent = False
        client.report(reports(sums(10)))
        await until(lambda: len(told) == 4, "an answer")  # about bucket 0: batches of 1
        client.report(reports(sums(11)))
        await until(lambda: (2, 11) in planner.steps(), "sums")
        assert planner.asked() == [2, 4, 2]


async def test_a_planner_that_owes_an_answer_for_long_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A question that a faulty planner lost on an open stream does not end all questions."""
    monkeypatch.setattr("worker.planner_client.ASK_AGAIN_S", 0.05)
    planner = Planner()
    planner.silent = True
    address = f"unix:{tmp_path}/planner.sock"
    async with planner_at(address, planner), client_of(address) as (client, _):
        await until(lambda: client.connected, "connected")

        def asked_again() -> bool:
            client.report(reports(ask=CONTEXT))
            return len(planner.asked()) == 2

        await until(asked_again, "asked again")


async def test_an_unread_stream_never_holds_the_engine_up(tmp_path: Path) -> None:
    """With a planner that reads nothing, reporting returns at once and sums stay together."""
    planner = Planner()
    planner.read.clear()
    address = f"unix:{tmp_path}/planner.sock"
    async with planner_at(address, planner), client_of(address) as (client, _):
        await until(lambda: client.connected, "connected")
        total = 0
        for _ in range(300):
            client.report(reports(*(sums(1, gamma=g) for g in range(6))))
            total += 6
            await asyncio.sleep(0)
        planner.read.set()
        await until(lambda: sum(n for _, n in planner.steps()) == total, "every step arrived")


async def test_decisions_out_of_range_are_ignored_or_cut(tmp_path: Path) -> None:
    """Drafts below 0 never reach the engine, and those above the worker's own are cut to that."""
    planner = Planner()
    address = f"unix:{tmp_path}/planner.sock"
    async with planner_at(address, planner), client_of(address) as (client, told):
        await until(lambda: client.connected, "connected")
        for gamma, extra in ((-1, 0), (3, -1), (10**6, 10**6)):
            planner.gamma, planner.extra = gamma, extra
            before = len(planner.received)
            client.report(reports(ask=CONTEXT))
            await until(lambda n=before: len(planner.received) > n, "asked")  # type: ignore[misc]
        await until(lambda: len(told) == 2, "the other came")
        assert told[1].table[0] == (5, 1)
        assert told[1].num_extra_drafts == 5


def test_sums_add_position_by_position() -> None:
    """Counts per draft position add up though one side has fewer positions."""
    both = added(sums(1, accepted=(1,)), sums(2, accepted=(5, 4)))
    assert both.accepted == (6, 4)
    assert both.reached == (6,)
    assert (both.num_steps, both.step_us, both.num_timed_rows) == (3, 300, 6)
