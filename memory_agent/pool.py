"""The attached worker's pool: checked, mapped, and the two kinds of work on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from memory_agent.arena import SharedFile
from memory_agent.cuda_memory import CudaError, device_of
from memory_agent.layout import ArenaLayout
from memory_agent.pool_files import PoolFiles, check_files
from memory_agent.reload import load_image
from memory_agent.remap import copy_blocks


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
