"""State beside a model's modules, found by name: its KV cache, its plan, its weights.

Compiled graphs call our operators with that name as a constant, so a graph holds no weights
and none of the pool, and packed weights may be dropped and rebuilt under it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from worker.model.plan import Plan
from worker.model.pool import KVCache

if TYPE_CHECKING:
    from worker.gpu.gemm_table import GemmTable
    from worker.gpu.paged import PagedAttention
    from worker.model.native import NativeAttention


@dataclass(kw_only=True)
class Runtime:
    """What operators of one model use; `plan` is set while a forward runs.

    Without a cache, attention only notes (num_heads, num_kv_heads, head_dim) and returns zeros.
    """

    name: str
    exact: bool
    kernels: bool = False  # whether operators run the kernels of a GPU, `gemms` and `paged`
    cache: KVCache | None = None
    plan: Plan | None = None
    native: NativeAttention | None = None  # the compiled build's attention; it plans for itself
    gemms: GemmTable | None = None
    paged: PagedAttention | None = None
    shapes: set[tuple[int, int, int]] = field(default_factory=set)  # seen without a cache
    weights: list[Weight] = field(default_factory=list)


@dataclass(kw_only=True)
class Weight:
    """A linear's weight [out, in] and bias [out], packed for oneDNN, plain, or dropped."""

    plain: torch.Tensor | None
    bias: torch.Tensor | None
    packed: torch.Tensor | None = None
    num_outputs: int


_RUNTIMES: dict[str, Runtime] = {}


def new_runtime(role: str, *, exact: bool, kernels: bool = False) -> Runtime:
    """Register a runtime; the name is `role` unless another model lives under it."""
    name, number = role, 1
    while name in _RUNTIMES:
        number += 1
        name = f"{role}-{number}"
    _RUNTIMES[name] = Runtime(name=name, exact=exact, kernels=kernels)
    return _RUNTIMES[name]


def get_runtime(name: str) -> Runtime:
    """Look a runtime up."""
    return _RUNTIMES[name]


def release_runtime(runtime: Runtime) -> None:
    """Forget a runtime; its model cannot run any more."""
    _RUNTIMES.pop(runtime.name, None)
