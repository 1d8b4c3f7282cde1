"""The GPU benchmark runs, on a tiny model and the CPU: every section but the peer's."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n" + "\r\n".join(
    f"2023-11-16 18:15:{second:02}.6805900,{20 + second},{5 + second}" for second in range(30)
)


@pytest.fixture
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the benchmark's modules be found, as its own folder does when it is run."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.mark.usefixtures("on_path")
def test_every_section_of_a_loaded_engine_gives_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rates, step times, shares and latencies come out, and exact answers do not differ."""
    import gpu_decode

    trace = tmp_path / "trace.csv"
    trace.write_text(TRACE)
    wanted = ["--tiny", f"--out={tmp_path}", f"--work={tmp_path / 'models'}", f"--trace={trace}"]
    assert gpu_decode.main([*wanted, "--sections=plain,bits,spec,idle,openloop"]) == 0
    found = json.loads((tmp_path / "gpu_decode.json").read_text())
    assert all(cell["tok_s"][0] > 0 for cell in found["plain"]["exact+draft"].values())
    assert found["arms"]["exact+draft"]["arithmetic"] == "exact"
    assert set(found["bits"]["exact+draft"]["differ"].values()) == {0}
    cells = found["spec"]["exact+draft"]["2"]
    assert [cells[gamma]["num_steps"] for gamma in ("0", "2")] == [4, 4]
    assert cells["0"]["tokens_per_row_step"] == 1.0
    profile = found["idle"]["exact+draft"]["2"]
    assert profile["kernels"]
    assert profile["covered_us"] > 0
    assert found["openloop"]["free"]["runs"][0]["num_first_tokens"] > 0
    shown = capsys.readouterr().out
    assert "best gamma" in shown
    assert "left out: vllm: needs --vllm-site" in shown


class PretendingArm:
    """An arm whose steps take a millisecond, and one more for each draft."""

    facts: ClassVar[dict[str, Any]] = {"can_pretend": True}

    def run(self, **job: Any) -> dict[str, Any]:
        """A steady job."""
        step_ms = 1.0 + job["gamma"]
        return {"step_ms": step_ms, "tok_s": 1000.0 * job["count"], "length": job["length"]}


@pytest.mark.usefixtures("on_path")
@pytest.mark.parametrize("gammas", ["0", "2", "0,2"])
def test_made_up_acceptance_runs_in_cells_that_were_measured(tmp_path: Path, gammas: str) -> None:
    """Without one of the usual cells, or without drafts, the others count; no step is lost."""
    from gpu import sections
    from gpu.decode_options import parsed

    flags = ["--tiny", f"--out={tmp_path}", "--batches=1,4", f"--gammas={gammas}", "--repeats=3"]
    options = parsed([*flags, "--tokens=64", "--context=100"], None)
    results: dict[str, Any] = {}
    sections.spec(PretendingArm(), "exact+draft", options, results, lambda _: None)
    assert results["spec"]["exact+draft"]["4"].keys() == set(gammas.split(","))
    assert next(iter(results["spec"]["exact+draft"]["4"].values()))["length"] == 130
    assert len(results.get("synthetic", {})) == (0 if gammas == "0" else 1)


@pytest.mark.usefixtures("on_path")
def test_what_no_arm_can_measure_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A section that no wanted arm has, and a cell that no batch is, are named."""
    import gpu_decode

    where = ["--tiny", f"--out={tmp_path}"]
    assert gpu_decode.main([*where, "--sections=spec", "--arms=exact"]) == 1
    assert "spec: runs on exact+draft or free+draft alone" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        gpu_decode.main([*where, "--cells=7"])
    assert "--cells=7 is none of --batches" in capsys.readouterr().err


@pytest.mark.slow
def test_clients_of_a_worker_get_all_their_tokens(tmp_path: Path) -> None:
    """The section with processes: a worker, its clients, and the same load in process."""
    script = str(BENCHMARKS / "gpu_decode.py")
    command = [sys.executable, script, "--tiny", "--sections=serve", f"--out={tmp_path}"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found = json.loads((tmp_path / "gpu_decode.json").read_text())["serve"]
    assert found["served"][0] > 0
    assert found["in process"][0] > 0


def test_without_a_gpu_a_sentence_says_so(tmp_path: Path) -> None:
    """Nothing is loaded where nothing can run."""
    script = str(BENCHMARKS / "gpu_decode.py")
    environ = {"CUDA_VISIBLE_DEVICES": "", "PATH": ""}
    ran = subprocess.run(
        [sys.executable, script, f"--out={tmp_path}"],
        capture_output=True,
        text=True,
        env=environ,
        check=False,
    )
    assert ran.returncode == 2
    assert "no GPU is visible" in ran.stderr


@pytest.mark.usefixtures("on_path")
def test_gaps_and_overlaps_of_spans_are_told_apart() -> None:
    """Overlapping work counts once; a long gap is a wait, a short one is not."""
    from gpu.kernels import summarise

    spans = [(0.0, 4.0, "a"), (2.0, 4.0, "b"), (7.0, 1.0, "a"), (58.0, 2.0, "b")]
    found = summarise(spans, 2)
    assert (found["covered_us"], found["short_gaps_us"], found["waits_us"]) == (4.5, 0.5, 25.0)
    assert found["kernels"][0] == {"name": "b", "us_per_step": 3.0, "calls_per_step": 1.0}


@pytest.mark.usefixtures("on_path")
def test_the_search_finds_the_rate_and_percentiles_are_ranks() -> None:
    """The highest passing rate is met closely; one late answer in a hundred is allowed."""
    from gpu.load import Latencies, arrivals, highest_rate, percentile

    assert 19.0 < highest_rate(lambda rate: rate <= 20.0, start=12.0, runs=8) <= 20.0
    assert 2.9 < highest_rate(lambda rate: rate <= 3.0, start=12.0, runs=12) <= 3.0
    assert percentile([1.0, 2.0, 3.0, 4.0], 50) == 2.0
    assert math.isnan(percentile([], 99))
    found = arrivals([(0.0, 9, 3), (1.0, 99, 40), (9.0, 5, 5)], rate=2.0, seconds=1.0, max_len=50)
    assert found == [(0.0, 9, 3), (1.0, 25, 25)]
    times = Latencies([0.0] * 100, 1.0)
    for index in range(99):
        times.add(index, 1, 0.5)
    assert not times.failed(2.0)  # one is still awaited, late already
    times.add(99, 1, 2.0)
    assert times.summary(2.0)["passed"]
    times.last[0] = 9.0
    assert times.summary(9.0)["ttft_p99_s"] == 0.5


@pytest.mark.usefixtures("on_path")
def test_expected_tokens_follow_the_geometric_sum() -> None:
    """Acceptance one gives every token, zero gives one; rates follow from measured steps."""
    from gpu.tables import computed, tokens_per_step

    assert tokens_per_step(1.0, 3) == 4.0
    assert tokens_per_step(0.0, 3) == 1.0
    assert tokens_per_step(0.7, 2) == pytest.approx((1 - 0.7**3) / 0.3)
    cells = {"8": {"0": {"step_ms": 4.0}, "1": {"step_ms": 5.0}}}
    assert computed(cells, "8", 0.5) == {0: 2000.0, 1: pytest.approx(2400.0)}
