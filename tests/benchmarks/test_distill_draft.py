"""Distilling a draft: text is the target's own, training brings the draft nearer, and is judged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import tiny_folder

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the benchmark's modules be found, as its own folder does when it is run."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_a_draft_learns_from_what_its_target_wrote(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows have their length and differ; the divergence falls on those held out."""
    import distill_draft

    target = tiny_folder(tmp_path, "target")
    draft = tiny_folder(tmp_path, "noisy", noise=0.4)
    flags = [f"--out={tmp_path / 'out'}", f"--model={target}", "--device=cpu", "--seed=3"]
    engine = ["--flag=dtype=float32", "--flag=build=eager", "--flag=num-threads=1"]
    engine += ["--flag=arithmetic=free", "--rows=12", "--length=24"]
    assert distill_draft.main(["write", *flags, *engine, "--seconds=0.2"]) == 0
    rows = load_file(tmp_path / "out" / "rows.safetensors")
    assert rows["tokens"].shape[1] == 24
    assert len(rows["tokens"].unique(dim=0)) == len(rows["tokens"]) >= 12
    assert 0 <= int(rows["tokens"].min()) <= int(rows["tokens"].max()) < 320
    capsys.readouterr()
    learn = ["--seconds=1.5", "--batch=8", "--lr=0.01", f"--init={draft}"]
    assert distill_draft.main(["train", *flags, *learn]) == 0
    words = capsys.readouterr().err.strip().splitlines()[-1].split()
    before, after = float(words[-4]), float(words[-2])
    assert after < 0.8 * before
    trained = load_file(tmp_path / "out" / "draft" / "model.safetensors")
    assert trained["model.embed_tokens.weight"].dtype == torch.bfloat16


def test_only_a_better_draft_ships() -> None:
    """Better on the mean at every temperature, and nowhere worse by more than a little."""
    from distill_draft import is_better

    before = {"0": {"qa": 2.0, "math": 3.0}, "0.8": {"qa": 1.5, "math": 2.0}}

    def after(**changes: float) -> dict[str, dict[str, float]]:
        return {at: {**own, **changes} for at, own in before.items()}

    assert is_better({"before": before, "after": after(qa=2.2)})
    assert not is_better({"before": before, "after": before})
    worse_in_one = {"0": {"qa": 1.9, "math": 4.0}, "0.8": {"qa": 1.5, "math": 3.0}}
    assert not is_better({"before": before, "after": worse_in_one})
