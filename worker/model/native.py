"""The compiled build's attention: compiles `native.cpp`, and calls it.

`attention.attend` is its reference: the same keys, other bits. A build uses one of them, which
its fingerprint tells.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from nightjar.errors import ConfigError
from worker.model.batch import Batch
from worker.model.pool import KVCache, KVGeometry

SOURCE = Path(__file__).with_name("native.cpp")
LIBRARY = "attention.so"
FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-fopenmp", "-shared", "-fPIC", "-std=c++17")
LANES = 16  # head widths and block sizes are multiples of it
MAX_HEAD_DIM = 256
_DTYPES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}


def supports(geometry: KVGeometry) -> bool:
    """Whether the kernel covers these shapes; elsewhere a build keeps the torch attention."""
    head_dim = geometry.head_dim
    fits = head_dim % LANES == 0 and head_dim <= MAX_HEAD_DIM and geometry.block_size % LANES == 0
    return fits and geometry.dtype in _DTYPES


def compile_library(folder: Path) -> None:
    """Compile the kernel for this processor into `folder`.

    Raises:
        ConfigError: There is no C++ compiler, or it fails.
    """
    compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")
    if compiler is None:
        raise ConfigError("a compiled build needs a C++ compiler; install g++, or set CXX")
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{LIBRARY}.{os.getpid()}"
    command = [compiler, *FLAGS, str(SOURCE), "-o", str(part)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"{compiler} failed: {done.stderr.strip()[-500:]}")
    part.replace(folder / LIBRARY)


class _Args(ctypes.Structure):
    """`Args` of native.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "output", "pool")),
        *((name, ctypes.c_void_p) for name in ("tables", "token_rows", "positions", "scratch")),
        *(
            (f"{name}_{axis}_stride", ctypes.c_int64)
            for name in ("query", "key", "value")
            for axis in ("head", "token")
        ),
        *((name, ctypes.c_int64) for name in ("block_stride", "table_width", "scratch_stride")),
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_heads", "num_kv_heads")),
        *((name, ctypes.c_int64) for name in ("head_dim", "block_size", "num_keys", "window")),
        *((name, ctypes.c_double) for name in ("scaling", "softcap")),
    )


@dataclass(frozen=True, kw_only=True)
class _Arrays:
    """What one forward's pointers point to."""

    tables: np.ndarray  # int32 [rows, width]
    token_rows: np.ndarray  # int32 [num_tokens]
    positions: np.ndarray  # int32 [num_tokens]
    scratch: np.ndarray  # float32 [threads, longest context, padded]


class NativeAttention:
    """The kernel over the cache that `prepare` is given: proofs bring one of their own."""

    def __init__(self, folder: Path, geometry: KVGeometry) -> None:
        """Load the library that `compile_library` left in `folder`."""
        library = ctypes.CDLL(str(folder / LIBRARY))
        self._call = getattr(library, f"nightjar_attend_{_DTYPES[geometry.dtype]}")
        self._call.restype = None
        self._args = _Args(
            num_kv_heads=geometry.num_kv_heads,
            head_dim=geometry.head_dim,
            block_size=geometry.block_size,
            block_stride=geometry.block_bytes // geometry.dtype.itemsize,
        )
        self._reference = ctypes.byref(self._args)
        self._cache: KVCache | None = None
        self._layers: list[int] = []  # addresses in the cache
        self._arrays: _Arrays | None = None

    def prepare(self, cache: KVCache, batch: Batch, num_tokens: int) -> None:
        """Lay out a forward over `batch`, whose last token is repeated up to `num_tokens`.

        A repeated token writes the same values to the same slot and reads the same output.
        """
        if cache is not self._cache:
            self._cache, self._layers = cache, [strips.data_ptr() for strips in cache.strips]
        padding = num_tokens - len(batch.input_ids)
        counts = np.diff(batch.query_starts)
        counts[-1] += padding
        positions = np.array(batch.positions + batch.positions[-1:] * padding, dtype=np.int32)
        width = max(map(len, batch.block_tables))
        longest = -(-(int(positions.max()) + 1) // LANES) * LANES
        arrays = _Arrays(
            tables=_padded(batch.block_tables, width),
            token_rows=np.repeat(np.arange(len(counts), dtype=np.int32), counts),
            positions=positions,
            scratch=np.empty((torch.get_num_threads(), longest), dtype=np.float32),
        )
        args = self._args
        args.tables = arrays.tables.ctypes.data
        args.token_rows = arrays.token_rows.ctypes.data
        args.positions = arrays.positions.ctypes.data
        args.scratch = arrays.scratch.ctypes.data
        args.table_width, args.scratch_stride = width, longest
        args.num_tokens = num_tokens
        args.num_keys = int(positions.sum())
        self._arrays = arrays

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float,
        window: int,
        softcap: float,
    ) -> torch.Tensor:
        """Write the tokens' KV, then attend; shapes as in `attention.attend`."""
        args = self._args
        query, key, value = _dense(query), _dense(key), _dense(value)
        _, num_heads, num_tokens, head_dim = query.shape
        output = torch.empty((1, num_tokens, num_heads, head_dim), dtype=query.dtype)
        _, args.query_head_stride, args.query_token_stride, _ = query.stride()
        _, args.key_head_stride, args.key_token_stride, _ = key.stride()
        _, args.value_head_stride, args.value_token_stride, _ = value.stride()
        args.query, args.key, args.value = query.data_ptr(), key.data_ptr(), value.data_ptr()
        args.output, args.pool = output.data_ptr(), self._layers[layer]
        args.num_heads = num_heads
        args.scaling, args.window, args.softcap = scaling, window, softcap
        self._call(self._reference)
        return output


def _dense(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(3) == 1 else x.contiguous()


def _padded(tables: Sequence[Sequence[int]], width: int) -> np.ndarray:
    padded = np.zeros((len(tables), width), dtype=np.int32)
    for row, table in enumerate(tables):
        padded[row, : len(table)] = table
    return padded
