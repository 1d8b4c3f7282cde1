"""The sweep of the memory agent's thresholds: it says how far it is, and how long it takes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FLAGS = ["--seconds=2", "--seeds=1", "--tau-low=0.1", "--tau-high", "0", "0.3", "--t-persist=3"]


@pytest.fixture(autouse=True)
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the benchmark's module be found, as its own folder does when it is run."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_a_sweep_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line on standard error after each setting, the table alone on standard output."""
    import memory_thresholds

    monkeypatch.setattr(sys, "argv", ["memory_thresholds.py", *FLAGS, "--hold-s=5"])
    assert memory_thresholds.main() == 0
    out, err = capsys.readouterr()
    starts = [line.partition(" settings in ")[0] for line in err.splitlines()]
    assert starts == ["1 of 3", "2 of 3", "3 of 3"]
    assert len(out.splitlines()) == 5


def test_help_says_how_long_it_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And that the table comes at the end."""
    import memory_thresholds

    monkeypatch.setattr(sys, "argv", ["memory_thresholds.py", "--help"])
    with pytest.raises(SystemExit):
        memory_thresholds.main()
    assert "takes about eight minutes of one core" in capsys.readouterr().out
