"""Shared device memory against a driver made of Python: calls, owners, refusals."""

# ruff: noqa: D102 - the driver's calls are the driver's own
from __future__ import annotations

import ctypes
import gc
from typing import Any

import pytest

from memory_agent import cuda_memory
from memory_agent.cuda_memory import CudaError, OutOfDeviceMemory, allocate, device_of, open_handle

ROOM = 1 << 30


class Driver:
    """Two GPUs whose memory is numbers; every call needs a current context."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}  # of allocations, by pointer
        self.mapped: set[int] = set()
        self.pinned: set[int] = set()
        self.limits: dict[int, int] = {}
        self.depth = 0

    def cuCtxPushCurrent_v2(self, context: Any) -> int:
        self.depth += 1
        return 0

    def cuCtxPopCurrent_v2(self, context: Any) -> int:
        self.depth -= 1
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = 2
        return 0

    def cuDeviceGet(self, number: Any, ordinal: Any) -> int:
        number._obj.value = ordinal.value
        return 0

    def cuDeviceGetUuid_v2(self, uuid: Any, number: Any) -> int:
        uuid._obj[:] = [number.value + 1] * 16
        return 0

    def cuMemAlloc_v2(self, pointer: Any, size: Any) -> int:
        assert self.depth > 0
        if size.value > ROOM:
            return 2
        pointer._obj.value = 0x7F00_0000_0000 + len(self.sizes) * ROOM
        self.sizes[pointer._obj.value] = size.value
        return 0

    def cuMemFree_v2(self, pointer: Any) -> int:
        assert self.depth > 0
        return 0 if self.sizes.pop(pointer.value, None) else 1

    def cuIpcGetMemHandle(self, handle: Any, pointer: Any) -> int:
        handle._obj.data[:8] = pointer.value.to_bytes(8, "little")
        return 0

    def cuIpcOpenMemHandle_v2(self, pointer: Any, handle: Any, flags: Any) -> int:
        assert (self.depth, flags.value) == (1, 1)
        pointer._obj.value = int.from_bytes(bytes(handle.data)[:8], "little")
        if pointer._obj.value not in self.sizes:
            return 201
        self.mapped.add(pointer._obj.value)
        return 0

    def cuMemGetAddressRange_v2(self, base: Any, size: Any, pointer: Any) -> int:
        base._obj.value, size._obj.value = pointer.value, self.sizes[pointer.value]
        return 0

    def cuIpcCloseMemHandle(self, pointer: Any) -> int:
        self.mapped.remove(pointer.value)
        return 0

    def cuCtxSetLimit(self, limit: Any, value: Any) -> int:
        assert self.depth > 0
        self.limits[limit.value] = value.value
        return 0

    def cuMemHostRegister_v2(self, address: Any, size: Any, flags: Any) -> int:
        self.pinned.add(address.value)
        return 0

    def cuMemHostUnregister(self, address: Any) -> int:
        self.pinned.remove(address.value)
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """In the place of the real one."""
    made = Driver()
    monkeypatch.setattr(cuda_memory, "_driver", lambda: made)
    monkeypatch.setattr(cuda_memory, "_context", lambda device: 1)
    monkeypatch.setattr(cuda_memory, "_error_name", lambda status: f"error {status}")
    return made


def test_memory_is_freed_with_its_last_owner(driver: Driver) -> None:
    """An allocation lives as long as something holds it, and is given back once."""
    memory = allocate(1, 4096)
    interface = memory.__cuda_array_interface__
    assert interface["shape"] == (4096,)
    assert interface["data"] == (next(iter(driver.sizes)), False)
    held = [memory]
    del memory
    gc.collect()
    assert len(driver.sizes) == 1
    held[0].close()
    held.clear()
    assert (driver.sizes, driver.depth) == ({}, 0)


def test_a_handle_maps_what_another_allocated(driver: Driver) -> None:
    """It is 64 bytes; unmapping leaves the owner's memory as it is, and twice does no harm."""
    owner = allocate(0, 4096)
    handle = owner.handle()
    assert len(handle) == cuda_memory.HANDLE_BYTES
    mapped = open_handle(0, handle, 4000)
    assert driver.mapped == set(driver.sizes)
    mapped.close()
    mapped.close()
    assert driver.mapped == set()
    assert len(driver.sizes) == 1
    owner.close()


def test_what_is_not_there_is_refused(driver: Driver) -> None:
    """Too much, too little, no handle, another GPU: each gives its sentence and leaves nothing."""
    with pytest.raises(OutOfDeviceMemory, match="cuMemAlloc"):
        allocate(0, ROOM + 1)
    owner = allocate(0, 4096)
    with pytest.raises(CudaError, match="holds 4096 bytes, not 4097"):
        open_handle(0, owner.handle(), 4097)
    with pytest.raises(CudaError, match="cuIpcOpenMemHandle_v2: error 201"):
        open_handle(0, bytes(64), 4096)
    with pytest.raises(CudaError, match="64 bytes, not 3"):
        open_handle(0, b"abc", 4096)
    assert driver.mapped == set()
    assert [device_of(bytes([n]) * 16) for n in (1, 2)] == [0, 1]
    with pytest.raises(CudaError, match="none of the 2 GPUs"):
        device_of(b"x" * 16)
    owner.close()
    assert driver.depth == 0


def test_host_memory_is_pinned_for_a_while(driver: Driver) -> None:
    """It is let go of with the block, whatever happens there."""
    buffer = ctypes.create_string_buffer(64)
    address = ctypes.addressof(buffer)

    def fail() -> None:
        with cuda_memory.pinned(0, address, 64):
            assert driver.pinned == {address}
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert driver.pinned == set()


def test_without_a_driver_a_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU is told apart from a broken one."""

    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    cuda_memory._driver.cache_clear()
    with pytest.raises(CudaError, match="no NVIDIA driver"):
        device_of(b"x" * 16)


def test_stacks_that_no_kernel_needs_are_not_kept(driver: Driver) -> None:
    """The driver's limit number 0 is of stacks; what it had by default is 1024 bytes a thread."""
    cuda_memory.save_stacks(0)
    assert (driver.limits, driver.depth) == ({0: 128}, 0)
