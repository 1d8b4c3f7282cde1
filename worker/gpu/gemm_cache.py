"""Choices of kernels for matrix products on disk, so that a worker times them once."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
import triton

from nightjar import log
from worker.gpu import gemm_library
from worker.kernels import gemm, gemm_tiles
from worker.kernels.gemm import num_splits
from worker.kernels.gemm_tiles import Tile, candidates

Shape = tuple[int, int, str]  # outputs, inputs, dtype
_LIBRARIES = ("nvidia-cublas", "nvidia-cublas-cu12")
_SETTINGS = ("CUBLAS", "DISABLE_ADDMM", "NVIDIA_TF32", "TORCH_ALLOW_TF32", "TORCH_BLAS")
_SOURCES = (__file__, gemm.__file__, gemm_tiles.__file__, gemm_library.__file__)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What was measured for one number of rows; times in microseconds."""

    num_rows: int
    tile: Tile
    tile_us: float
    library_us: float  # of cuBLAS as it likes
    us: float  # of what runs
    library_rows: int = 0  # rows that cuBLAS multiplies at once; 0: the tile runs


@dataclass(frozen=True, kw_only=True)
class ShapeChoices:
    """All choices for weights of one shape, ascending in rows."""

    num_outputs: int
    num_inputs: int
    dtype: str
    choices: tuple[Choice, ...]


def shape_of(weight: torch.Tensor) -> Shape:
    """By which weights share a choice."""
    return weight.shape[0], weight.shape[1], str(weight.dtype)


def file_name(weights: Sequence[torch.Tensor], rows: Sequence[int], key: str) -> str:
    """Name made of all that times, or cuBLAS's order, could depend on."""
    device = weights[0].device
    matmul = torch.backends.cuda.matmul
    parts = [
        key,
        [shape_of(weight) for weight in weights],
        list(rows),
        torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        torch.__version__,
        triton.__version__,
        matmul.allow_bf16_reduced_precision_reduction,
        matmul.allow_fp16_reduced_precision_reduction,
        _library(),
        [hashlib.sha256(Path(source).read_bytes()).hexdigest() for source in _SOURCES],
    ]
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:24]
    return f"gemm-{digest}.json"


def _library() -> list[str]:
    """The version of cuBLAS, which torch may not have come with, and what is set for it."""
    versions = []
    for name in _LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{name} {importlib.metadata.version(name)}")
    named = (name for name in sorted(os.environ) if name.startswith(_SETTINGS))
    return [*versions, *(f"{name}={os.environ[name]}" for name in named)]


def load(
    path: Path, weights: Sequence[torch.Tensor], rows: Sequence[int]
) -> list[ShapeChoices] | None:
    """Earlier choices for exactly these weights and rows, if there are any."""
    if not path.exists():
        return None
    try:
        shapes = msgspec.json.decode(path.read_bytes(), type=list[ShapeChoices])
    except (OSError, msgspec.MsgspecError) as error:
        log.get().warning("choices of products are ignored", file=str(path), error=str(error))
        return None
    named = [(shape.num_outputs, shape.num_inputs, shape.dtype) for shape in shapes]
    fits = named == [shape_of(weight) for weight in weights] and all(
        [choice.num_rows for choice in shape.choices] == list(rows) for shape in shapes
    )
    known = fits and all(
        choice.tile in candidates(choice.num_rows, splits, weight.dtype)
        and min(choice.tile_us, choice.library_us, choice.us) > 0 <= choice.library_rows
        for shape, weight in zip(shapes, weights, strict=True)
        for splits in [num_splits(shape.num_inputs, shape.num_outputs)]
        for choice in shape.choices
    )
    if not known:
        log.get().warning("choices of products are ignored", file=str(path), error="other content")
        return None
    return shapes


def save(path: Path, shapes: Sequence[ShapeChoices]) -> None:
    """Write in one move; a worker without a cache folder serves all the same."""
    part = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(msgspec.json.encode(shapes))
        part.replace(path)
    except OSError as error:
        log.get().warning("choices of products are not kept", file=str(path), error=str(error))
