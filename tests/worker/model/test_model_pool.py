"""The pool's files, layout and what is left behind; configurations that cannot be kept."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny import TinyModels

from memory_agent.layout import ArenaLayout
from nightjar.errors import ConfigError
from worker.config import WorkerConfig
from worker.model.build import build_models
from worker.model.pool import Arena, KVCache, KVGeometry, image_size, move_into, sweep_stale_files

CONFIG = WorkerConfig(num_blocks=8, dtype="float32", num_threads=1, build="eager")
LAYOUT = ArenaLayout(block_bytes=8192, draft_block_bytes=512, image_bytes=5000, num_base_blocks=4)
_CRASH = """
import os, sys
from memory_agent.layout import ArenaLayout
from worker.model.pool import Arena
layout = ArenaLayout(block_bytes=8192, draft_block_bytes=512, image_bytes=5000, num_base_blocks=4)
arena = Arena(layout, sys.argv[1])
arena.write_image()
os.kill(os.getpid(), 9)
"""


def silent(stage: str, detail: str) -> None:
    """Progress that nobody reads."""


def test_strips_and_rows_are_the_same_bytes() -> None:
    """A token's row of a layer lies in the strip that its block and head name."""
    geometry = KVGeometry(
        num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, block_size=16, dtype=torch.float32
    )
    memory = torch.zeros(5 * geometry.block_bytes, dtype=torch.uint8)
    whole = memory.view(torch.float32).view(5, 3, 2, 2, 16, 8)
    cache = KVCache(memory, geometry, 5)
    whole[4, 1, 1, 0, 7] = 1.5  # block 4, layer 1, V, head 0, offset 7
    strip = 4 * 3 * 2 * 2 + 2
    assert (cache.strips[1][strip].view(16, 8)[7] == 1.5).all()
    assert (cache.rows[1][strip * 16 + 7] == 1.5).all()
    assert cache.strips[1].view(-1).count_nonzero() == 8


def test_tied_tensors_share_their_place_in_the_image() -> None:
    """Tensors move into the image as they are; tied ones take one place."""
    first, second = torch.arange(5.0), torch.ones(3, dtype=torch.bfloat16)
    tied = first.view(5)
    memory = torch.zeros(image_size([first, second, tied]), dtype=torch.uint8)
    assert len(memory) == 128
    move_into([first, second, tied], memory)
    assert torch.equal(first, torch.arange(5.0))
    assert first.data_ptr() == tied.data_ptr() == memory.data_ptr()
    assert second.data_ptr() == memory.data_ptr() + 64
    memory.zero_()
    assert (first == 0).all()


def test_close_leaves_nothing(tmp_path: Path) -> None:
    """Both files are gone after close, and closing twice does no harm."""
    arena = Arena(LAYOUT, str(tmp_path))
    arena.write_image()
    assert len(list(tmp_path.iterdir())) == 2
    arena.close()
    arena.close()
    assert list(tmp_path.iterdir()) == []


def test_killed_workers_files_are_swept(tmp_path: Path) -> None:
    """A killed worker's files go at the next start; a living one's and others' stay."""
    subprocess.run([sys.executable, "-c", _CRASH, str(tmp_path)], check=False, timeout=120)
    dead = {path.name for path in tmp_path.iterdir()}
    assert len(dead) == 2
    (tmp_path / "nightjar-other").touch()
    arena = Arena(LAYOUT, str(tmp_path))
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {Path(arena.path).name, "nightjar-other"}
    assert sweep_stale_files(str(tmp_path)) == []
    arena.close()


def test_a_locked_file_is_not_swept(tmp_path: Path) -> None:
    """A file whose lock is held stays even where its process id is not known here."""
    arena = Arena(LAYOUT, str(tmp_path))
    foreign = tmp_path / f"nightjar-{2**22 + 1}-arena-0"  # above any process id
    os.link(arena.path, foreign)
    assert sweep_stale_files(str(tmp_path)) == []
    arena.close()
    assert sweep_stale_files(str(tmp_path)) == [foreign.name]


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    """A pool's folder that has gone meanwhile is a sentence that names the flag."""
    with pytest.raises(ConfigError, match=r"^--shm-dir='.*/gone': is not a folder$"):
        Arena(LAYOUT, str(tmp_path / "gone"))


def test_a_worker_without_a_draft_shares_nothing(tiny: TinyModels, tmp_path: Path) -> None:
    """Without a draft there is no pool to give back and no shared file."""
    config = dataclasses.replace(CONFIG, shm_dir=str(tmp_path))
    models = build_models(config, tiny.target, None, silent)
    assert (models.pool, models.draft, models.draft_identity) == (None, None, "")
    assert list(tmp_path.iterdir()) == []
    assert models.eos_token_ids == (2,)
    models.close()


def test_pool_describes_the_files(tiny: TinyModels, tmp_path: Path) -> None:
    """What the agent is told is what lies on disk; close unlinks it."""
    config = dataclasses.replace(CONFIG, shm_dir=str(tmp_path))
    models = build_models(config, tiny.target, tiny.noisy, silent)
    pool, layout = models.pool, models.layout
    assert pool is not None
    assert Path(pool.arena_path).stat().st_size == pool.arena_bytes == layout.num_bytes
    image = Path(pool.image_path).read_bytes()
    start = pool.image_offset
    assert len(image) == pool.image_bytes
    assert image == Path(pool.arena_path).read_bytes()[start : start + len(image)]
    assert models.target_identity != models.draft_identity
    models.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_model_len": 4096}, "--max-model-len=4096: the model was made for 512"),
        ({"num_blocks": 10**9}, "--shm-dir=.*no room"),
    ],
)
def test_flags_that_do_not_fit_are_refused(
    tiny: TinyModels, tmp_path: Path, change: dict[str, int], words: str
) -> None:
    """A flag that does not fit model or machine is a sentence with key and value."""
    config = dataclasses.replace(CONFIG, shm_dir=str(tmp_path), **change)
    with pytest.raises(ConfigError, match=words):
        build_models(config, tiny.target, tiny.target, silent)
    assert list(tmp_path.iterdir()) == []
