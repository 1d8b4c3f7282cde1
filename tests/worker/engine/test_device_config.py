"""What 0 and "auto" stand for on a CPU and on a GPU, and what a GPU does not do yet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nightjar.config import parse
from nightjar.errors import ConfigError
from worker import config as config_module
from worker.config import WorkerConfig, find_device, resolved
from worker.engine.limits import check_config, max_model_len
from worker.model.device import CPU, Placement, place, resolve_dtype


def sizes(config: WorkerConfig) -> tuple[int, int, int, int]:
    """What depends on the device."""
    return (
        config.max_num_seqs,
        config.max_num_batched_tokens,
        config.max_catchup_tokens,
        config.kv_mb,
    )


def test_zero_takes_the_devices_size() -> None:
    """Sizes of 0 become the device's; given ones stay, and resolving twice changes nothing."""
    assert sizes(resolved(WorkerConfig(device="cpu"))) == (16, 256, 256, 256)
    assert sizes(resolved(WorkerConfig(device="cuda"))) == (256, 2048, 1024, 0)
    given = resolved(WorkerConfig(device="cuda", max_num_seqs=3, kv_mb=7))
    assert sizes(given) == (3, 2048, 1024, 7)
    assert resolved(given) == given


@pytest.mark.parametrize(
    ("nodes", "visible", "library", "device"),
    [
        (True, None, True, "cuda"),
        (True, "", True, "cpu"),
        (True, "-1", True, "cpu"),
        (True, "1", True, "cuda"),
        (True, None, False, "cpu"),
        (False, None, True, "cpu"),
    ],
)
def test_auto_takes_a_gpu_that_torch_can_use(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    nodes: bool,
    visible: str | None,
    library: bool,
    device: str,
) -> None:
    """A GPU must be there, visible, and torch be built for it."""
    if nodes:
        (tmp_path / "nvidia0").touch()
    (tmp_path / "nvidiactl").touch()
    (tmp_path / "lib").mkdir()
    if library:
        (tmp_path / "lib" / "libtorch_cuda.so").touch()
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    class Spec:
        submodule_search_locations = (str(tmp_path),)

    own = Path
    monkeypatch.setattr(
        config_module, "Path", lambda name: tmp_path if name == "/dev" else own(name)
    )
    monkeypatch.setattr(config_module.importlib.util, "find_spec", lambda name: Spec)
    assert find_device() == device
    assert resolved(WorkerConfig()).device == device


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"device": "cpu", "dtype": "float16"}, "--dtype='float16': runs on a GPU only"),
        (
            {"device": "cpu", "max_num_seqs": 300},
            "--max-num-batched-tokens=256: must be at least --max-num-seqs=300",
        ),
    ],
)
def test_what_a_device_does_not_do_is_refused(fields: dict[str, Any], sentence: str) -> None:
    """Flags that the device cannot keep are sentences before anything is loaded."""
    with pytest.raises(ConfigError, match=sentence):
        check_config(WorkerConfig(**fields))


def test_what_a_gpu_does_passes() -> None:
    """The same flags are fine where they can be kept."""
    check_config(WorkerConfig(device="cuda", dtype="float16", max_num_seqs=300))


@pytest.mark.parametrize(
    ("flag", "sentence"),
    [
        ("--max-num-batched-tokens=1", "at least 2, or 0"),
        ("--max-model-len=1", "at least 2, or 0"),
        ("--gpu-memory-share=0", "above 0, at most 1"),
        ("--gpu-memory-share=1.5", "above 0, at most 1"),
        ("--device=tpu", "auto, cpu, cuda"),
        ("--load-format=pickle", "safetensors, dummy"),
    ],
)
def test_limits_are_told(flag: str, sentence: str) -> None:
    """A flag outside its limits is refused with what it may be."""
    with pytest.raises(ConfigError, match=sentence):
        parse(WorkerConfig, [flag], prog="test", description="")


def test_the_pools_flag_is_named() -> None:
    """A row that does not fit names the flag that the pool's size comes from."""
    config = WorkerConfig(device="cuda", max_model_len=600)
    with pytest.raises(ConfigError, match=r"--gpu-memory-share=0\.85: holds 320 tokens"):
        max_model_len(config, 1024, 20)


def test_dtype_follows_the_checkpoint_on_a_gpu() -> None:
    """On a GPU auto is the checkpoint's dtype; where it names none that is served, bfloat16."""
    gpu = Placement(torch.device("cuda"), kernels=True)
    assert resolve_dtype("auto", gpu, torch.float16) == torch.float16
    assert resolve_dtype("auto", gpu, torch.float64) == torch.bfloat16
    assert resolve_dtype("auto", gpu, None) == torch.bfloat16
    assert resolve_dtype("float32", gpu, torch.float16) == torch.float32
    assert resolve_dtype("auto", CPU, torch.float16) in (torch.float32, torch.bfloat16)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    """An explicit GPU is never silently a CPU."""
    assert place("cpu") == CPU
    with pytest.raises(ConfigError, match="--device='cuda': torch finds no GPU"):
        place("cuda")


def test_a_gpu_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentence names the GPU and says what runs instead."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Old One")
    with pytest.raises(ConfigError, match=r"Old One is older .* 8\.0; say --device=cpu"):
        place("cuda")
