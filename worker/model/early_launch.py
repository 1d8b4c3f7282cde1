"""The compiler's kernels launched early, as ours are: each waits before all it does.

Inductor can launch so, but lets a kernel wait only where it touches what the last one did; one
that reads nothing may never wait, and the kernel behind it run before what it needs has ended.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

_PARTS = ("_filter_pdl", "GDC_WAIT", "GDC_LAUNCH")


@contextlib.contextmanager
def early_launches(early: bool) -> Iterator[None]:
    """Whether kernels that inductor generates in here are launched while their predecessors run.

    Where torch generates no such kernels, or does it in another way, none are.
    """
    import torch._inductor.config  # only here: loading it takes time

    config: Any = torch._inductor.config
    if not early:
        with config.patch({"triton.enable_pdl": False} if _is_on(config) else {}):
            yield
        return
    from torch._inductor.codegen import triton as generator

    kernel: Any = generator.TritonKernel
    if not hasattr(config.triton, "enable_pdl") or not all(hasattr(kernel, p) for p in _PARTS):
        yield
        return
    own = kernel._filter_pdl
    kernel._filter_pdl = wait_first
    try:
        # A combined kernel's surplus programs would not wait.
        with config.patch({"triton.enable_pdl": True, "combo_kernels": False}):
            yield
    finally:
        kernel._filter_pdl = own


def wait_first(kernel: Any, code: Any) -> None:
    """Put a generated kernel's wait, and its word to the next one, before everything else.

    Stands in for `TritonKernel._filter_pdl`, which is given each body when it is complete.
    """
    if not kernel._enable_pdl_codegen():
        return
    moved = (kernel.GDC_LAUNCH, kernel.GDC_WAIT)
    rest = (line for line in code._lines if not (isinstance(line, str) and line.strip() in moved))
    code._lines = [*moved, *rest]


def _is_on(config: Any) -> bool:
    return bool(getattr(config.triton, "enable_pdl", False))
