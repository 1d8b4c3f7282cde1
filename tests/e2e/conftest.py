"""The whole system under `nightjar up`: real processes, a real store, a tiny model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from whole_system import Start, System


@pytest.fixture(scope="session")
def flags(tiny: object) -> tuple[str, ...]:
    """Of `nightjar up`, for the tiny models and free ports."""
    ports = ("--http-listen=127.0.0.1:0", "--grpc-listen=127.0.0.1:0")
    worker = ("--", f"--draft={tiny.noisy}", "--served-model-name=tiny", "--num-blocks=256")  # type: ignore[attr-defined]
    return (*ports, f"--model={tiny.target}", *worker)  # type: ignore[attr-defined]


@pytest.fixture(scope="session")
def system(flags: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """One system for the tests that leave it running."""
    with System(tmp_path_factory.mktemp("up"), *flags) as running:
        yield running.ready()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts systems of the test's own; what is left of them is killed at the end."""
    running: list[System] = []

    def run(*flags: str) -> System:
        running.append(System(tmp_path / str(len(running)), *flags))
        return running[-1]

    yield run
    for one in running:
        one.__exit__(*sys.exc_info())
