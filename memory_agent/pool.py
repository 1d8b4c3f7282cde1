"""The attached worker's pool: checked, mapped, and the two kinds of work on it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from memory_agent.arena import SharedFile
from memory_agent.cuda_memory import CudaError, device_of
from memory_agent.layout import ArenaLayout
from memory_agent.reload import load_image
from memory_agent.remap import copy_blocks


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


class AgentPool(Protocol):
    """A mapped pool, wherever it lies."""

    def copy(
        self, sources: Sequence[int], destinations: Sequence[int], aborted: Callable[[], bool]
    ) -> int:
        """Copy blocks; returns the bytes written."""
        ...

    def load(self, aborted: Callable[[], bool]) -> int:
        """Fill the tail with the image and verify it; returns the bytes written."""
        ...

    def close(self) -> None:
        """Unmap; no work may be running."""
        ...


def open_pool(
    layout: ArenaLayout, files: PoolFiles, shm_dir: str, reload_share: float
) -> AgentPool:
    """Check and map a pool; the first one on a GPU takes seconds, for torch is loaded.

    Raises:
        OSError: A file cannot be opened.
        ValueError: Something is not as the worker would have made it; nothing stays mapped.
    """
    if not files.cuda_ipc_handle:
        return Pool(layout, files, shm_dir)
    try:
        device_of(files.cuda_device_uuid)  # is there a driver at all?
        from memory_agent.device_pool import DevicePool
    except (CudaError, ModuleNotFoundError) as error:
        raise ValueError(f"pools on a GPU cannot be mapped here: {error}") from error
    return DevicePool(layout, files, shm_dir, reload_share)


class Pool:
    """The arena, mapped for writing, and the draft's image, mapped for reading."""

    def __init__(self, layout: ArenaLayout, files: PoolFiles, shm_dir: str) -> None:
        """Check the files and map them.

        Raises:
            OSError: A file cannot be opened.
            ValueError: A file is not what the worker would have made; nothing stays mapped.
        """
        check_files(files, shm_dir)
        self._layout, self._sha256 = layout, files.image_sha256
        self._arena = SharedFile(files.arena_path, layout.num_bytes, create=False)
        try:
            self._image = SharedFile(
                files.image_path, layout.image_bytes, create=False, writable=False
            )
        except BaseException:
            self._arena.close()
            raise

    def copy(
        self, sources: Sequence[int], destinations: Sequence[int], aborted: Callable[[], bool]
    ) -> int:
        """Copy blocks as `remap.copy_blocks` does; returns the bytes written."""
        with memoryview(self._arena.memory) as arena:
            return copy_blocks(arena, self._layout, sources, destinations, aborted)

    def load(self, aborted: Callable[[], bool]) -> int:
        """Fill the tail as `reload.load_image` does; returns the bytes written."""
        with memoryview(self._arena.memory) as arena, memoryview(self._image.memory) as image:
            return load_image(arena, self._layout, image, self._sha256, aborted)

    def close(self) -> None:
        """Unmap; no work may be running."""
        for shared in (self._image, self._arena):
            shared.close()
            assert shared.memory.closed, "a view outlived its grant"


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
