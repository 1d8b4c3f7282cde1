"""An agent as a process, and pools for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_process import start_agent
from memory_worker import PoolStub


@pytest.fixture(scope="module")
def shm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of this module's pools."""
    return tmp_path_factory.mktemp("shm")


@pytest.fixture(scope="module")
def agent(shm: Path) -> Iterator[str]:
    """The address of an agent that several tests use in turn."""
    command, address = start_agent(shm)
    with command:
        yield address


@pytest.fixture
def pool(shm: Path) -> Iterator[PoolStub]:
    """A fresh pool."""
    stub = PoolStub(shm)
    yield stub
    stub.close()
