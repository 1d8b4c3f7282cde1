"""Shared-memory files: made by the worker, mapped by the agent.

`os.open` and `mmap` rather than `multiprocessing.shared_memory`, whose tracker unlinks a
file under its owner when another process that opened it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import stat

from memory_agent.layout import size_in_words
from nightjar.errors import ConfigError


class SharedFile:
    """A mapped file; close() unmaps, and the owner's close() also unlinks.

    Whoever maps a file for writing that it did not make holds a lock on it until it has
    unmapped or died, so that the owner can tell (`is_written_elsewhere`) and no second
    process maps it for writing.
    """

    def __init__(self, path: str, num_bytes: int, *, create: bool, writable: bool = True) -> None:
        """Map `num_bytes` of `path`.

        Raises:
            ConfigError: The folder takes no file that is made, or has no room for it.
            OSError: A file that another made is not there, or cannot be opened.
            ValueError: The file is not what its maker would have made.
        """
        self.path, self.num_bytes, self._owner = path, num_bytes, create
        flags = os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_RDWR if writable else os.O_RDONLY)
        try:
            fd = os.open(path, flags | (os.O_CREAT | os.O_EXCL if create else os.O_NONBLOCK), 0o600)
        except OSError as error:
            if create:
                raise no_file_in(os.path.dirname(path), error) from None
            raise
        try:
            if create:
                os.posix_fallocate(fd, 0, num_bytes)
            else:
                _check(fd, path, num_bytes)
                if writable:
                    _lock(fd, path)
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            self.memory = mmap.mmap(fd, num_bytes, access=access)
        except OSError as error:
            if create:
                os.unlink(path)
                folder = os.path.dirname(path)
                raise ConfigError(
                    f"--shm-dir={folder!r}: no room for {size_in_words(num_bytes)}, "
                    f"{size_in_words(_num_free_bytes(folder))} are free ({error.strerror}); ask "
                    "for less by --num-blocks or --kv-mb, or in a container raise its shm_size"
                ) from error
            raise
        finally:
            os.close(fd)

    def close(self) -> None:
        """Unmap, and unlink if this process made the file."""
        with contextlib.suppress(BufferError):  # still viewed: the mapping ends with the process
            self.memory.close()
        if self._owner:
            self._owner = False
            os.unlink(self.path)


def is_written_elsewhere(path: str) -> bool:
    """Whether a process other than its maker still maps the file for writing."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def no_file_in(shm_dir: str, error: OSError) -> ConfigError:
    """What to say of a folder that takes no file."""
    return ConfigError(f"--shm-dir={shm_dir!r}: no file can be made there: {error.strerror}")


def _num_free_bytes(folder: str) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def _check(fd: int, path: str, num_bytes: int) -> None:
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{path} is not a regular file")
    if found.st_uid != os.geteuid():
        raise ValueError(f"{path} belongs to user {found.st_uid}, not to {os.geteuid()}")
    if found.st_size != num_bytes:
        raise ValueError(f"{path} holds {found.st_size} bytes, not {num_bytes}")


def _lock(fd: int, path: str) -> None:
    # flock belongs to the open file, which the mapping keeps alive: it ends with the mapping.
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"{path} is still mapped for writing by another agent") from None
