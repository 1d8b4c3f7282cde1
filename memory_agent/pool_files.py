"""What a worker announced of its pool beside the layout, and what is checked of it first."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PoolFiles:
    """What the worker announced beside the layout."""

    arena_path: str
    image_path: str
    image_sha256: bytes
    cuda_ipc_handle: bytes = b""  # empty for a pool in shared memory
    cuda_device_uuid: bytes = b""


class DeviceLost(Exception):
    """The GPU reported an error, after which this process can use it no more."""


def check_files(files: PoolFiles, shm_dir: str) -> None:
    """Check what can be checked before anything is opened.

    Raises:
        ValueError: The checksum is none, or a file lies outside the folder.
    """
    if len(files.image_sha256) != 32:
        raise ValueError("image_sha256 is not 32 bytes")
    for path in (files.arena_path, files.image_path):
        _check_folder(path, shm_dir)


def _check_folder(path: str, shm_dir: str) -> None:
    folder, allowed = os.path.realpath(os.path.dirname(path)), os.path.realpath(shm_dir)
    if not os.path.isabs(path) or os.path.commonpath([folder, allowed]) != allowed:
        raise ValueError(f"{path!r} does not lie in the agent's --shm-dir={shm_dir!r}")
