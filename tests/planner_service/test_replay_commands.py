"""`nightjar policy watch` and `nightjar policy evaluate`, as commands, against real planners."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from planner_harness import PROFILE, Worker, comes_true, context, dialled, report
from plugin_packages import install_example
from processes import Command
from synthetic_log import always, as_lines, logged, skewed

from nightjar.cli import main
from nightjar.v1 import planner_pb2 as pb


@contextlib.contextmanager
def planner(*flags: str) -> Iterator[tuple[Command, str]]:
    """A planner process and its address."""
    with Command("-m", "nightjar", "planner", *flags) as command:
        command.shows("listening on ")
        yield command, command.stdout.split("listening on ")[1].split()[0]


def watching(address: str, *flags: str) -> Command:
    """A watch that runs."""
    return Command("-m", "nightjar", "policy", "watch", "--planner", address, *flags)


async def work(stub: Any, name: str, turns: int, seed: int) -> None:
    """A worker whose steps take what 3 drafts are worth."""
    worker, rng = Worker(stub, name), random.Random(seed)
    await worker.ask(1, hello=True)
    for _ in range(turns):
        decision, gamma, ran = worker.decision, worker.gamma, worker.decision.hold_steps
        emitted = sum(rng.randint(1, gamma + 1) for _ in range(ran * decision.bucket))
        done = report(
            gamma,
            decision.bucket,
            ran,
            decision_id=decision.decision_id,
            step_us=round(ran * (9_000 + 1_000 * gamma) * rng.uniform(0.9, 1.1)),
            num_timed_emitted=emitted,
            num_emitted=emitted,
        )
        await worker.ask(rng.choice((1, 2)), done)
    worker.stream.cancel()


def evaluated(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Status, standard output and standard error of an evaluation."""
    try:
        status = main(["policy", "evaluate", *arguments])
    except SystemExit as end:
        status = int(str(end.code))
    out, err = capsys.readouterr()
    return status, out, err


async def test_a_planners_log_and_a_watchers_file_evaluate_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both hold the same bins, and the policy that decided is worth what it gave."""
    audit, seen = tmp_path / "audit.jsonl", tmp_path / "seen.jsonl"
    flags = ("--audit-log", str(audit), "--policy-parameters", "gamma_max=2")
    with (
        planner(*flags) as (command, address),
        watching(address, "--reports", "--jsonl", str(seen)) as watch,
    ):
        async with dialled(address) as stub:
            ask = pb.SelectGammaRequest(profile=PROFILE, context=context(1))

            async def heard() -> bool:
                await stub.SelectGamma(ask)
                return seen.exists() and seen.stat().st_size > 0

            await comes_true(heard)
            await asyncio.gather(*(work(stub, f"worker-{i}", 150, i) for i in range(3)))
        command.signal(signal.SIGTERM)
        assert command.wait() == 0
        assert watch.wait() == 1
        assert "ended the watch: it is stopping" in watch.stderr
    shared = ("--policy", "nightjar", "--param", "gamma_max=2", "--json")
    status, out, err = evaluated(str(audit), *shared, capsys=capsys)
    assert status == 0, err
    answer = json.loads(out)
    overall = answer["overall"]
    assert (answer["num_bad_lines"], answer["refused"]) == (0, [])
    probes = sum(
        '"report"' in line and '-probe"' in line for line in audit.read_text().splitlines()
    )
    assert overall["num_bins"] == 450 - probes
    assert overall["mean_weight"] == pytest.approx(1, abs=0.1)
    own = overall["logged"]["tokens_per_s"]
    assert overall["snips"]["tokens_per_s"] == pytest.approx(own, rel=0.05)
    status, out, err = evaluated(str(seen), *shared, capsys=capsys)
    assert status == 0, err
    watched = json.loads(out)["overall"]
    assert watched["num_bins"] == overall["num_bins"]
    assert watched["logged"] == overall["logged"]
    status, out, _ = evaluated(str(audit), "--policy", "fixed", "--param", "gamma=5", capsys=capsys)
    assert (status, out) == (1, "")


async def test_a_watch_ends_well_however_it_ends() -> None:
    """Ctrl-C is no failure, a reader may leave, and a planner that is gone is said."""
    with planner() as (command, address):
        async with dialled(address) as stub:
            working = asyncio.create_task(work(stub, "worker-1", 10_000, 0))
            with watching(address, "--reports") as watch:
                await asyncio.to_thread(watch.shows, " ran ")
                watch.signal(signal.SIGINT)
                assert await asyncio.to_thread(watch.wait) == 0
                assert watch.stderr == ""
                assert "decided  batch 1, 0 KV tokens: gamma" in watch.stdout
                assert "; propensity " in watch.stdout
            argv = [sys.executable, "-m", "nightjar", "policy", "watch", "--planner", address]
            reader = await asyncio.to_thread(
                subprocess.Popen, [*argv, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            assert reader.stdout is not None
            assert reader.stderr is not None
            line = await asyncio.to_thread(reader.stdout.readline)
            assert json.loads(line)["kind"] == "decision"
            reader.stdout.close()
            assert (await asyncio.to_thread(reader.wait), reader.stderr.read()) == (0, b"")
            reader.stderr.close()
            with watching(address) as watch:
                await asyncio.to_thread(watch.shows, "decided")
                working.cancel()
                command.signal(signal.SIGKILL)
                assert await asyncio.to_thread(watch.wait) == 1
                assert f"the planner at {address} went away" in watch.stderr


async def test_a_watch_that_cannot_be_is_refused_with_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No such profile, no such file, no such planner."""
    with planner() as (_, address):
        for flags, status, words in (
            (("--planner", address, "--profile", "p0"), 1, "no profile 'p0'"),
            (("--planner", address, "--jsonl", str(tmp_path)), 2, "--jsonl="),
            (("--planner", "127.0.0.1:1"), 1, "no planner answers at 127.0.0.1:1"),
        ):
            assert await asyncio.to_thread(main, ["policy", "watch", *flags]) == status
            assert words in capsys.readouterr().err


def written(path: Path, texts: list[str]) -> str:
    """A file of lines."""
    path.write_text("\n".join(texts) + "\n")
    return str(path)


def test_bad_lines_are_counted_and_named_and_order_does_not_matter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Torn lines cost themselves alone; the files of a log may come in any order."""
    texts = as_lines(logged(skewed, 600, 0))
    texts.insert(3, '{"kind": "deci')
    texts.insert(700, "\x00" * 100)
    old, new = written(tmp_path / "a.1", texts[:501]), written(tmp_path / "a", texts[501:])
    shared = ("--policy", "fixed", "--param", "gamma=3", "--min-ess", "5")
    status, out, _ = evaluated(new, old, *shared, capsys=capsys)
    assert status == 0
    assert "bad      2 lines left out" in out
    assert f"{old}:4: is no JSON" in out
    assert "policy   fixed gamma=3" in out
    assert [line.split()[0] for line in out.splitlines()[-5:]] == [*["batch"] * 4, "overall"]
    again = evaluated(old, new, *shared, "--json", capsys=capsys)[1]
    assert json.loads(again)["overall"]["num_bins"] == 600


def test_buckets_without_overlap_are_refused_unless_they_may_be_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The refusal names them; a partial answer says what it covers; none at all is none."""

    def law(batch_size: int) -> list[float]:
        return [0.25] * 4 if batch_size <= 2 else [0.4, 0.3, 0.0, 0.3]

    log = written(tmp_path / "log", as_lines(logged(law, 900, 0)))
    shared = (log, "--policy", "fixed", "--param", "gamma=2")
    status, out, err = evaluated(*shared, capsys=capsys)
    assert (status, out) == (1, "")
    for words in ("batch 3-4 (", "batch 5-8 (", "gamma 2 in 100%", "--allow-partial"):
        assert words in err
    assert "batch 2 (" not in err
    status, out, _ = evaluated(*shared, "--allow-partial", "--json", capsys=capsys)
    answer = json.loads(out)
    assert [refusal["name"] for refusal in answer["refused"]] == ["batch 3-4", "batch 5-8"]
    assert answer["covered_share"] == pytest.approx(1 / 3, abs=0.05)
    status, out, _ = evaluated(*shared, "--allow-partial", capsys=capsys)
    assert (status, "estimates cover" in out, "batch 5-8 (" in out) == (0, True, True)
    only = written(tmp_path / "only", as_lines(logged(always(0), 200, 0)))
    status, out, err = evaluated(
        only, "--policy", "fixed", "--param", "gamma=2", "--allow-partial", capsys=capsys
    )
    assert (status, out, "never drew" in err) == (1, "", True)


def test_a_plug_in_is_estimated_before_it_decides_for_anyone(tmp_path: Path) -> None:
    """It is found among the installed packages, learns in its own process, and output is clean."""
    install_example(tmp_path / "installed")
    path = written(tmp_path / "log", as_lines(logged(lambda size: [0.25] * 4, 400, 0)))
    argv = ["-m", "nightjar", "policy", "evaluate", path, "--policy", "patience", "--json"]
    argv += ["--param", "target=0.4", "--min-ess", "5"]
    with Command(*argv, environ={"PYTHONPATH": str(tmp_path / "installed")}) as command:
        assert command.wait() == 0, command.stderr
        answer = json.loads(command.stdout)
    assert answer["parameters"]["target"] == "0.4"
    assert answer["overall"]["effective_sample_size"] > 50


def test_the_documented_evaluations_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each command of the page gives an estimate."""
    monkeypatch.chdir(tmp_path)
    lines = logged(lambda size: [0.25] * 4, 1500, 0)
    written(tmp_path / "audit.jsonl.1", as_lines(lines[:1000]))
    written(tmp_path / "audit.jsonl", as_lines(lines[1000:]))
    page = (Path(__file__).parents[2] / "docs" / "audit.md").read_text()
    commands = re.findall(r"^nightjar policy evaluate (.*)$", page, re.MULTILINE)
    assert len(commands) == 3
    ends = [evaluated(*command.split(), capsys=capsys) for command in commands]
    assert [status for status, _, _ in ends] == [0, 0, 0], ends


BAD_COMMANDS: list[tuple[list[str], int, str]] = [
    (["--policy", "fixed"], 2, "LOG"),
    (["{log}"], 2, "--policy"),
    (["{missing}", "--policy", "off"], 2, "No such file"),
    (["{folder}", "--policy", "off"], 2, "directory"),
    (["{empty}", "--policy", "off"], 2, "empty; 0 decisions, 0 reports, 0 bad lines"),
    (["{rubbish}", "--policy", "off"], 2, "rubbish:1: is no JSON"),
    (["{decisions}", "--policy", "off"], 2, "no bin with a choice"),
    (["{two}", "--policy", "off"], 2, "--profile: choose one of the log's, p, q"),
    (["{two}", "--policy", "off", "--profile", "r"], 2, "which has p, q"),
    (["{log}", "{log}", "--policy", "off"], 1, "is there twice"),
    (["{log}", "--policy", "nope"], 1, "unknown policy 'nope'; known: "),
    (["{log}", "--policy", "fixed", "--param", "gama=2"], 1, "takes gamma"),
    (["{log}", "--policy", "fixed", "--param", "gamma"], 2, "NAME=VALUE"),
    (["{log}", "--policy", "fixed", "--min-ess", "nan"], 2, "--min-ess=nan"),
    (["{log}", "--policy", "fixed", "--min-ess", "1"], 2, "at least 5"),
    (["{log}", "--policy", "fixed", "--planner", "x"], 2, "--planner"),
]


@pytest.mark.parametrize(("arguments", "status", "words"), BAD_COMMANDS)
def test_a_wrong_command_is_refused_with_a_sentence(
    arguments: list[str],
    status: int,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each says what is wrong, and prints no estimate."""
    texts = as_lines(logged(skewed, 50, 0))
    other = as_lines(logged(skewed, 5, 0), profile="q")
    paths = {
        "log": written(tmp_path / "log", texts),
        "two": written(tmp_path / "two", texts + other),
        "decisions": written(tmp_path / "decisions", texts[::2]),
        "rubbish": written(tmp_path / "rubbish", ["rubbish"]),
        "empty": written(tmp_path / "empty", []),
        "folder": str(tmp_path),
        "missing": str(tmp_path / "missing"),
    }
    got, out, err = evaluated(*(text.format(**paths) for text in arguments), capsys=capsys)
    assert (got, out) == (status, "")
    assert words in err
