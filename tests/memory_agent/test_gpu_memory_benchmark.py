"""The benchmark of elastic memory runs, on tiny models and the CPU, with a real agent beside it."""

from __future__ import annotations

import json
from pathlib import Path

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


def test_steps_around_a_reload_and_the_arms_of_a_capped_pool(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Blocks move, the draft comes back, every arm answers alike, and figures come out."""
    found = run(tmp_path, "--sections=reload,capped")
    cycle = found["reload"]["cycles"][0]  # type: ignore[index]
    assert cycle["blocks_in_tail"] > 0
    assert sum(cycle["blocks_moved"]) == cycle["blocks_in_tail"]
    assert found["reload"]["step_before_ms"] > 0  # type: ignore[operator]
    capped = found["capped"]
    assert capped["answers_are_equal"] is True
    arms = capped["arms"]
    elastic = ["elastic", "weights alone", "draft KV alone", "no draft"]
    assert list(arms) == ["resident", "resident, gamma 1", *elastic]  # type: ignore[call-overload]
    assert arms["elastic"]["num_expansions"] >= 1  # type: ignore[index]
    assert arms["no draft"]["mean_rows"] > arms["resident"]["mean_rows"]  # type: ignore[index]
    shown = capsys.readouterr().out
    assert "who has which part" in shown
    assert "at most 1.05" in shown


@pytest.mark.slow
def test_cycles_and_rates(tmp_path: Path) -> None:
    """Answers stay, all drafts are accepted again after each reload, and nothing is left behind."""
    found = run(tmp_path, "--sections=remap,death,cycles")
    cycles = found["cycles"]
    assert (cycles["num_wrong"], cycles["least_acceptance_share"]) == (0, 1.0)
    assert cycles["num_contractions"] >= 4  # type: ignore[operator]
    assert found["remap"]["default"]["share"] > 0  # type: ignore[index]
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
