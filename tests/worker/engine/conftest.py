"""Tiny models as the worker builds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_bench import Bench

from worker.config import WorkerConfig
from worker.model.build import Models, build_models


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Models]]:
    """Builds models once per target, draft and flags; their pools are full of NaN at first."""
    built: dict[object, Models] = {}
    threads = torch.get_num_threads()
    shm = str(tmp_path_factory.mktemp("shm"))

    def make(target: Path, draft: Path | None, **flags: Any) -> Models:
        key = (target, draft, *sorted(flags.items()))
        if key not in built:
            config = WorkerConfig(
                **{
                    "dtype": "float32",
                    "arithmetic": "exact",
                    "build": "eager",
                    "num_threads": 1,
                    "num_blocks": 24,
                    "max_model_len": 200,
                    "shm_dir": shm,
                    "proposer": "none" if draft is None else "draft_model",
                    **flags,
                }
            )
            models = built[key] = build_models(config, target, draft, lambda *_: None)
            layout = models.layout
            halves = layout.num_base_blocks * layout.draft_block_bytes
            kv = models.arena.memory[: layout.tail_offset + halves]
            kv.view(torch.float32).fill_(float("nan"))
        return built[key]

    yield make
    for models in built.values():
        models.close()
    torch.set_num_threads(threads)


@pytest.fixture(params=["depth 0", "depth 1, eager", "depth 1, late"])
def every_depth(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the loop promises holds at both depths."""
    monkeypatch.setattr(Bench, "mode", request.param)
