"""The attached worker's pool: its files, checked and mapped, and the two kinds of work on it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from memory_agent.arena import SharedFile
from memory_agent.layout import ArenaLayout
from memory_agent.reload import load_image
from memory_agent.remap import copy_blocks


@dataclass(frozen=True, kw_only=True)
class PoolFiles:
    """What the worker announced beside the layout."""

    arena_path: str
    image_path: str
    image_sha256: bytes


class Pool:
    """The arena, mapped for writing, and the draft's image, mapped for reading."""

    def __init__(self, layout: ArenaLayout, files: PoolFiles, shm_dir: str) -> None:
        """Check the files and map them.

        Raises:
            OSError: A file cannot be opened.
            ValueError: A file is not what the worker would have made; nothing stays mapped.
        """
        if len(files.image_sha256) != 32:
            raise ValueError("image_sha256 is not 32 bytes")
        for path in (files.arena_path, files.image_path):
            _check_folder(path, shm_dir)
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


def _check_folder(path: str, shm_dir: str) -> None:
    folder, allowed = os.path.realpath(os.path.dirname(path)), os.path.realpath(shm_dir)
    if not os.path.isabs(path) or os.path.commonpath([folder, allowed]) != allowed:
        raise ValueError(f"{path!r} does not lie in the agent's --shm-dir={shm_dir!r}")
