"""Calibration: real steps of tiny models, what is kept of them, and a planner that learns them."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
import torch
from processes import Command

from nightjar.cli import main as nightjar
from nightjar.errors import ConfigError, EngineFailure, Unavailable
from nightjar.v1 import planner_pb2 as pb
from nightjar.v1 import planner_pb2_grpc
from planner_service import server_messages
from planner_service.observation import observe
from planner_service.sums import NOTHING
from planner_service.switching import predict_us, table_us
from worker.calibration.cli import CalibrateConfig, main
from worker.calibration.grid import Grid, Measured, default_batch_sizes
from worker.calibration.measure import Calibration, Direct
from worker.calibration.teach_client import CalibrationClient
from worker.engine.engine import Engine
from worker.engine.main import start
from worker.messages import Ready
from worker.planner_client import profile, step_report

MAX_CATCHUP = 16
FLAGS = {
    "dtype": "float32",
    "arithmetic": "free",
    "build": "eager",
    "num_threads": 1,
    "num_blocks": 64,
    "max_num_seqs": 4,
    "max_model_len": 400,
    "max_gamma": 2,
    "max_catchup_tokens": MAX_CATCHUP,
}
GRID = Grid(
    context_lengths=(40, 16), batch_sizes=(1, 3), stale_tokens=(4, 10), repeats=2, temperature=1.0
)
SMALL = Grid(context_lengths=(16,), batch_sizes=(1,), stale_tokens=(), repeats=1, temperature=0.0)


class Ran:
    """An engine on tiny models, and all that a calibration needs."""

    def __init__(self, config: CalibrateConfig) -> None:
        self.said: list[str] = []
        self.channel = Direct(self.said.append)
        self.models, engine, self.ready = start(config, cast(Any, self.channel))
        self.engine: Engine = engine

    def calibration(self, **changes: Any) -> Calibration:
        """A calibration of this engine."""
        self.said.clear()
        settings: dict[str, Any] = {"max_catchup_tokens": MAX_CATCHUP, "budget_s": 60, **changes}
        return Calibration(
            self.engine,
            self.channel,
            lambda number, length: [(7 * number + at) % 300 + 4 for at in range(length)],
            self.said.append,
            **settings,
        )


@pytest.fixture(scope="module")
def ran(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    """One engine for the file."""
    threads = torch.get_num_threads()
    shm = tmp_path_factory.mktemp("shm")
    config = CalibrateConfig(
        model=str(tiny.target),
        draft=str(tiny.noisy),
        planner="calibration",
        shm_dir=str(shm),
        **cast(dict[str, Any], FLAGS),
    )
    built = Ran(config)
    yield built
    built.models.close()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def measured(ran: Ran) -> Measured:
    """What one run of the grid finds."""
    return ran.calibration().run(GRID)


def test_every_cell_is_measured_and_the_engine_left_empty(ran: Ran, measured: Measured) -> None:
    """Each context, batch size and gamma has its steps; catch-up is measured at one context."""
    assert set(measured.cells) == {(c, b, g) for c in (16, 40) for b in (1, 3) for g in (0, 1, 2)}
    for (length, batch, gamma), cell in measured.cells.items():
        least = GRID.repeats + (sum(GRID.stale_tokens) if length == 16 and gamma == 0 else 0)
        assert cell.num_steps == least
        assert cell.num_rows == batch * cell.num_steps
        shown = cell.figures()
        assert shown["ms_per_step"] > 0
        assert 1 <= shown["tokens_per_step"] <= gamma + 1
        tokens = shown["tokens_per_step"]
        assert shown["ms_per_token"] == pytest.approx(shown["ms_per_step"] / tokens)
    assert [(c.batch_size, c.stale_tokens) for c in measured.catch_ups] == [
        (b, n) for b in (1, 3) for n in (4, 10)
    ]
    for caught in measured.catch_ups:
        assert caught.ms > 0
        assert caught.num_steps >= -(-caught.batch_size * caught.stale_tokens // MAX_CATCHUP)
    assert measured.catch_ups[-1].num_steps > 1  # 30 tokens, 16 a step
    assert measured.left_out == []
    assert not ran.engine.scheduler.has_work
    assert ran.engine.scheduler.blocks.num_free == ran.engine.scheduler.blocks.num_total


def test_only_clean_steps_teach_time(measured: Measured) -> None:
    """Timed steps had all rows and no catch-up; steps that caught up teach what that cost."""
    reports = measured.reports
    assert {sums.decision_id for sums in reports} == {""}
    assert not any(sums.num_prefill_tokens or sums.draft_prefill_us for sums in reports)
    timed = [sums for sums in reports if sums.num_timed_steps]
    assert all(s.num_timed_rows == s.num_timed_steps * s.context.batch_size for s in timed)
    assert not any(sums.num_catch_up_steps for sums in timed)
    caught = [sums for sums in reports if sums.num_catch_up_steps]
    assert sum(sums.num_catch_up_tokens for sums in caught) >= sum(
        batch * tokens for batch in GRID.batch_sizes for tokens in GRID.stale_tokens
    )


def test_a_planner_takes_every_report_and_knows_the_costs(measured: Measured) -> None:
    """By the planner's own checks each report is one that steps can have; their sums answer."""
    known = NOTHING
    for sums in measured.reports:
        report = server_messages.report(step_report(sums), "report", 8, 4096)
        known = known.plus(observe(report.context, report.gamma, report.outcome))
    assert {(b, g) for b, row in known.buckets.items() for g in row} == {
        (b, g) for b in (1, 3) for g in (0, 1, 2)
    }
    assert predict_us(known, 30, 3) > 0
    assert table_us(known, 10, 3) > 0
    assert known.reached[0] > 0


def test_a_spent_budget_keeps_what_was_measured(ran: Ran) -> None:
    """A second passes with each turn: what is not reached is named, and nothing breaks."""
    ticks = iter(range(10**9))
    calibration = ran.calibration(budget_s=45, clock=lambda: next(ticks))
    measured = calibration.run(GRID)
    assert measured.cells
    assert measured.left_out[0].startswith("the rest of batch ")
    assert all("--budget-s=45 is spent" in words for words in measured.left_out)
    assert "batch 3 at 40 tokens" in measured.left_out[-1]
    assert not ran.engine.scheduler.has_work
    assert len(ran.calibration().run(SMALL).cells) == 3  # and the engine goes on


@pytest.mark.parametrize(
    ("length", "batch", "words"),
    [
        (16, 5, "--max-num-seqs is 4"),
        (390, 1, "--max-model-len is 400"),
        (200, 4, "KV blocks are needed"),
    ],
)
def test_what_does_not_fit_is_left_out_with_the_reason(
    ran: Ran, length: int, batch: int, words: str
) -> None:
    """A batch that the pool, the context or the worker cannot hold costs no step."""
    grid = Grid(
        context_lengths=(length,),
        batch_sizes=(batch,),
        stale_tokens=(),
        repeats=1,
        temperature=0.0,
    )
    measured = ran.calibration().run(grid)
    assert (measured.cells, measured.reports) == ({}, [])
    assert words in measured.left_out[0]


def test_a_draft_that_never_catches_up_ends_the_calibration(
    ran: Ran, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is an error that names the flag, not an endless run; the engine is left empty."""
    monkeypatch.setattr(ran.engine.scheduler.drafting, "num_draft_computed", lambda row: 0)
    with pytest.raises(EngineFailure, match="max-catchup-tokens"):
        ran.calibration().run(GRID)
    monkeypatch.undo()
    assert not ran.engine.scheduler.has_work


def test_default_batch_sizes_begin_with_the_ends() -> None:
    """Where time runs out, the smallest and the largest batch are known first."""
    assert default_batch_sizes(1) == (1,)
    assert default_batch_sizes(2) == (1, 2)
    assert default_batch_sizes(16) == (1, 16, 4, 2, 8)
    assert sorted(default_batch_sizes(20)) == [1, 2, 4, 8, 16, 20]


def test_a_cold_planner_is_taught_under_the_profile_of_a_worker(
    tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command prints JSON and, at a real planner, leaves arms for every batch and gamma."""
    threads = torch.get_num_threads()
    with Command("-m", "nightjar", "planner") as planner:
        planner.shows("listening on ")
        address = planner.stdout.split("listening on ")[1].split()[0]
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in FLAGS.items()]
        flags += [f"--model={tiny.target}", f"--draft={tiny.noisy}", f"--shm-dir={tmp_path}"]
        flags += ["--batch-sizes=1,2", "--context-lengths=12", "--stale-tokens=4", "--repeats=2"]
        assert main([*flags, f"--planner={address}", "--json"]) == 0
        torch.set_num_threads(threads)
        answer = json.loads(capsys.readouterr().out)
        assert len(answer["cells"]) == 6
        assert len(answer["catch_ups"]) == 2
        assert answer["planner"] == address
        assert answer["num_reports_taught"] > 0
        with grpc.insecure_channel(address) as channel:
            stub = planner_pb2_grpc.PlannerServiceStub(channel)
            state = stub.GetPolicyState(pb.GetPolicyStateRequest(), timeout=5).profiles[0]
    assert {(arm.bucket, arm.gamma) for arm in state.arms} == {
        (b, g) for b in (1, 2) for g in (0, 1, 2)
    }
    assert state.catch_up_us_per_token > 0
    assert state.profile.target == answer["profile"]["target_identity"]
    assert state.profile.engine == "nightjar/eager/free"


def test_the_profile_is_the_worker_s_own(ran: Ran) -> None:
    """A worker of the same flags on this machine finds what was taught."""
    ready: Ready = ran.ready
    assert CalibrationClient("127.0.0.1:1", ready).profile == profile(ready)


def test_a_planner_that_is_not_there_is_named_before_anything_is_loaded(ran: Ran) -> None:
    """The error says whom it tried; one that dies meanwhile is named as well."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(Unavailable, match=address):
            main([f"--planner={address}", "--model=/nowhere"])
        reports = ran.calibration().run(SMALL).reports
        with pytest.raises(Unavailable, match=address):
            CalibrationClient(address, ran.ready).teach(reports)


def test_a_proposer_without_a_cache_has_nothing_to_catch_up(
    tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With n-grams there are cells for every gamma and no catch-up; a dry run teaches nobody."""
    threads = torch.get_num_threads()
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in FLAGS.items()]
    flags += [f"--model={tiny.target}", "--proposer=ngram", f"--shm-dir={tmp_path}"]
    flags += ["--batch-sizes=2", "--context-lengths=20", "--repeats=2", "--dry-run"]
    assert nightjar(["bench", "calibrate", *flags]) == 0
    torch.set_num_threads(threads)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:4] for line in lines[3:6]] == [["20", "2", str(g), "2"] for g in range(3)]
    assert lines[-1] == "dry run: nobody was taught"
    assert not any("stale" in line for line in lines)


def test_without_a_planner_the_command_refuses_before_it_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No address, no note of `nightjar up`, or a broken one: status 2 and a sentence."""
    monkeypatch.delenv("NIGHTJAR_PLANNER", raising=False)
    monkeypatch.setenv("NIGHTJAR_RUN_DIR", str(tmp_path))
    assert nightjar(["bench", "calibrate", "--model=/nowhere"]) == 2
    assert "--planner" in capsys.readouterr().err
    (tmp_path / "addresses.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"addresses\.json"):
        main([])


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--batch-sizes=0", "at least 1 each"),
        ("--batch-sizes=1,x", "whole number"),
        ("--context-lengths=", "at least 1"),
        ("--stale-tokens=1", "at least 2"),
        ("--repeats=0", "at least 1"),
        ("--budget-s=0", "at least 1"),
        ("--temperature=-1", "at least 0"),
    ],
)
def test_senseless_flags_are_refused(flag: str, words: str) -> None:
    """Each names the flag and what it may be."""
    with pytest.raises(ConfigError, match=words) as refused:
        main([flag, "--dry-run"])
    assert flag.split("=")[0] in str(refused.value)


def test_bench_lists_its_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    """Help shows the verbs; an unknown one is refused with them."""
    assert nightjar(["bench", "--help"]) == 0
    assert "calibrate" in capsys.readouterr().out
    assert nightjar(["bench"]) == 2
    assert nightjar(["bench", "nonsense"]) == 2
    assert "calibrate" in capsys.readouterr().err
    with pytest.raises(SystemExit) as done:
        nightjar(["bench", "calibrate", "--help"])
    assert done.value.code == 0
    shown = capsys.readouterr().out
    assert all(flag in shown for flag in ("--dry-run", "--json", "--budget-s", "--planner"))
