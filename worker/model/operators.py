"""Torch operators of our own, so that a compiled graph calls what it must not look into.

What they read and write beside their arguments, the pool, the plan and the weights,
belongs to the runtime they name. Layers keep their order in a graph because each one's input
is the output of the one before.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

_LIBRARY = torch.library.Library("nightjar", "FRAGMENT")  # type: ignore[no-untyped-call]


def is_watched() -> bool:
    """Whether a compiler, or a mode that sees every operator, must be given ours as operators.

    Where nobody looks, their functions are called, which costs less.
    """
    return bool(torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack())


def define(
    schema: str, function: Callable[..., torch.Tensor], fake: Callable[..., torch.Tensor]
) -> None:
    """Register `nightjar::...` by its schema.

    Args:
        schema: For example "linear(Tensor x, str runtime) -> Tensor".
        function: Computes, on the CPU and on a GPU.
        fake: Returns an empty tensor of the result's shape and dtype.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)  # type: ignore[no-untyped-call]
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, function, key)  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"nightjar::{name}", fake, lib=_LIBRARY)
