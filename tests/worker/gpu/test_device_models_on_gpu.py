"""Whole forwards on a GPU: bits that no batch changes, free arithmetic as the control."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from model_driver import Driver, count_differences, random_sequences
from tiny import TinyModels
from transformers import Qwen2Config

from worker.config import WorkerConfig
from worker.gpu.forward import DeviceForward
from worker.model.build import Models, build_models
from worker.model.proof import prove_exact

pytestmark = pytest.mark.gpu
NUM_BLOCKS = 160
CONFIG = WorkerConfig(
    device="cuda",
    num_blocks=NUM_BLOCKS,
    max_num_seqs=24,
    max_num_batched_tokens=512,
    max_catchup_tokens=256,
)


def silent(stage: str, detail: str) -> None:
    """Progress that nobody reads."""


def made(config: WorkerConfig, target: Path, draft: Path | None = None) -> Iterator[Models]:
    """Models that are closed afterwards."""
    models = build_models(config, target, draft, silent)
    yield models
    models.close()
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Builds and choices of this module."""
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration with the widths of 7B parameters, and two layers."""
    folder = tmp_path_factory.mktemp("wide")
    Qwen2Config(
        vocab_size=32064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=2,
        num_attention_heads=28,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        dtype="bfloat16",
    ).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("dtype", "build"),
    [
        ("bfloat16", "eager"),
        ("bfloat16", "auto"),
        ("float16", "eager"),
        ("float32", "eager"),
    ],
)
def test_tiny_logits_do_not_depend_on_batch(
    tiny: TinyModels, cache: str, dtype: str, build: str
) -> None:
    """Target and draft give a position the same bits in every chunking, batch and width."""
    config = dataclasses.replace(CONFIG, dtype=dtype, build=build, cache_dir=cache)
    for models in made(config, tiny.target, tiny.noisy):
        assert (models.arithmetic, models.arithmetic_reason) == ("exact", "proved at start")
        assert models.build == ("eager" if build == "eager" else "compiled")
        for forward in (models.target, models.draft):
            assert isinstance(forward, DeviceForward)
            sequences = random_sequences(forward.vocab_size, [90, 75, 33, 340, 61, 20])
            driver = Driver(forward, sequences, NUM_BLOCKS)
            different, compared = count_differences(driver, prefill=12, trials=2)
            assert (different, compared > 800) == (0, True)


def test_a_second_start_has_the_same_bits(tiny: TinyModels, cache: str) -> None:
    """What is cached, the compiled build and the choice of products, keeps the fingerprint."""
    config = dataclasses.replace(CONFIG, dtype="bfloat16", cache_dir=cache)
    prints = [m.fingerprint for _ in range(2) for m in made(config, tiny.target)]
    prints += [m.fingerprint for m in made(dataclasses.replace(config, build="eager"), tiny.target)]
    assert prints[0] == prints[1] != prints[2]


@pytest.mark.parametrize("build", ["eager", "auto"])
def test_wide_logits_do_not_depend_on_batch(wide: Path, cache: str, build: str) -> None:
    """At the widths of 7B parameters no bit differs; under free arithmetic some do."""
    config = dataclasses.replace(CONFIG, load_format="dummy", build=build, cache_dir=cache)
    for models in made(config, wide):
        target = models.target
        assert isinstance(target, DeviceForward)
        assert (models.arithmetic, models.dtype) == ("exact", "bfloat16")
        sequences = random_sequences(target.vocab_size, [150, 300, 33, 90, 61, 20, 520])
        driver = Driver(target, sequences, NUM_BLOCKS)
        different, compared = count_differences(driver, prefill=18, trials=2)
        assert (different, compared > 1500) == (0, True)

        target.set_free()
        few = Driver(target, sequences[:3], NUM_BLOCKS)
        assert count_differences(few, prefill=18, trials=1)[0] > 0
        problem = prove_exact(target, max_num_seqs=CONFIG.max_num_seqs, budget_s=0)
        assert problem is not None
        assert "gives other bits" in problem


def test_float32_logits_are_those_of_the_cpu(tiny: TinyModels, cache: str) -> None:
    """The device's forward computes what the CPU's does, in full precision."""
    config = dataclasses.replace(CONFIG, dtype="float32", build="eager", cache_dir=cache)
    sequences = random_sequences(320, [280, 40])
    parts = [(0, 0, 280), (1, 0, 40)]
    logits = []
    for device in ("cpu", "cuda"):
        for models in made(dataclasses.replace(config, device=device), tiny.target):
            driver = Driver(models.target, sequences, NUM_BLOCKS)
            driver.fill_with_nan()
            logits.append(torch.cat(driver.run(parts)))
    assert (logits[0] - logits[1]).abs().max() <= 1e-4 * logits[0].abs().max()


def test_the_pool_takes_its_share(tiny: TinyModels, cache: str) -> None:
    """Without sizes the pool takes its share of what is free, draft halves included."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    config = dataclasses.replace(
        CONFIG, num_blocks=0, gpu_memory_share=0.3, build="eager", dtype="bfloat16", cache_dir=cache
    )
    for models in made(config, tiny.target, tiny.noisy):
        assert 0.02 * free < models.layout.num_bytes < 0.3 * free
        assert models.pool is None


def test_dummy_weights_are_seeded(wide: Path, cache: str) -> None:
    """Random weights are the same at every start, and a draft may have them too."""
    config = dataclasses.replace(
        CONFIG, load_format="dummy", build="eager", arithmetic="free", cache_dir=cache
    )
    logits = []
    for models in made(config, wide, wide):
        for forward in (models.target, models.draft):
            assert forward is not None
            driver = Driver(forward, random_sequences(32064, [40]), NUM_BLOCKS)
            logits.append(driver.run([(0, 0, 40)])[0])
    assert torch.equal(logits[0], logits[1])
    assert not logits[0].isnan().any()
