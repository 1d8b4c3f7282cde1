"""Programmatic dependent launch: a kernel is launched while the one before it still runs.

It takes compute capability 9.0, and is off unless `NIGHTJAR_PDL=1` says otherwise. Every kernel
so launched calls `begin` before it touches what another kernel writes or reads, in every program,
also in those that then return: what it waits for has waited likewise, so all that came before has
ended.
"""

from __future__ import annotations

import functools
import os

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# 1 turns it on. Measured on an H200 it gains 2 to 4 % of a step from 64 rows on and costs 4 to 10 %
# below, where products are tiles of our own that launching the next kernel early slows down.
SWITCH = "NIGHTJAR_PDL"
_LEAST_CAPABILITY = (9, 0)


@triton.jit
def begin(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Let the next kernel be launched, then wait until those before have ended.

    The next one waits for this one's end, so that it may be launched at once.
    """
    let_next(PDL)
    wait_for_last(PDL)


@triton.jit
def let_next(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first half of `begin`."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_last(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """The second half of `begin`, after which other kernels' memory may be touched."""
    if PDL:
        gdc_wait()


@triton.jit
def fetch_lines(pointers):  # type: ignore[no-untyped-def]
    """Bring the lines at `pointers` into L2, where all see the same, so it needs no wait."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@functools.cache
def launches_early(device: torch.device) -> bool:
    """Whether kernels of a device are launched while their predecessors run."""
    return (
        device.type == "cuda"
        and torch.version.cuda is not None
        and os.environ.get(SWITCH) == "1"
        and torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY
    )


def launch_options(device: torch.device) -> dict[str, bool]:
    """What a kernel that calls `begin` is launched with: its constant PDL, and the attribute."""
    return {"PDL": True, "launch_pdl": True} if launches_early(device) else {"PDL": False}
