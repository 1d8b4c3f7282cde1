"""An eager forward whose rows' bits cannot depend on how many there are.

Between our own operators a model calls torch's. Those that add nothing up give a row the same
bits in any batch. Means over a row, that norms take, are computed in an order of our own; the
name of whatever else is called is kept, so that it can be refused: its order may depend on the
batch so rarely visibly that no comparison finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from worker.kernels.row_mean import row_mean

_aten = torch.ops.aten
# Beside views and pointwise operators: what moves, makes or compares values.
_MOVES = {
    "alias", "amax", "arange", "argmax", "cat", "clone", "constant_pad_nd", "copy_", "detach",
    "dropout", "embedding", "empty", "empty_like", "empty_strided", "fill_", "full", "full_like",
    "gather", "index", "index_select", "lift_fresh", "max", "new_empty", "new_full", "new_ones",
    "new_zeros", "ones", "ones_like", "repeat", "repeat_interleave", "scalar_tensor", "sort",
    "stack", "_to_copy", "topk", "tril", "triu", "type_as", "_unsafe_view", "zero_", "zeros",
    "zeros_like",
}  # fmt: skip
# Of those, what compares along a dimension, and where its arguments name it.
_PICKS = {"amax": 1, "argmax": 1, "max": 1, "sort": 1, "topk": 2}
# One block of threads for each row, cut by the row's width alone.
_NORMS = {"layer_norm", "native_layer_norm", "_fused_rms_norm"}
_PRODUCTS = {"bmm", "matmul", "mm"}
# What a compiler makes kernels of its own for, the same for all sizes; products are left to
# libraries, whose order it does not fix.
_GENERATED = {
    "linalg_vector_norm", "log_softmax", "_log_softmax", "logsumexp", "mean", "prod", "softmax",
    "_softmax", "std", "sum", "var", "var_mean",
}  # fmt: skip


class RowWise(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Active around an eager forward; `doubtful` names operators that may depend on the batch."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.doubtful: set[str] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator, a mean over rows in our own order."""
        options = kwargs or {}
        if func is _aten.rms_norm.default:  # one kernel, or a mean where dtypes differ
            with self:
                return func.decompose(*args, **options)
        if func is _aten.mean.dim and _is_over_rows(*args[:2]):
            values: torch.Tensor = args[0]
            dtype = options.get("dtype")
            values = values if dtype is None else values.to(dtype)
            return row_mean(values, keepdim=len(args) > 2 and args[2])
        if not _keeps_rows(func, args, options):
            self.doubtful.add(str(func))
        call: Callable[..., Any] = func
        return call(*args, **options)


def left_to_libraries(names: Iterable[str]) -> set[str]:
    """Those of `RowWise.doubtful` that stay doubtful where a compiler has seen the forward."""
    return {name for name in names if name.split(".")[1] not in _GENERATED}


def _is_over_rows(values: torch.Tensor, dims: Sequence[int] | None) -> bool:
    has_width = values.dim() > 0 and values.shape[-1] > 0 and values.dtype is not torch.float64
    return has_width and dims is not None and list(dims) in ([-1], [values.dim() - 1])


def _picks_in_rows(name: str, args: tuple[Any, ...], options: Mapping[str, Any]) -> bool:
    at, default = _PICKS[name], -1 if name in ("sort", "topk") else None
    dims = args[at] if len(args) > at else options.get("dim", default)
    return dims in (-1, args[0].dim() - 1, [-1], [args[0].dim() - 1])


def _keeps_rows(func: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> bool:
    """Whether an operator gives a row the same bits whatever stands beside it."""
    space, _, name = func.name().partition("::")
    name = name.partition(".")[0]
    if space in ("nightjar", "prim") or func.is_view or torch.Tag.pointwise in func.tags:
        return True
    given = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    if not any(tensor.is_floating_point() or tensor.is_complex() for tensor in given):
        return True  # sums of whole numbers are exact
    if name in _PICKS and not _picks_in_rows(name, args, options):
        return False
    if name in _PRODUCTS:  # rotary embedding's, of one factor: nothing is added
        return bool(args[0].shape[-1] == 1)
    return space == "aten" and name in _MOVES | _NORMS
