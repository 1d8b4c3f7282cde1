"""Fixtures shared by all tests: tiny models, the default model, a real store."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from store_server import StoreServer

if TYPE_CHECKING:
    from tiny import TinyModels

# As the worker package does, for tests that load torch before it.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
# Without a GPU, kernels run in Triton's interpreter, which is chosen when triton is imported.
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    """A tiny target, a noisy copy and other weights, with one tokenizer."""
    from tiny import TinyModels, tiny_folder  # only here: it loads torch

    root = tmp_path_factory.mktemp("tiny")
    return TinyModels(*(tiny_folder(root, kind) for kind in ("target", "noisy", "random")))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model's folder; downloaded and converted once into the cache folder."""
    from worker.model.fetch import cache_folder, resolve_model

    cache = cache_folder(os.environ.get("NIGHTJAR_CACHE_DIR", ""))
    return resolve_model("smollm2-135m", cache, print)


@pytest.fixture
def store_server() -> Iterator[StoreServer]:
    """A fresh store server; `kill` and `start` in turn restart it with what it stored."""
    server = StoreServer()
    server.start()
    yield server
    server.close()


@pytest.fixture
def store(store_server: StoreServer) -> str:
    """The URL of a fresh store server."""
    return store_server.url
