"""What this processor is and how torch is set up on it: threads, precision, dtype, its name."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path

import torch

ISA_FLAGS = ("avx2", "avx512f", "avx512bw", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_tile")


def set_up(num_threads: int) -> int:
    """Fix threads and full float32 precision for this process; returns the thread count.

    Args:
        num_threads: Threads of the engine; 0 takes the cores that this process may use.
    """
    threads = num_threads or usable_cores()
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("highest")
    torch.backends.mkldnn.set_flags(True, _fp32_precision="ieee")  # type: ignore[no-untyped-call]
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


def resolve_dtype(requested: str) -> torch.dtype:
    """Turn "auto", "float32" or "bfloat16" into a dtype."""
    if requested == "auto":
        return torch.bfloat16 if has_native_bfloat16() else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[requested]


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


def device_kind() -> str:
    """Name of the processor's kind: machine, torch's dispatch level, a digest of its flags."""
    digest = hashlib.sha256(" ".join(sorted(cpu_flags())).encode()).hexdigest()[:12]
    known = "+".join(flag for flag in ISA_FLAGS if flag in cpu_flags())
    level = torch.backends.cpu.get_cpu_capability()
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "")
    return f"cpu-{platform.machine()}-{level}{limit}-{known}-{digest}"
