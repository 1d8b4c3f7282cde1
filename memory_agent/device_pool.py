"""A worker's pool on a GPU: its arena mapped over CUDA IPC, its image pinned, work on a stream."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from memory_agent import cuda_memory, failpoint
from memory_agent.arena import SharedFile
from memory_agent.checksum import PIECE_BYTES, piece_digest, pieces, verify
from memory_agent.layout import ArenaLayout
from memory_agent.pool_files import DeviceLost, PoolFiles, check_files
from memory_agent.remap import Aborted, check_moves
from memory_agent.remap_kernel import check_block_bytes, move_blocks
from nightjar import log

_MAX_HASHERS = 4  # threads; a gigabyte takes one of them a second or two


class DeviceWork:
    """The two kinds of work on an arena, as tensors: on a GPU on a stream of its own."""

    def __init__(
        self, layout: ArenaLayout, arena: torch.Tensor, image: torch.Tensor, reload_share: float
    ) -> None:
        """Allocate what copies take, and compile the kernel.

        Args:
            layout: The arena's.
            arena: uint8 [layout.num_bytes].
            image: uint8 [layout.image_bytes], in host memory.
            reload_share: Part of the time in which a reload copies; it pauses in the rest, so
                that the worker's own copies and kernels get through.

        Raises:
            ValueError: Blocks of this size cannot be moved.
        """
        check_block_bytes(layout.block_bytes)
        self._layout, self._arena, self._image = layout, arena, image
        self._pause = 1 / reload_share - 1
        on_gpu = arena.device.type == "cuda"
        stream = torch.cuda.Stream
        self._stream = stream(arena.device) if on_gpu else None  # type: ignore[no-untyped-call]
        most = max(1, layout.num_extra_blocks)
        self._host_moves = torch.zeros(most, 2, dtype=torch.int32, pin_memory=on_gpu)
        self._moves = torch.zeros(most, 2, dtype=torch.int32, device=arena.device)
        num_hashers = min(_MAX_HASHERS, len(os.sched_getaffinity(0))) if on_gpu else 1
        size = min(PIECE_BYTES, layout.image_bytes)
        self._back = torch.empty(num_hashers + 1, size, dtype=torch.uint8, pin_memory=on_gpu)
        self._hashers = ThreadPoolExecutor(num_hashers, thread_name_prefix="hash")
        scratch = torch.zeros(2 * layout.block_bytes, dtype=torch.uint8, device=arena.device)
        with self._enqueued():  # so that no grant waits for the compiler
            self._moves[0, 0] = 1
            move_blocks(scratch, self._moves[:1], layout.block_bytes)

    @contextlib.contextmanager
    def _enqueued(self) -> Iterator[None]:
        """Run the block's work on the stream, and wait for its end."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()

    def copy(
        self, sources: Sequence[int], destinations: Sequence[int], aborted: Callable[[], bool]
    ) -> int:
        """Copy blocks in one launch; returns the bytes written.

        Raises:
            MoveRefused: The moves fail `check_moves`; nothing was written.
            Aborted: `aborted()` was true; nothing was written.
        """
        check_moves(self._layout, sources, destinations)
        if aborted():
            raise Aborted
        count = len(sources)
        if count:
            pairs = list(zip(sources, destinations, strict=True))
            self._host_moves[:count] = torch.tensor(pairs, dtype=torch.int32)
            with self._enqueued():
                self._moves[:count].copy_(self._host_moves[:count], non_blocking=True)
                move_blocks(self._arena, self._moves[:count], self._layout.block_bytes)
                failpoint.reached("agent.mid_copy")
        return count * self._layout.block_bytes

    def load(self, checksum: bytes, aborted: Callable[[], bool]) -> int:
        """Fill the tail from the image with pauses, then read back and hash what it holds.

        Raises:
            ChecksumMismatch: The tail must not be used as a draft.
            Aborted: `aborted()` became true; the tail may be partly written.
        """
        start, size = self._layout.image_offset, self._layout.image_bytes
        target = self._arena[start : start + size]
        for index, span in enumerate(pieces(size)):
            with self._paced(aborted):
                target[span].copy_(self._image[span], non_blocking=True)
            if index == 0:
                failpoint.reached("agent.mid_load")
        failpoint.reached("agent.before_verify")
        hashing: list[Future[bytes]] = []
        for index, span in enumerate(pieces(size)):
            if index >= len(self._back):
                hashing[index - len(self._back)].result()  # whose buffer is taken next
            back = self._back[index % len(self._back)][: span.stop - span.start]
            with self._paced(aborted):
                back.copy_(target[span], non_blocking=True)
            hashing.append(self._hashers.submit(piece_digest, back.numpy().data))
        verify([future.result() for future in hashing], checksum)
        return size

    @contextlib.contextmanager
    def _paced(self, aborted: Callable[[], bool]) -> Iterator[None]:
        """Run one piece's copy, then pause for its share of the time."""
        if aborted():
            raise Aborted
        began = time.perf_counter()
        with self._enqueued():
            yield
        if self._stream is not None and self._pause > 0:
            time.sleep((time.perf_counter() - began) * self._pause)

    def close(self) -> None:
        """Let go of everything that views the arena; no work may be running."""
        self._hashers.shutdown()
        del self._arena, self._image


class DevicePool:
    """The pool of one attached worker; the file that stands for the arena is locked meanwhile."""

    def __init__(
        self, layout: ArenaLayout, files: PoolFiles, shm_dir: str, reload_share: float
    ) -> None:
        """Check the files, lock the one, pin the other, map the arena.

        Raises:
            OSError: A file cannot be opened.
            ValueError: A file or the handle is not what the worker would have made, or this
                process does not see the worker's GPU; nothing stays mapped.
        """
        check_files(files, shm_dir)
        self._checksum = files.image_sha256
        try:
            self._device = cuda_memory.device_of(files.cuda_device_uuid)
            with contextlib.ExitStack() as stack:
                self._map(stack, layout, files, reload_share)
                self._mapped = stack.pop_all()
        except (cuda_memory.CudaError, RuntimeError) as error:  # of the driver, of torch
            raise ValueError(str(error)) from error

    def _map(
        self,
        stack: contextlib.ExitStack,
        layout: ArenaLayout,
        files: PoolFiles,
        reload_share: float,
    ) -> None:
        device = self._device
        lock = SharedFile(files.arena_path, os.path.getsize(files.arena_path), create=False)
        stack.callback(lock.close)
        # For writing, although nothing writes it: pages mapped for reading cannot be pinned.
        shared = SharedFile(files.image_path, layout.image_bytes, create=False)
        stack.callback(_close, shared)
        image = torch.frombuffer(shared.memory, dtype=torch.uint8)
        cuda_memory.save_stacks(device)
        try:
            stack.enter_context(cuda_memory.pinned(device, image.data_ptr(), len(image)))
        except cuda_memory.CudaError as error:
            log.get().warning(
                "the image is not pinned, so reloads are slower; pages of a folder in memory, as "
                "--shm-dir is by default, can be pinned",
                reason=str(error),
            )
        torch.cuda.set_device(device)
        arena = cuda_memory.open_handle(device, files.cuda_ipc_handle, layout.num_bytes)
        stack.callback(arena.close)
        self._work = DeviceWork(layout, arena.tensor(), image, reload_share)
        del image
        stack.callback(self._work.close)

    def copy(
        self, sources: Sequence[int], destinations: Sequence[int], aborted: Callable[[], bool]
    ) -> int:
        """Copy blocks as `DeviceWork.copy` does; DeviceLost if the device fails."""
        with _device_errors():
            return self._work.copy(sources, destinations, aborted)

    def load(self, aborted: Callable[[], bool]) -> int:
        """Fill the tail as `DeviceWork.load` does; DeviceLost if the device fails."""
        with _device_errors():
            return self._work.load(self._checksum, aborted)

    def close(self) -> None:
        """Unmap; no work may be running. DeviceLost if the device fails."""
        with _device_errors(), self._mapped:
            torch.cuda.synchronize(self._device)


@contextlib.contextmanager
def _device_errors() -> Iterator[None]:
    # Whatever a device reports at one call may be of an earlier one, and it goes on for good.
    try:
        yield
    except (RuntimeError, cuda_memory.CudaError) as error:
        raise DeviceLost(str(error)) from error


def _close(shared: SharedFile) -> None:
    shared.close()
    assert shared.memory.closed, "a view outlived its pool"
