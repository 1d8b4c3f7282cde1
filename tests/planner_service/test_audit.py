"""The audit log and the watch: everything is told, nothing waits for whoever listens."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from planner_harness import Worker, comes_true, dialled, report, running_planner
from processes import Command, eventually
from structlog.testing import capture_logs

from nightjar.errors import ConfigError
from nightjar.v1 import planner_pb2 as pb
from planner_service import audit as audit_module
from planner_service.audit import MAX_QUEUED, NUM_KEPT, AuditLog
from planner_service.context import Context, Outcome, Profile
from planner_service.planner import Decision, Report, Stream
from planner_service.policies.policy import Choice
from planner_service.watchers import MAX_WAITING, Watchers

STREAM = Stream(
    Profile(
        target="t",
        draft="d",
        proposer="draft_model",
        dtype="float32",
        device="cpu",
        tensor_parallel_size=1,
        engine="tests",
    ),
    "worker-1",
)
OUTCOME = Outcome(4, 4, 40_000, 6, 4, 6, reached=(4, 3), accepted=(3, 2))
REPORT = Report(Context(1), 2, "a-1", OUTCOME)


def decision(number: int, choice: Choice | None = None) -> Decision:
    """A decision for a batch of one row."""
    choice = choice or Choice(2, 3, 4, True, 0.25, {1: (2, 3)})
    return Decision(f"a-{number}", "1-nightjar", choice, Context(1, 100), b"session")


def lines(*paths: Path) -> list[dict[str, Any]]:
    """All records of some files."""
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


@contextlib.contextmanager
def written(path: Path, max_bytes: int = 10**9) -> Iterator[AuditLog]:
    """An audit log, closed at the end."""
    audit = AuditLog(str(path), max_bytes)
    try:
        yield audit
    finally:
        audit.close()


def test_a_decision_and_its_report_are_lines_with_everything(tmp_path: Path) -> None:
    """All that the decision was drawn from and all that ran is in the file once it is closed."""
    path = tmp_path / "audit.jsonl"
    with written(path) as audit:
        audit.decided(decision(1), STREAM, 1_000)
        audit.reported(REPORT, STREAM, 1_001)
    first, second = lines(path)
    shared = {"profile": STREAM.profile.key, "worker": "worker-1", "decision_id": "a-1"}
    assert first == {
        **shared,
        "kind": "decision",
        "at_ms": 1_000,
        "version": "1-nightjar",
        "bucket": 1,
        "gamma": 2,
        "exploit_gamma": 3,
        "num_extra_drafts": 0,
        "explored": True,
        "propensity": 0.25,
        "hold_steps": 4,
        "grid": None,
        "context": Context(1, 100)._asdict(),
    }
    sums = OUTCOME._asdict()
    del sums["propensity"]
    told = {"kind": "report", "at_ms": 1_001, "gamma": 2, "context": Context(1)._asdict()}
    assert second == {**shared, **told, **sums, "reached": [4, 3], "accepted": [3, 2]}


def test_a_full_file_gives_way_and_a_few_are_kept(tmp_path: Path) -> None:
    """The newest lines are there, in order over the files; the oldest file goes."""
    path = tmp_path / "audit.jsonl"
    for number in range(12):
        with written(path, 600) as audit:  # opened anew each time: it goes on where it was
            audit.decided(decision(number), STREAM, number)
    kept = sorted(tmp_path.iterdir(), reverse=True)
    assert len(kept) == NUM_KEPT + 1
    assert all(file.stat().st_size <= 600 for file in kept)
    numbers = [line["at_ms"] for line in lines(*kept)]
    assert numbers == list(range(12))[-len(numbers) :]


def test_a_torn_line_spoils_no_other(tmp_path: Path) -> None:
    """What a killed planner left behind ends before the first line of the next one."""
    path = tmp_path / "audit.jsonl"
    path.write_text('{"kind": "deci')
    with written(path) as audit:
        audit.decided(decision(1), STREAM, 1)
    torn, whole = path.read_text().splitlines()
    assert (torn, json.loads(whole)["at_ms"]) == ('{"kind": "deci', 1)


def test_a_file_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    """A missing folder, a folder, a device, a pipe, and a file in use each have a sentence."""
    os.mkfifo(tmp_path / "pipe")
    with written(tmp_path / "used"):
        for path, words in (
            (tmp_path / "missing" / "audit.jsonl", "No such file"),
            (tmp_path, "directory"),
            (Path("/dev/full"), "no regular file"),
            (tmp_path / "pipe", "no regular file"),
            (tmp_path / "used", "another planner writes it"),
        ):
            with pytest.raises(ConfigError, match=words) as caught:
                AuditLog(str(path), 10**9)
            assert str(path) in str(caught.value)
    with written(tmp_path / "used"):
        pass
    with Command("-m", "nightjar", "planner", "--audit-log", str(tmp_path)) as command:
        assert (command.wait(), "--audit-log=" in command.stderr) == (2, True)


def test_a_deleted_file_is_begun_anew(tmp_path: Path) -> None:
    """Lines go where the path says, not into a file that nobody can find any more."""
    path = tmp_path / "audit.jsonl"
    with written(path) as audit:
        audit.decided(decision(1), STREAM, 1)
        eventually(lambda: path.stat().st_size > 0, "the first line")
        path.rename(tmp_path / "moved")
        audit.decided(decision(2), STREAM, 2)
    assert [line["at_ms"] for line in lines(tmp_path / "moved", path)] == [1, 2]


def test_a_stuck_disk_costs_lines_and_never_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What finds no room is dropped, counted and said; the end does not wait for ever."""
    stuck, release, real = threading.Event(), threading.Event(), os.write

    def write(fd: int, data: bytes) -> int:
        stuck.set()
        release.wait(60)
        return real(fd, data)

    monkeypatch.setattr(audit_module, "LAST_WRITE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(audit_module.os, "write", write)
    audit = AuditLog(str(tmp_path / "audit.jsonl"), 10**9)
    audit.decided(decision(0), STREAM, 0)
    assert stuck.wait(20)
    with capture_logs() as said:
        for number in range(MAX_QUEUED + 10):
            audit.reported(REPORT, STREAM, number)
        assert audit.num_dropped == 10
        audit.close()
    assert [line["so_far"] for line in said if "dropped" in line["event"]] == [1, 2, 4, 8]
    assert said[-1]["lines"] == MAX_QUEUED + 10
    release.set()
    audit._thread.join(20)
    assert not audit._thread.is_alive()


def test_a_full_disk_costs_lines_and_the_log_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines that the disk refused are counted and said once; later ones are written, none torn."""
    path, real, full = tmp_path / "audit.jsonl", os.write, threading.Event()

    def write(fd: int, data: bytes) -> int:
        if full.is_set():
            real(fd, data[:7])
            raise OSError(28, "No space left on device")
        return real(fd, data)

    monkeypatch.setattr(audit_module.os, "write", write)
    with capture_logs() as said, written(path) as audit:
        audit.decided(decision(1), STREAM, 1)
        eventually(lambda: path.stat().st_size > 0, "the first line")
        full.set()
        audit.decided(decision(2), STREAM, 2)
        eventually(lambda: audit.num_lost == 1, "the loss")
        full.clear()
        audit.decided(decision(3), STREAM, 3)
    before, torn, after = path.read_text().splitlines()
    assert [json.loads(line)["at_ms"] for line in (before, after)] == [1, 3]
    assert len(torn) == 7
    errors = [line for line in said if line["log_level"] == "error"]
    assert [(e["lines_lost"], e["reason"]) for e in errors] == [(1, "No space left on device")]
    assert said[-1]["lines"] == 1


async def test_a_planner_whose_disk_is_full_goes_on_deciding(tmp_path: Path) -> None:
    """A real process, its files limited by the system: it says so, and every ask is answered."""
    path = tmp_path / "audit.jsonl"
    start = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)); \
from planner_service.main import main; main(['--audit-log', {str(path)!r}])"
    with Command("-c", start) as command:
        command.shows("listening on ")
        async with dialled(command.stdout.split("listening on ")[1].split()[0]) as stub:
            worker = Worker(stub)
            await worker.ask(1, hello=True)
            for _ in range(50):
                await worker.ask(1, report())
            await asyncio.to_thread(command.shows, "audit log cannot be written")
            assert (await worker.ask(1, report())).decision_id
            assert path.stat().st_size == 4096
            worker.stream.cancel()


async def test_every_decision_and_report_of_a_planner_is_in_the_file(tmp_path: Path) -> None:
    """Streams and unary calls alike, under the ids that went out; the end writes the rest."""
    path = tmp_path / "audit.jsonl"
    ids = set()
    async with running_planner(audit_log=str(path)) as stub:
        workers = [Worker(stub, f"worker-{i}") for i in range(3)]
        for worker in workers:
            ids.add((await worker.ask(2, hello=True)).decision_id)
        for _ in range(20):
            for worker in workers:
                done = report(worker.gamma, 2, decision_id=worker.decision.decision_id)
                ids.add((await worker.ask(2, done)).decision_id)
        await stub.ActivatePolicy(pb.ActivatePolicyRequest(name="off"))
        ids |= {(await worker.next()).decision_id for worker in workers}
        bad = report(9, 2)
        await workers[0].ask(2, bad)
        ids.add(workers[0].decision.decision_id)
    told = lines(path)
    assert {line["decision_id"] for line in told if line["kind"] == "decision"} == ids
    assert sum(line["kind"] == "report" for line in told) == 60
    assert {line["version"] for line in told if "version" in line} == {"1-nightjar", "2-off"}
    assert {line["worker"] for line in told} == {"worker-0", "worker-1", "worker-2"}


async def test_reports_can_be_watched_too() -> None:
    """A watcher who asks for reports gets them between the decisions, others do not."""
    async with running_planner(policy="fixed") as stub:
        both = stub.WatchDecisions(pb.WatchDecisionsRequest(include_reports=True))
        only = stub.WatchDecisions(pb.WatchDecisionsRequest())
        worker = Worker(stub)
        await worker.ask(3, hello=True)
        seen: dict[Any, list[pb.WatchDecisionsResponse]] = {both: [], only: []}

        async def read(call: Any) -> None:
            while (item := await call.read()) and len(seen[call]) < 8:
                seen[call].append(item)

        readers = [asyncio.create_task(read(call)) for call in (both, only)]

        async def all_read() -> bool:
            await worker.ask(3, report(3, 3, 5, decision_id=worker.decision.decision_id))
            return all(reader.done() for reader in readers)

        await comes_true(all_read)
        told = [item for item in seen[both] if item.HasField("report")]
        assert len(told) == 4
        assert told[0].report.num_steps == 5
        assert told[0].report.context.batch_size == 3
        assert list(told[0].report.reached) == [15, 15, 15]
        assert (told[0].worker_id, told[0].profile_key[:1]) == ("worker-1", "p")
        assert told[0].decided_at_ms > 0
        assert not told[0].HasField("decision")
        assert not any(item.HasField("report") for item in seen[only])
        both.cancel()
        only.cancel()


async def test_a_slow_watcher_holds_no_more_than_its_share() -> None:
    """Of what it does not read, the newest are kept; the end still reaches it."""
    watchers = Watchers[int]()
    watch = watchers.watch("", include_reports=True)
    first = asyncio.create_task(anext(watch))
    await asyncio.sleep(0)
    for number in range(50_000):
        watchers.tell("report", "p", lambda number=number: number)  # type: ignore[misc]
    assert await first == 50_000 - MAX_WAITING
    watchers.close()
    rest = [number async for number in watch]
    assert rest == list(range(50_000 - MAX_WAITING + 1, 50_000))


async def test_a_watcher_that_reads_nothing_does_not_grow_the_planner() -> None:
    """Memory stays flat over tens of thousands of reports while the watch is stuck."""
    with Command("-m", "nightjar", "planner") as command:
        command.shows("listening on ")
        async with dialled(command.stdout.split("listening on ")[1].split()[0]) as stub:
            watch = stub.WatchDecisions(pb.WatchDecisionsRequest(include_reports=True))
            worker, used = Worker(stub), psutil.Process(command.process.pid).memory_info
            await worker.ask(hello=True)
            many = [report(3, 1, 2, decision_id="d" * 100)] * 1000
            for _ in range(5):
                await worker.ask(1, *many)
            before = used().rss
            for _ in range(20):
                await worker.ask(1, *many)
            assert used().rss - before < 8_000_000  # 20,000 of them weigh 20 MB
            watch.cancel()
            worker.stream.cancel()
