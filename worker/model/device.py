"""Where models run, and how torch is set up there: threads, precision, dtype, its name."""

from __future__ import annotations

import hashlib
import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from nightjar.errors import ConfigError

ISA_FLAGS = ("avx2", "avx512f", "avx512bw", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_tile")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_LEAST_CAPABILITY = (8, 0)  # bfloat16 products need it


@dataclass(frozen=True)
class Placement:
    """Where a worker's tensors lie, and which forward runs there.

    Kernels run on every GPU; on a CPU only in Triton's interpreter, for tests.
    """

    device: torch.device
    kernels: bool

    @property
    def name(self) -> str:
        """Name of the device, for example "cpu" or "NVIDIA H200"."""
        return str(torch.cuda.get_device_name(self.device)) if self._is_gpu else "cpu"

    @property
    def _is_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def num_processors(self) -> int:
        """Streaming multiprocessors, that kernels are spread over."""
        if not self._is_gpu:
            return 1
        return int(torch.cuda.get_device_properties(self.device).multi_processor_count)


CPU = Placement(torch.device("cpu"), kernels=False)


def place(device: str) -> Placement:
    """Turn "cpu" or "cuda" into a placement.

    Raises:
        ConfigError: There is no such device, or its GPU is too old.
    """
    if device == "cpu":
        return CPU
    if not torch.cuda.is_available():
        raise ConfigError("--device='cuda': torch finds no GPU that it can use; say --device=cpu")
    capability = torch.cuda.get_device_capability()
    if capability < _LEAST_CAPABILITY:
        name = torch.cuda.get_device_name()
        raise ConfigError(
            f"--device='cuda': {name} is older than compute capability 8.0; say --device=cpu"
        )
    return Placement(torch.device("cuda", torch.cuda.current_device()), kernels=True)


def set_up(num_threads: int, placement: Placement = CPU) -> int:
    """Fix threads and full precision for this process; returns the thread count.

    Args:
        num_threads: Threads of the engine; 0 takes the cores that this process may use.
        placement: On a GPU, sums of products are kept in float32 too.
    """
    threads = num_threads or usable_cores()
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("highest")
    torch.backends.mkldnn.set_flags(True, _fp32_precision="ieee")  # type: ignore[no-untyped-call]
    if placement.device.type == "cuda":
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    return threads


def usable_cores() -> int:
    """Cores by affinity, cut to the control group's quota; at least one."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()[:2]
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def has_native_bfloat16() -> bool:
    """True where oneDNN multiplies bfloat16 with the processor's own instructions."""
    flags = cpu_flags()
    return bool(
        torch._C._has_mkldnn
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and flags & {"avx512_bf16", "amx_bf16"}
    )


def resolve_dtype(
    requested: str, placement: Placement = CPU, checkpoint: torch.dtype | None = None
) -> torch.dtype:
    """Turn the name of a dtype, or "auto", into a dtype.

    Args:
        requested: "auto" is the checkpoint's on a GPU, else what the processor multiplies best.
        placement: Where products run.
        checkpoint: What the model's configuration says of its weights.
    """
    if requested != "auto":
        return _DTYPES[requested]
    if placement.device.type == "cuda":
        if checkpoint is not None and checkpoint in _DTYPES.values():
            return checkpoint
        return torch.bfloat16
    return torch.bfloat16 if has_native_bfloat16() else torch.float32


def cpu_flags() -> frozenset[str]:
    """Instruction sets of the first core that matter to arithmetic; empty where unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def device_kind(placement: Placement = CPU) -> str:
    """Name of the device's kind.

    A GPU's name and compute capability; of a processor machine, torch's dispatch level, and a
    digest of its flags.
    """
    if placement.device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(placement.device)
        return f"cuda-{torch.cuda.get_device_name(placement.device)}-{major}.{minor}"
    digest = hashlib.sha256(" ".join(sorted(cpu_flags())).encode()).hexdigest()[:12]
    known = "+".join(flag for flag in ISA_FLAGS if flag in cpu_flags())
    level = torch.backends.cpu.get_cpu_capability()
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "")
    return f"cpu-{platform.machine()}-{level}{limit}-{known}-{digest}"
