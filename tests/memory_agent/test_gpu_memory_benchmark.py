"""The benchmark of elastic memory runs, on tiny models and the CPU, with a real agent beside it."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the benchmark's modules be found, as its own folder does when it is run."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def run(folder: Path, *flags: str) -> dict[str, dict[str, object]]:
    """Figures of a tiny run."""
    import gpu_memory

    own = ["--tiny", f"--out={folder}", f"--work={folder / 'models'}", f"--shm-dir={folder}"]
    assert gpu_memory.main([*own, *flags]) == 0
    found: dict[str, dict[str, object]] = json.loads((folder / "gpu_memory.json").read_text())
    return found


def test_steps_around_a_reload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Blocks move, some while steps pause, the draft comes back, and figures come out."""
    found: dict[str, Any] = run(tmp_path, "--sections=reload")["reload"]
    for cycle in found["cycles"]:
        copied = sum(cycle["blocks_granted"]) + cycle["blocks_in_rest"]
        assert cycle["blocks_in_tail"] == cycle["blocks_moved"] == copied
        assert cycle["longest_of_expansion_ms"] > 0
        # Every row has a gap wherever one has.
        assert all(count % found["rows"] == 0 for count in cycle["all_gaps_before_ms"].values())
        assert 0 <= cycle["all_copying_ms"][0] <= cycle["all_copying_ms"][1]
        assert cycle["all_copying_ms"][1] <= cycle["all_resident_ms"]
        assert cycle["all_loading"]
    assert found["num_that_grew"] >= 1
    assert (found["failed"], len(found["floors"])) == ([], 5)
    assert found["drafting_again"]["cycles"][0]["tokens_caught_up"] > 0
    assert found["full_head"]["longest_of_others_ms"] > 0
    shown = capsys.readouterr().out
    assert "at most 1.05" in shown
    assert "rows that draft again" in shown


@pytest.mark.slow
def test_the_arms_of_a_capped_pool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every arm runs twice from the residency that it is named for, and answers alike."""
    capped = run(tmp_path, "--sections=capped")["capped"]
    assert (capped["failed"], capped["answers_are_equal"]) == ([], True)
    assert (
        capped["arms"]["elastic"]["num_preemptions"]
        < (capped["arms"]["resident"]["num_preemptions"])
    )
    assert "--hold-s=0.1" in capped["agent_flags"]
    assert list(capped["elastic_over"]) == ["resident, gamma 1"]
    arms: dict[str, Any] = capped["arms"]  # type: ignore[assignment]
    elastic = ["elastic", "weights alone", "draft KV alone", "no draft"]
    assert list(arms) == ["resident", "resident, gamma 1", *elastic]
    assert [len(arm["runs"]) for arm in arms.values()] == [2] * 6
    assert all(run["num_expansions"] >= 1 for run in arms["elastic"]["runs"])
    assert [run["num_turns_offloaded"] for run in arms["resident"]["runs"]] == [0, 0]
    assert arms["no draft"]["mean_rows"] > arms["resident"]["mean_rows"]
    assert "who has which part" in capsys.readouterr().out


@pytest.mark.slow
def test_cycles_and_rates(tmp_path: Path) -> None:
    """Answers stay, all drafts are accepted again after each reload, and nothing is left behind."""
    found = run(tmp_path, "--sections=remap,death,cycles")
    cycles = found["cycles"]
    assert (cycles["num_wrong"], cycles["least_acceptance_share"]) == (0, 1.0)
    assert cycles["num_contractions"] >= 4  # type: ignore[operator]
    assert cycles["failed"] == []
    assert cycles["num_tight_preemptions"] or cycles["refused"]
    assert cycles["num_windows"] == 4
    assert cycles["blocks_moved"] > 0  # type: ignore[operator]
    cells: dict[str, Any] = found["remap"]["rates"]["32"]  # type: ignore[index]
    assert [len(cells[name]["all_ms"]) for name in ("kernel", "grant")] == [1, 1]
    assert found["left_out"]["death"] == "needs a GPU"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("nightjar-")]


def test_a_gpu_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one a sentence names what runs here."""
    import gpu_memory

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit) as ended:
        gpu_memory.main([f"--out={tmp_path}"])
    assert ended.value.code == 2


def test_a_section_that_fails_is_left_out_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason is kept, an older figure is not, and the status is 1; so it is after a finding."""
    import gpu_memory
    from gpu import memory_remap

    def fails(options: object) -> dict[str, object]:
        raise AssertionError("blocks did not arrive")

    figures = tmp_path / "gpu_memory.json"
    figures.write_text(json.dumps({"remap": {"share": 1.0}}))
    monkeypatch.setattr(memory_remap, "measure", fails)
    monkeypatch.setattr(memory_remap, "died", lambda options: {"failed": ["a leak"]})
    own = ["--tiny", f"--out={tmp_path}", f"--work={tmp_path / 'models'}"]
    assert gpu_memory.main([*own, "--sections=remap,death"]) == 1
    found = json.loads(figures.read_text())
    assert "blocks did not arrive" in found["left_out"]["remap"]
    assert "remap" not in found
    assert found["death"] == {"failed": ["a leak"]}
    assert gpu_memory.main([*own, "--sections=death"]) == 1


@pytest.mark.parametrize(
    ("cycles", "failed"),
    [
        (40, ["MiB that device grew, levels: 9, at most 8"]),
        (
            100,
            [
                "MiB that engine grew, by its line: 95.37, at most 16",
                "MiB that device grew, levels: 9, at most 8",
            ],
        ),
    ],
)
def test_growth_and_answers_decide_whether_cycles_failed(cycles: int, failed: list[str]) -> None:
    """Growth beyond a limit is a leak, by its line too where cycles are many; the rest is named."""
    from gpu import memory_cycles

    baseline = {"cycle": 0, "engine": 0, "agent": 0, "device": 0}
    memory = [
        {"cycle": cycle, "engine": cycle * 1_000_000, "agent": 64 << 20, "device": 9 << 20}
        for cycle in (10, 20, 30, 40)
    ]
    grown, slopes = memory_cycles._growth(baseline, memory)
    assert slopes == {"engine": 1e6, "agent": 0.0, "device": 0.0}
    found: dict[str, Any] = {
        "cycles": cycles,
        "grown_bytes": grown,
        "bytes_per_cycle": slopes,
        "num_wrong": 1,
        "num_answers": 7,
        "num_contractions": cycles,
        "blocks_moved": 0,
        "num_rests": 3,
        "least_acceptance_share": 0.9,
        "num_windows_without": 0,
        "num_tight_cycles": 10,
        "num_tight_preemptions": 0,
        "refused": {},
    }
    memory_cycles._judge(found, argparse.Namespace(tiny=True))
    assert found["failed"] == [
        "answers that differ: 1, at most 0",
        "blocks that were moved: 0, at least 1",
        "least acceptance after a reload, of before: 0.9, at least 0.95",
        "rows and contractions that a full head made give way: 0, at least 1",
        *failed,
    ]


def test_refusals_are_counted_by_reason_without_its_numbers() -> None:
    """Requests of the agent by their kind; what is counted can be written as JSON."""
    from gpu import memory_cycles

    from worker.engine.transition import ElasticCounters
    from worker.messages import RequestRefused, TransitionRequest

    counters = ElasticCounters(num_expansions=0, num_contractions=0, num_granted_blocks=0)
    refusals = [
        (0.0, RequestRefused(request_id=1, reason=f"too few: {count}")) for count in (2, 30)
    ]
    feed = argparse.Namespace(
        asked=[(0.0, TransitionRequest(request_id=1, kind="contract"))], sent=refusals
    )
    bench: Any = argparse.Namespace(
        elastic=argparse.Namespace(counters=counters),
        num_moved=7,
        phases=[],
        rests=[],
        feed=feed,
        forget=lambda: None,
    )
    tally = memory_cycles.Tally()
    tally.add(bench, counters, 5)
    found = json.loads(json.dumps(dataclasses.asdict(tally)))
    assert (found["refused"], found["blocks_moved"]) == ({"contract: too few: N": 2}, 2)


def test_a_missed_bound_of_time_fails_a_run_but_not_a_tiny_one() -> None:
    """It is shown as missed in both; a figure that could not be had is a miss too."""
    from gpu import memory_floors

    for tiny, failed in ((False, ["a rate: 0.5, at least 0.85"]), (True, [])):
        found: dict[str, Any] = {}
        options = argparse.Namespace(tiny=tiny)
        memory_floors.check(found, options, "a rate", 0.5, least=0.85, of_time=True)
        memory_floors.check(found, options, "a count", 3, least=3)
        assert found["failed"] == failed
        assert "MISSED a rate: 0.5 (at least 0.85" in memory_floors.lines(found)[0]
        assert memory_floors.lines(found)[1] == "  met    a count: 3 (at least 3)"
        memory_floors.check(found, options, "a share", None, most=1)
        assert found["failed"][-1] == "a share: nothing, at most 1"


def test_gaps_and_steps_count_where_they_share_time_with_what_is_looked_at() -> None:
    """Whole ones and those across either end; every request has gaps of its own."""
    from gpu import memory_contraction, memory_marks

    spans = [(0.0, 2.0), (2.0, 3.0), (3.0, 5.0), (5.0, 6.0)]
    assert memory_contraction.overlapping(spans, (1.0, 4.0)) == [2.0, 1.0, 2.0]
    assert memory_contraction.within(spans, (1.0, 4.0)) == [1.0]
    tokens = [(0.0, 1), (0.0, 2), (2.0, 1), (3.0, 2), (4.0, 1), (9.0, 2)]
    seen = memory_contraction.Contraction.__new__(memory_contraction.Contraction)
    seen.tokens = tokens
    assert seen.gaps(1.0, 3.5) == {1: [2.0, 2.0], 2: [3.0, 6.0]}
    assert seen.gaps(2.0, 2.5) == {1: [2.0], 2: [3.0]}
    names = ["before_work", "before_answer", "before_work", "mid_load", "before_verify"]
    marks = [(float(at), f"agent.{name}") for at, name in enumerate(names)]
    assert memory_marks.copying(marks) == (2.0, 4.0)


def test_an_interruption_ends_with_130(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C is no error to be traced."""
    import gpu_memory
    from gpu import memory_remap

    def interrupted(options: object) -> dict[str, object]:
        raise KeyboardInterrupt

    monkeypatch.setattr(memory_remap, "measure", interrupted)
    assert gpu_memory.main(["--tiny", f"--out={tmp_path}", "--sections=remap"]) == 130


@pytest.mark.parametrize("flag", ["--capped-gammas=1", "--cycles=3", "--sections=reload,none"])
def test_what_would_give_no_figure_is_refused(
    tmp_path: Path, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Arms without their baseline, too few cycles for a line, and unknown sections."""
    import gpu_memory

    with pytest.raises(SystemExit) as ended:
        gpu_memory.main(["--tiny", f"--out={tmp_path}", flag])
    assert ended.value.code == 2
    assert flag.split("=")[0].strip("-").split("-")[0] in capsys.readouterr().err
