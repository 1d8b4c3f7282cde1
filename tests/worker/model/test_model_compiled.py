"""The compiled build: made once, taken from the cache, exact like the eager one."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from model_driver import Driver, count_differences, random_sequences
from tiny import TinyModels

from nightjar.errors import ConfigError
from worker.config import WorkerConfig
from worker.model.build import build_models, compile_build
from worker.model.compiled import discard_damaged, is_built

CONFIG = WorkerConfig(num_blocks=64, dtype="float32", num_threads=1)


def silent(stage: str, detail: str) -> None:
    """Progress that nobody reads."""


def test_compiled_without_a_cache_is_refused(tiny: TinyModels, tmp_path: Path) -> None:
    """An empty cache is refused with the command that fills it; auto then starts eagerly."""
    config = dataclasses.replace(CONFIG, cache_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="nightjar compile"):
        build_models(dataclasses.replace(config, build="compiled"), tiny.target, None, silent)
    models = build_models(config, tiny.target, None, silent)
    models.close()
    assert models.build == "eager"


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling needs a C++ compiler")
def test_compiled_build_is_exact_and_cached(tiny: TinyModels, tmp_path: Path) -> None:
    """One graph serves every size with equal bits; a draft is dropped and restored under it."""
    config = dataclasses.replace(CONFIG, cache_dir=str(tmp_path), shm_dir=str(tmp_path))
    assert compile_build(config, tiny.target, tiny.noisy, silent) == "exact"
    models = build_models(config, tiny.target, tiny.noisy, silent)
    try:
        assert (models.build, models.arithmetic) == ("compiled", "exact")
        sequences = random_sequences(models.target.vocab_size, [80, 45, 33])
        for forward in (models.target, models.draft):
            assert forward is not None
            driver = Driver(forward, sequences, CONFIG.num_blocks)
            assert count_differences(driver, prefill=12, trials=3)[0] == 0
        assert models.draft is not None
        before = driver.one_by_one(0, 60)
        models.draft.drop()
        models.draft.restore()
        assert torch.equal(driver.one_by_one(0, 60), before)
        eager = build_models(
            dataclasses.replace(config, build="eager"), tiny.target, tiny.noisy, silent
        )
        close = Driver(eager.target, sequences, CONFIG.num_blocks).one_by_one(0, 60)
        mine = Driver(models.target, sequences, CONFIG.num_blocks).one_by_one(0, 60)
        eager.close()
        torch.testing.assert_close(mine, close, rtol=1e-4, atol=1e-4)
        assert eager.fingerprint != models.fingerprint
    finally:
        models.close()
    check_damage(config, tiny)


def check_damage(config: WorkerConfig, tiny: TinyModels) -> None:
    """A build that was used is whole; damaged, it is not loaded, and what is left of it goes."""
    # Of a copy: this process has mapped the libraries, and ends if what it mapped is cut.
    cache = Path(config.cache_dir).with_name("copied")
    shutil.copytree(config.cache_dir, cache)
    config = dataclasses.replace(config, cache_dir=str(cache))
    (folder,) = (cache / "builds").iterdir()  # target and draft are of one configuration
    assert is_built(cache, folder.name)
    for victim in (*sorted(folder.rglob("*.so"))[:2], folder / "complete.json"):
        whole = victim.read_bytes()
        for damage in (whole[: len(whole) // 2], bytes(len(whole)), b""):
            victim.write_bytes(damage)
            assert not is_built(cache, folder.name)
        with pytest.raises(ConfigError, match="nightjar compile"):
            build_models(dataclasses.replace(config, build="compiled"), tiny.target, None, silent)
        victim.write_bytes(whole)
        assert is_built(cache, folder.name)
    discard_damaged(cache, folder.name)
    assert folder.exists()
    next(folder.rglob("*.so")).unlink()
    discard_damaged(cache, folder.name)
    assert not folder.exists()
