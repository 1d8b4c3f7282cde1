"""Linears packed for oneDNN or multiplied by a GPU's kernels; q, k, v or gate, up merged.

A packed product's rows are independent of their number from 2 to 256; one row alone takes
another kernel. Merging changes no output's bits: each is a dot product of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from nightjar.errors import EngineFailure
from worker.model.operators import define, is_watched
from worker.model.runtime import Runtime, Weight, get_runtime

MAX_ROWS = 256  # rows of a packed product; also the tokens of one forward
_PACK_HINT = 16  # rows that oneDNN's layout is chosen for
_MERGED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class PackedLinear(nn.Module):
    """Stands in for an `nn.Linear`; its weight lives in the runtime."""

    def __init__(self, runtime: Runtime, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.out_features, self.in_features = weight.shape
        self.nightjar_runtime, self.index = runtime.name, len(runtime.weights)
        # The kernels leave a bias to whoever reads the product, which a compiler fuses.
        self.adds_bias = runtime.kernels
        runtime.weights.append(
            Weight(
                plain=self.weight.data,
                bias=None if self.adds_bias else bias,
                num_outputs=self.out_features,
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        product = self.product(x)
        bias = self.bias if self.adds_bias else None
        return product if bias is None else product + bias

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Like `forward`, without the bias where `adds_bias`."""
        product: torch.Tensor
        if is_watched():
            op = torch.ops.nightjar.linear.default
            product = op(x, self.nightjar_runtime, self.index, self.out_features)
        else:
            product = _linear(x, self.nightjar_runtime, self.index, self.out_features)
        return product


class MergedPart(nn.Module):
    """One of several linears of the same input, computed together by the first one called."""

    def __init__(self, whole: Merged, start: int, stop: int) -> None:
        super().__init__()
        self.whole = whole
        self.start, self.stop = start, stop
        self.in_features, self.out_features = whole.linear.in_features, stop - start

    @property
    def weight(self) -> torch.Tensor:
        """The part's rows; some models look at a linear's dtype."""
        return self.whole.linear.weight[self.start : self.stop]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out] of this part."""
        return self.whole.output(x)[..., self.start : self.stop]


class Merged(nn.Module):
    """The product that `num_parts` parts share, kept until each has taken its own."""

    def __init__(self, linear: PackedLinear, num_parts: int) -> None:
        super().__init__()
        self.linear, self.num_parts = linear, num_parts
        self._input: torch.Tensor | None = None
        self._output: torch.Tensor | None = None
        self._num_left = 0

    def output(self, x: torch.Tensor) -> torch.Tensor:
        """The whole product of `x`, computed unless the last call's input was this tensor."""
        if self._output is None or self._input is not x:
            self._input, self._output, self._num_left = x, self.linear(x), self.num_parts
        output = self._output
        self._num_left -= 1
        if self._num_left == 0:
            self._input = self._output = None
        return output


def replace_linears(model: nn.Module, runtime: Runtime, *, merge: bool) -> None:
    """Put packed (and, where the names are usual, merged) linears in place of the model's."""
    for module in list(model.modules()):
        if merge:
            for names in _MERGED:
                _merge(module, names, runtime)
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                bias = None if child.bias is None else child.bias.data
                setattr(module, name, PackedLinear(runtime, child.weight.data, bias))
            elif type(child) is Conv1D:
                old: Any = child
                weight, bias = old.weight.data, old.bias.data
                setattr(module, name, PackedLinear(runtime, weight.t().contiguous(), bias))


def _merge(module: nn.Module, names: tuple[str, ...], runtime: Runtime) -> None:
    parts = [getattr(module, name, None) for name in names]
    linears = [part for part in parts if type(part) is nn.Linear]
    if len(linears) != len(names) or len({part.in_features for part in linears}) != 1:
        return
    biases = [part.bias for part in linears if part.bias is not None]
    if biases and len(biases) != len(linears):
        return
    weight = torch.cat([part.weight.data for part in linears])
    bias = torch.cat([part.data for part in biases]) if biases else None
    whole = Merged(PackedLinear(runtime, weight, bias), len(names))
    at = 0
    for name, part in zip(names, linears, strict=True):
        setattr(module, name, MergedPart(whole, at, at + part.out_features))
        at += part.out_features


def pack(runtime: Runtime, model: nn.Module, *, keep_plain: bool) -> None:
    """Take every linear's weight as it now is, packed where the CPU multiplies it.

    Args:
        runtime: Holds the weights.
        model: Its linears; where the plain weights go, their parameters go too.
        keep_plain: True keeps them: a draft's are views of the arena.
    """
    linears = [module for module in model.modules() if isinstance(module, PackedLinear)]
    for linear in linears:
        weight = runtime.weights[linear.index]
        weight.plain = linear.weight.data
        if runtime.kernels:
            continue
        weight.bias = None if linear.bias is None else linear.bias.data
        if can_pack():
            weight.packed = torch.ops.mkldnn._reorder_linear_weight(weight.plain, _PACK_HINT)
            if not keep_plain:
                weight.plain = None
                linear.weight = nn.Parameter(weight_stub(linear.weight), requires_grad=False)


def drop_packed(runtime: Runtime) -> None:
    """Forget packed and plain weights alike; products fail until `pack`."""
    for weight in runtime.weights:
        weight.packed = weight.plain = None


def can_pack() -> bool:
    """True where torch has oneDNN's packed linear."""
    return bool(torch._C._has_mkldnn) and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


def weight_stub(weight: torch.Tensor) -> torch.Tensor:
    """An empty tensor of the same dtype, for code that looks at a weight's dtype."""
    return torch.empty(0, dtype=weight.dtype)


def _linear(x: torch.Tensor, runtime: str, index: int, num_outputs: int) -> torch.Tensor:
    state = get_runtime(runtime)
    weight = state.weights[index]
    if state.kernels:
        return _by_kernel(state, x, weight)
    rows = x.numel() // x.shape[-1]
    if 1 < rows <= MAX_ROWS or (rows == 1 and not state.exact):
        return _product(x, weight)
    flat = x.reshape(rows, x.shape[-1])
    if rows == 1:
        return _product(flat.expand(2, -1).contiguous(), weight)[:1].view(*x.shape[:-1], -1)
    parts = [
        _linear(part, runtime, index, num_outputs)
        for part in torch.split(flat, MAX_ROWS)
        if len(part)
    ]
    return (
        torch.cat(parts).view(*x.shape[:-1], num_outputs)
        if parts
        else x.new_empty(*x.shape[:-1], num_outputs)
    )


def _product(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    if weight.packed is not None:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, weight.packed, weight.bias, "none", [], ""
        )
        return product
    if weight.plain is None:
        raise EngineFailure("a linear ran while its weights were dropped")
    return nn.functional.linear(x, weight.plain, weight.bias)


def _by_kernel(state: Runtime, x: torch.Tensor, weight: Weight) -> torch.Tensor:
    if weight.plain is None:
        raise EngineFailure("a linear ran while its weights were dropped")
    assert state.gemms is not None
    product = state.gemms.product(x.reshape(-1, x.shape[-1]).contiguous(), weight.plain)
    return product.view(*x.shape[:-1], weight.num_outputs)


def _fake_linear(x: torch.Tensor, runtime: str, index: int, num_outputs: int) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], num_outputs)


define("linear(Tensor x, str runtime, int index, int num_outputs) -> Tensor", _linear, _fake_linear)
