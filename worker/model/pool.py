"""The KV pool: one arena, block-major, with the draft's halves and weights in its tail.

A block is head-major, [num_layers, 2, num_kv_heads, block_size, head_dim], so that the K of a
row and head is gathered in strips of block_size * head_dim contiguous values. Files in shared
memory are locked while their owner lives, so that what a killed worker left can be swept.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from memory_agent import cuda_memory
from memory_agent.arena import SharedFile
from memory_agent.checksum import image_digest
from memory_agent.layout import ArenaLayout, size_in_words
from nightjar.errors import ConfigError
from worker.config import check_shm_dir

FILE_PREFIX = "nightjar-"
IMAGE_ALIGNMENT = 64  # a tensor of the image starts on a cache line


@dataclass(frozen=True, kw_only=True)
class KVGeometry:
    """Shape of one model's KV, and of the queries that read it."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers' K and V."""
        values = self.num_layers * 2 * self.num_kv_heads * self.block_size * self.head_dim
        return values * self.dtype.itemsize


class KVCache:
    """One model's view of the pool.

    Layer l's K of (block b, head h) is strip `(b * num_layers * 2) * num_kv_heads + h` of
    `strips[l]`, its V the strip num_kv_heads further: the layer is in the view's start, so
    indexes are made once a forward. `rows` are the same bytes, one token and head a row.
    """

    def __init__(self, memory: torch.Tensor, geometry: KVGeometry, num_blocks: int) -> None:
        """View `memory`, uint8 [at least num_blocks * geometry.block_bytes]."""
        self.geometry, self.num_blocks = geometry, num_blocks
        values = memory[: num_blocks * geometry.block_bytes].view(geometry.dtype)
        strips = values.view(-1, geometry.block_size * geometry.head_dim)
        rows = values.view(-1, geometry.head_dim)
        per_layer = 2 * geometry.num_kv_heads
        layers = range(geometry.num_layers)
        self.strips = [strips[layer * per_layer :] for layer in layers]
        self.rows = [rows[layer * per_layer * geometry.block_size :] for layer in layers]


class Arena:
    """The arena's bytes, private or such as an agent may map.

    Shared on a CPU they are a file in shared memory. Shared on a GPU they are an allocation by
    itself, which `handle` opens, and the file is a page that stands for it: whoever maps the
    arena holds the file's lock.
    """

    def __init__(
        self, layout: ArenaLayout, shm_dir: str | None, device: torch.device | None = None
    ) -> None:
        """Allocate `layout.num_bytes`.

        Args:
            layout: The arena's.
            shm_dir: Folder of the shared file; None for private memory.
            device: Where the bytes lie; None is the CPU.

        Raises:
            ConfigError: `shm_dir` is no folder, or it or the device has no room.
        """
        self.layout = layout
        self._files: list[tuple[SharedFile, int]] = []
        self._shm_dir = shm_dir
        self.path, self.handle, self.device_uuid = "", b"", b""
        device = device or torch.device("cpu")
        if shm_dir is None:
            with _told_of_too_little_room(layout.num_bytes, device):
                self.memory = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device)
            return
        check_shm_dir(shm_dir)
        sweep_stale_files(shm_dir)
        if device.type == "cuda":
            self._share_device_memory(device)
            return
        shared = self._create("arena", layout.num_bytes)
        self.path = shared.path
        self.memory = torch.frombuffer(shared.memory, dtype=torch.uint8)

    def _share_device_memory(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        with _told_of_too_little_room(self.layout.num_bytes, device):
            allocation = cuda_memory.allocate(index, self.layout.num_bytes)
        self.handle, self.device_uuid = allocation.handle(), cuda_memory.uuid_of(index)
        self.memory = allocation.tensor().zero_()
        self.path = self._create("arena", mmap.PAGESIZE).path

    def write_image(self) -> tuple[str, bytes]:
        """Copy the image of the draft's weights into a file of its own.

        Returns:
            The file's path and the checksum of its layout.image_bytes.
        """
        start, size = self.layout.image_offset, self.layout.image_bytes
        image = self._create("image", size)
        view = torch.frombuffer(image.memory, dtype=torch.uint8)
        view.copy_(self.memory[start : start + size])
        digest = image_digest(view.numpy().data)
        del view
        image.memory.close()  # the file stays; its pages need not count as ours
        return image.path, digest

    def close(self) -> None:
        """Unlink the files; mappings that tensors still view end with the process."""
        self.memory = torch.empty(0, dtype=torch.uint8)
        while self._files:
            shared, lock = self._files.pop()
            os.close(lock)
            with contextlib.suppress(FileNotFoundError):
                shared.close()

    def _create(self, kind: str, num_bytes: int) -> SharedFile:
        assert self._shm_dir is not None
        name = f"{FILE_PREFIX}{os.getpid()}-{kind}-{os.urandom(4).hex()}"
        shared = SharedFile(os.path.join(self._shm_dir, name), num_bytes, create=True)
        lock = os.open(shared.path, os.O_RDONLY | os.O_CLOEXEC)
        _lock(lock, fcntl.F_RDLCK)
        self._files.append((shared, lock))
        return shared


@contextlib.contextmanager
def _told_of_too_little_room(num_bytes: int, device: torch.device) -> Iterator[None]:
    try:
        yield
    except (torch.OutOfMemoryError, cuda_memory.OutOfDeviceMemory):
        raise ConfigError(
            f"the pool takes {size_in_words(num_bytes)}, for which {device} has no room; ask for "
            "less by --num-blocks, --kv-mb or --gpu-memory-share"
        ) from None


def sweep_stale_files(shm_dir: str) -> list[str]:
    """Remove files of workers that are gone; returns their names.

    A file goes only when its process id is not alive here and nobody holds its lock: the
    lock tells across containers that share the folder, the id while a file is being made.
    """
    removed = []
    for path in Path(shm_dir).glob(f"{FILE_PREFIX}[0-9]*-*"):
        pid = path.name.removeprefix(FILE_PREFIX).split("-")[0]
        if not pid.isdigit() or Path("/proc", pid).exists():
            continue
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                _lock(fd, fcntl.F_WRLCK)
                path.unlink()
                removed.append(path.name)
            finally:
                os.close(fd)
    return removed


def _lock(fd: int, kind: int) -> None:
    """Lock the whole file for its open file description; OSError if another's lock forbids it.

    Not by `flock`: that one is the agent's, which keeps out other writers than the owner.
    """
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 0, 0))


def image_size(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes that `move_into` needs for `tensors`."""
    return sum(_place_bytes(tensor) for tensor in _distinct(tensors).values())


def move_into(tensors: Sequence[torch.Tensor], memory: torch.Tensor) -> None:
    """Copy `tensors` end to end into `memory`, uint8, and make each a view of its place.

    Tensors that share their bytes, as tied embeddings do, share their place.
    """
    places: dict[tuple[int, int], torch.Tensor] = {}
    at = 0
    for key, tensor in _distinct(tensors).items():
        places[key] = memory[at : at + tensor.numel() * tensor.element_size()]
        places[key].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
        at += _place_bytes(tensor)
    for tensor, key in [(tensor, _key(tensor)) for tensor in tensors]:
        tensor.data = places[key].view(tensor.dtype).view(tensor.shape)


def _key(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()


def _distinct(tensors: Sequence[torch.Tensor]) -> dict[tuple[int, int], torch.Tensor]:
    distinct: dict[tuple[int, int], torch.Tensor] = {}
    for tensor in tensors:
        assert tensor.is_contiguous()
        distinct.setdefault(_key(tensor), tensor)
    return distinct


def _place_bytes(tensor: torch.Tensor) -> int:
    size = tensor.numel() * tensor.element_size()
    return -(-size // IMAGE_ALIGNMENT) * IMAGE_ALIGNMENT
