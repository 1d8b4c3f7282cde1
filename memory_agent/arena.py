"""Shared-memory files: made by the worker, mapped by the agent.

`os.open` and `mmap` rather than `multiprocessing.shared_memory`, whose tracker unlinks a
file under its owner when another process that opened it ends.
"""

from __future__ import annotations

import mmap
import os

from nightjar.errors import ConfigError


class SharedFile:
    """A mapped file; close() unmaps, and the owner's close() also unlinks."""

    def __init__(self, path: str, num_bytes: int, *, create: bool) -> None:
        """Map `num_bytes` of `path`.

        Raises:
            ConfigError: The folder has no room for it.
            OSError: The file is not there, or cannot be opened.
        """
        self.path, self.num_bytes, self._owner = path, num_bytes, create
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create else 0)
        fd = os.open(path, flags, 0o600)
        try:
            if create:
                os.posix_fallocate(fd, 0, num_bytes)
            self.memory = mmap.mmap(fd, num_bytes)
        except OSError as error:
            if create:
                os.unlink(path)
                raise ConfigError(
                    f"--shm-dir={os.path.dirname(path)!r}: no room for {num_bytes >> 20} MB "
                    f"({error.strerror}); in a container raise its shm_size"
                ) from error
            raise
        finally:
            os.close(fd)

    def close(self) -> None:
        """Unmap, and unlink if this process made the file."""
        try:
            self.memory.close()
        except BufferError:  # tensors still view it: the mapping ends with the process
            pass
        if self._owner:
            self._owner = False
            os.unlink(self.path)
