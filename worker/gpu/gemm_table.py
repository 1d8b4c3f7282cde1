"""Products by a model's weights at run time, by the kernel that was chosen for each size."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import Protocol

import torch

from worker.gpu.gemm_cache import Choice, ShapeChoices, shape_of
from worker.gpu.gemm_library import library_matmul
from worker.kernels.gemm import fixed_order_matmul, num_splits
from worker.kernels.gemm_tiles import candidates
from worker.messages import ProductChoice

_ALIGNMENT = 16  # bytes; cuBLAS may take another kernel below it


class Library(Protocol):
    """What `library_matmul` is: the seam that tests put another in."""

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, splits: int, rows_at_once: int
    ) -> torch.Tensor:
        """Product of x [M, K] and weight [N, K] transposed."""


class GemmTable:
    """Multiplies by weights in the fixed order, as fast as was found."""

    def __init__(
        self, shapes: Iterable[ShapeChoices] = (), *, library: Library = library_matmul
    ) -> None:
        """Shapes without choices run the first candidate."""
        self.shapes = tuple(shapes)
        self._choices = {(s.num_outputs, s.num_inputs, s.dtype): s.choices for s in self.shapes}
        self._library = library

    def product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Product of x [M, K], contiguous, and weight [N, K] transposed: [M, N] in x's dtype."""
        num_rows, (num_outputs, num_inputs) = len(x), weight.shape
        splits = num_splits(num_inputs, num_outputs)
        choices = self._choices.get(shape_of(weight))
        if choices is None:
            tile = candidates(num_rows, splits, weight.dtype)[0]
        else:
            index = bisect_left(choices, num_rows, key=lambda choice: choice.num_rows)
            choice = choices[min(index, len(choices) - 1)]
            seen = choice.library_rows and choice.num_rows == num_rows
            if seen and _is_plain(x) and _is_plain(weight):
                return self._library(x, weight, splits, choice.library_rows)
            tile = choice.tile
        return fixed_order_matmul(x, weight, tile, splits)

    def describe(self) -> tuple[ProductChoice, ...]:
        """What runs, for status and logs."""
        return tuple(
            ProductChoice(
                num_outputs=shape.num_outputs,
                num_inputs=shape.num_inputs,
                num_rows=choice.num_rows,
                kernel=_kernel_name(shape, choice),
                us=choice.us,
                ratio=choice.us / choice.library_us,
            )
            for shape in self.shapes
            for choice in shape.choices
        )


class FreeTable(GemmTable):
    """Multiplies as torch does, in whatever order."""

    def product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Like `GemmTable.product`, but a row's bits may depend on its neighbours."""
        return torch.nn.functional.linear(x, weight)


def default_table() -> GemmTable:
    """A table that measured nothing: the first candidate everywhere."""
    return GemmTable()


def free_table() -> GemmTable:
    """A table for free arithmetic."""
    return FreeTable()


def _kernel_name(shape: ShapeChoices, choice: Choice) -> str:
    if not choice.library_rows:
        return choice.tile.name
    splits = num_splits(shape.num_inputs, shape.num_outputs)
    times = splits * -(-choice.num_rows // choice.library_rows)
    return "cublas" if times == 1 else f"cublas, {times} calls"


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and tensor.data_ptr() % _ALIGNMENT == 0
