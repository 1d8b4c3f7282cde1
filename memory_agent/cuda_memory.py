"""Device memory that two processes share, and host memory pinned for copies: the driver's calls.

torch's own allocator cuts tensors out of larger allocations, and a handle opens an allocation as a
whole; so what is shared is allocated here, by itself. Only the 64 bytes of the handle travel.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

HANDLE_BYTES = 64
UUID_BYTES = 16
_LAZY_PEER_ACCESS = 1  # the one flag that opening a handle knows
_OUT_OF_MEMORY = 2
_STACK_LIMIT = 0  # CU_LIMIT_STACK_SIZE
_STACK_BYTES = 128  # of a thread; the driver's default is 1024
_Pointer = ctypes.c_uint64  # CUdeviceptr


class CudaError(Exception):
    """A call of the driver failed; the sentence names call and error."""


class OutOfDeviceMemory(CudaError):
    """The device has no room."""


class _Handle(ctypes.Structure):
    _fields_ = (("data", ctypes.c_ubyte * HANDLE_BYTES),)  # passed by value


class DeviceMemory:
    """One allocation, this process's own or another's; given back when nothing views it any more.

    Tensors made of it keep it alive, so its owner need not know when the last one goes.
    """

    def __init__(
        self, device: int, pointer: int, num_bytes: int, release: Callable[[int, int], None]
    ) -> None:
        self.device, self.num_bytes = device, num_bytes
        self._pointer, self._release = pointer, release

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.num_bytes,),
            "typestr": "|u1",
            "data": (self._pointer, False),
            "strides": None,
            "version": 3,
        }

    def tensor(self) -> torch.Tensor:
        """The bytes as uint8 [num_bytes]; no copy."""
        import torch  # only here: a process without a GPU's pool needs none

        torch.cuda.init()  # type: ignore[no-untyped-call]
        return torch.as_tensor(self, device=torch.device("cuda", self.device))

    def handle(self) -> bytes:
        """What `open_handle` of another process takes."""
        handle = _Handle()
        with _current(self.device) as driver:
            _call(driver.cuIpcGetMemHandle, ctypes.byref(handle), _Pointer(self._pointer))
        return bytes(handle.data)

    def close(self) -> None:
        """Give it back now: no tensor may be used any more; twice does no harm."""
        pointer, self._pointer = self._pointer, 0
        if pointer:
            self._release(self.device, pointer)

    def __del__(self) -> None:
        # At the end of a process the driver may be gone already, and its memory with it.
        try:
            self.close()
        except CudaError:
            self._pointer = 0


def allocate(device: int, num_bytes: int) -> DeviceMemory:
    """Allocate on GPU number `device`, as torch counts; the bytes hold anything.

    Raises:
        OutOfDeviceMemory: It has no room.
        CudaError: It cannot be used.
    """
    pointer = _Pointer()
    with _current(device) as driver:
        _call(driver.cuMemAlloc_v2, ctypes.byref(pointer), ctypes.c_size_t(num_bytes))
    return DeviceMemory(device, pointer.value, num_bytes, _free)


def open_handle(device: int, handle: bytes, num_bytes: int) -> DeviceMemory:
    """Map another process's allocation; the handle says nothing of its size.

    Raises:
        CudaError: The handle opens nothing, or the allocation does not hold `num_bytes`.
    """
    pointer, base, size = _Pointer(), _Pointer(), ctypes.c_size_t()
    if len(handle) != HANDLE_BYTES:
        raise CudaError(f"a handle has {HANDLE_BYTES} bytes, not {len(handle)}")
    with _current(device) as driver:
        _call(
            driver.cuIpcOpenMemHandle_v2,
            ctypes.byref(pointer),
            _Handle.from_buffer_copy(handle),
            ctypes.c_uint(_LAZY_PEER_ACCESS),
        )
        memory = DeviceMemory(device, pointer.value, num_bytes, _unmap)
        _call(driver.cuMemGetAddressRange_v2, ctypes.byref(base), ctypes.byref(size), pointer)
    if base.value != pointer.value or size.value < num_bytes:
        memory.close()
        raise CudaError(f"the allocation of the handle holds {size.value} bytes, not {num_bytes}")
    return memory


def save_stacks(device: int) -> None:
    """Keep little of the device for kernels' stacks; the driver takes more where one needs it.

    A context reserves the stacks of all threads that can run at once: 230 of the 527 MiB that an
    empty one takes on an H200 come back.

    Raises:
        CudaError: The device cannot be used.
    """
    with _current(device) as driver:
        _call(driver.cuCtxSetLimit, ctypes.c_int(_STACK_LIMIT), ctypes.c_size_t(_STACK_BYTES))


@contextmanager
def pinned(device: int, address: int, num_bytes: int) -> Iterator[None]:
    """Pin mapped host memory, so that copies to and from it run at full speed and on a stream.

    Args:
        device: GPU number, as torch counts.
        address: Of the first byte; on a page.
        num_bytes: Of writable memory.

    Raises:
        CudaError: It cannot be pinned.
    """
    with _current(device) as driver:
        _call(
            driver.cuMemHostRegister_v2,
            ctypes.c_void_p(address),
            ctypes.c_size_t(num_bytes),
            ctypes.c_uint(0),
        )
    try:
        yield
    finally:
        with _current(device) as driver:
            _call(driver.cuMemHostUnregister, ctypes.c_void_p(address))


def uuid_of(device: int) -> bytes:
    """UUID, 16 bytes, of GPU number `device`."""
    driver, uuid = _driver(), (ctypes.c_ubyte * UUID_BYTES)()
    number = ctypes.c_int()
    _call(driver.cuDeviceGet, ctypes.byref(number), ctypes.c_int(device))
    _call(driver.cuDeviceGetUuid_v2, ctypes.byref(uuid), number)
    return bytes(uuid)


def device_of(uuid: bytes) -> int:
    """Number, as torch counts, of the GPU with that UUID.

    Raises:
        CudaError: This process sees no such GPU, or no driver.
    """
    count = ctypes.c_int()
    _call(_driver().cuDeviceGetCount, ctypes.byref(count))
    for device in range(count.value):
        if uuid_of(device) == uuid:
            return device
    raise CudaError(f"none of the {count.value} GPUs seen here has the UUID {uuid.hex()}")


def _free(device: int, pointer: int) -> None:
    with _current(device) as driver:
        _call(driver.cuMemFree_v2, _Pointer(pointer))


def _unmap(device: int, pointer: int) -> None:
    with _current(device) as driver:
        _call(driver.cuIpcCloseMemHandle, _Pointer(pointer))


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise CudaError("there is no NVIDIA driver here") from None
    _call(driver.cuInit, ctypes.c_uint(0))
    return driver


@functools.cache
def _context(device: int) -> int:
    """The device's primary context, which torch uses too; kept until the process ends."""
    driver, number, context = _driver(), ctypes.c_int(), ctypes.c_void_p()
    _call(driver.cuDeviceGet, ctypes.byref(number), ctypes.c_int(device))
    _call(driver.cuDevicePrimaryCtxRetain, ctypes.byref(context), number)
    assert context.value is not None
    return context.value


@contextmanager
def _current(device: int) -> Iterator[ctypes.CDLL]:
    """Make the device's context this thread's, whichever thread it is."""
    driver, context, popped = _driver(), _context(device), ctypes.c_void_p()
    _call(driver.cuCtxPushCurrent_v2, ctypes.c_void_p(context))
    try:
        yield driver
    finally:
        _call(driver.cuCtxPopCurrent_v2, ctypes.byref(popped))


def _call(function: Any, *arguments: Any) -> None:
    status = function(*arguments)
    if status:
        kind = OutOfDeviceMemory if status == _OUT_OF_MEMORY else CudaError
        raise kind(f"{function.__name__}: {_error_name(status)}")


def _error_name(status: int) -> str:
    name = ctypes.c_char_p()
    ctypes.CDLL("libcuda.so.1").cuGetErrorName(ctypes.c_int(status), ctypes.byref(name))
    return name.value.decode() if name.value else f"error {status}"
