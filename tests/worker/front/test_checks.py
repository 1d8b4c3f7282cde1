"""A worker's wrong flags are told before it says that it listens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nightjar.errors import ConfigError
from worker.config import WorkerConfig
from worker.front.checks import check_flags
from worker.main import main


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--planner=nowhere"], "--planner='nowhere': must be HOST:PORT or unix:PATH"),
        (["--planner=http://host:1"], "--planner='http://host:1': must be HOST:PORT"),
        (["--memory-agent=host"], "--memory-agent='host': must be HOST:PORT or unix:PATH"),
        (["--gamma=9"], "--gamma=9: must be 0 to 5"),
        (["--gamma=2", "--planner=127.0.0.1:1"], "--gamma=2: the planner of --planner decides"),
        (["--max-num-seqs=8", "--max-num-batched-tokens=4"], "at least --max-num-seqs=8"),
        (["--device=cpu", "--dtype=float16"], "--dtype='float16': runs on a GPU only"),
        (["--num-threads=100000"], "--num-threads='100000': must be 0 to 1024"),
        (["--num-blocks=1"], "--num-blocks=1: holds 16 tokens"),
        (["--num-blocks=4", "--max-model-len=2048"], "--num-blocks=4: holds 64 tokens, less"),
        (["--shm-dir=/nowhere"], "--shm-dir='/nowhere': is not a folder"),
        (["--shm-dir=/proc"], "--shm-dir='/proc': no file can be made there"),
        (["--cache-dir=/proc/x"], "--cache-dir='/proc/x': cannot be made"),
        (["--cache-dir=/dev/null"], "--cache-dir='/dev/null': cannot be made"),
        (["--model=/nowhere"], "model '/nowhere' is no folder, no Hub id"),
        (["--model=/proc"], "model '/proc': /proc lacks config.json"),
        (["--draft=/nowhere"], "model '/nowhere' is no folder, no Hub id"),
        (["--draft=/proc"], "model '/proc': /proc lacks config.json"),
        (["--model=owner/name"], "--draft: 'owner/name' has no draft of its own"),
    ],
)
def test_wrong_flags_open_no_port(
    capsys: pytest.CaptureFixture[str], flags: list[str], sentence: str
) -> None:
    """The command ends by a sentence about the flag, and has said nothing of an address."""
    with pytest.raises(ConfigError) as caught:
        main(["--listen=127.0.0.1:0", *flags])
    assert sentence in str(caught.value)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "content",
    [{"max_position_embeddings": 512}, {"text_config": {"max_position_embeddings": 512}}],
)
def test_a_length_beyond_the_model_is_told_at_once(tmp_path: Path, content: dict[str, Any]) -> None:
    """A local folder's config.json is asked first; one that does not say so is asked later."""
    config = tmp_path / "config.json"
    (tmp_path / "tokenizer.json").touch()
    fields: dict[str, Any] = {
        "model": str(tmp_path),
        "proposer": "none",
        "load_format": "dummy",
        "device": "cpu",
    }
    config.write_text(json.dumps(content))
    check_flags(WorkerConfig(max_model_len=512, **fields))
    with pytest.raises(ConfigError, match="--max-model-len=513: the model was made for 512"):
        check_flags(WorkerConfig(max_model_len=513, **fields))
    config.write_text("{}")
    check_flags(WorkerConfig(max_model_len=513, **fields))


def test_a_converted_alias_is_asked_too(smollm2: Path) -> None:
    """The default model's own length is known once it was converted."""
    check_flags(WorkerConfig(max_model_len=8192, device="cpu"))
    with pytest.raises(ConfigError, match="--max-model-len=8193: the model was made for 8192"):
        check_flags(WorkerConfig(max_model_len=8193, device="cpu"))


def test_what_may_yet_come_is_waited_for() -> None:
    """Peers that are not there and a model of the Hub are no wrong flags."""
    peers = {"planner": "127.0.0.1:1", "memory_agent": "unix:/nowhere/agent.sock"}
    check_flags(WorkerConfig(model="owner/name", draft="owner/draft", **peers))  # type: ignore[arg-type]
