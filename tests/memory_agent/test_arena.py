"""Shared files: what may be mapped, and who holds them."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from memory_agent.arena import SharedFile, is_written_elsewhere
from nightjar.errors import ConfigError


@pytest.fixture
def made(tmp_path: Path) -> Iterator[SharedFile]:
    """A file of two pages as a worker makes it."""
    shared = SharedFile(str(tmp_path / "arena"), 8192, create=True)
    yield shared
    shared.close()


def test_both_sides_see_the_same_bytes(made: SharedFile) -> None:
    """What one side writes the other reads; only the maker unlinks."""
    other = SharedFile(made.path, 8192, create=False)
    other.memory[5:8] = b"abc"
    assert made.memory[5:8] == b"abc"
    other.close()
    assert os.path.exists(made.path)


def test_a_writer_holds_the_file_until_it_unmaps(made: SharedFile) -> None:
    """The owner can tell whether somebody else writes, and nobody writes beside another."""
    assert not is_written_elsewhere(made.path)
    writer = SharedFile(made.path, 8192, create=False)
    assert is_written_elsewhere(made.path)
    with pytest.raises(ValueError, match="still mapped for writing"):
        SharedFile(made.path, 8192, create=False)
    writer.close()
    assert not is_written_elsewhere(made.path)


def test_a_reader_cannot_write(made: SharedFile) -> None:
    """A mapping for reading refuses writes and holds no lock."""
    reader = SharedFile(made.path, 8192, create=False, writable=False)
    assert not is_written_elsewhere(made.path)
    with pytest.raises(TypeError):
        reader.memory[0:1] = b"x"
    reader.close()


def test_only_regular_files_of_the_exact_size(made: SharedFile, tmp_path: Path) -> None:
    """A folder, a pipe, a link, another size and a missing file are refused."""
    with pytest.raises(ValueError, match="holds 8192 bytes, not 8193"):
        SharedFile(made.path, 8193, create=False)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="not a regular file"):
        SharedFile(str(tmp_path / "pipe"), 8192, create=False)
    (tmp_path / "link").symlink_to(made.path)
    for name in ("link", "missing", "."):
        with pytest.raises(OSError, match=r"\[Errno"):
            SharedFile(str(tmp_path / name), 8192, create=False)


def test_no_room_is_a_config_error_and_leaves_nothing(tmp_path: Path) -> None:
    """A pool that does not fit is refused at once, with the folder and both sizes."""
    path = tmp_path / "arena"
    words = rf"^--shm-dir='{tmp_path}': no room for {1 << 40} MB, \d+ MB are free \("
    with pytest.raises(ConfigError, match=words):
        SharedFile(str(path), 1 << 60, create=True)
    assert not path.exists()


def test_little_room_is_told_in_kilobytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No size is told as 0 MB."""

    def full(fd: int, offset: int, length: int) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    found = os.statvfs_result((1024, 1024, 300, 299, 299, 9, 9, 9, 0, 255))
    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(os, "statvfs", lambda folder: found)
    with pytest.raises(ConfigError, match=": no room for 960 KB, 299 KB are free "):
        SharedFile(str(tmp_path / "image"), 960 << 10, create=True)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_takes_no_file_is_a_config_error() -> None:
    """Its maker is told the folder and why, as a wrong flag."""
    with pytest.raises(ConfigError, match=r"^--shm-dir='/proc': no file can be made there: \w"):
        SharedFile("/proc/arena", 8192, create=True)
