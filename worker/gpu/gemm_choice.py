"""Which kernel multiplies by which weights: timed once, with equal bits, and kept on disk.

The order of additions is a rule of the weight's shape (`worker.kernels.gemm.num_splits`); a
tile always keeps it. cuBLAS runs, whole or cut (`worker.gpu.gemm_library`), where it is faster
and was seen to keep it, for that shape and that number of rows alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path

import torch

from nightjar import log
from nightjar.errors import EngineFailure
from worker.gpu import gemm_cache
from worker.gpu.gemm_cache import Choice, ShapeChoices, shape_of
from worker.gpu.gemm_library import library_matmul
from worker.gpu.gemm_meter import CudaMeter, Meter, Product
from worker.gpu.gemm_table import GemmTable, Library
from worker.kernels.gemm import compile_tile, fixed_order_matmul, num_splits, prepare_counters
from worker.kernels.gemm_tiles import Tile, candidates

_CLASSES = (16, 32, 64, 128, 256, 512, 1024, 2048)  # rows up to which one tile is best
_PROOF_TILE = Tile(16, 64, 64, 4, 3)  # whose bits all others must have
_NUM_FINALISTS = 2
# Rows that cuBLAS multiplies at once where all at once is another order. Below the least it is
# not tried in parts: their launches cost more than they gain.
_SLICES = (4096, 2048, 1024, 512)
_LEAST_IN_PARTS = 128


def choose_gemms(
    weights: Iterable[torch.Tensor],
    buckets: Sequence[int],
    *,
    cache: Path | None,
    progress: Callable[[str, str], None],
    key: str,
    meter: Meter | None = None,
    library: Library = library_matmul,
) -> GemmTable:
    """Choose a kernel for each shape of weight and each number of rows.

    Beside the weights it needs memory for copies of one (150 MB, or one if larger) and for
    three results of the most rows.

    Args:
        weights: [N, K], any number of each shape, of one device. Off a GPU nothing is
            measured, unless `meter` is given.
        buckets: Numbers of rows that products will have.
        cache: Folder of earlier choices, or None.
        progress: Told (stage, detail).
        key: What else the choice may depend on.
        meter: Compiles and times; the GPU's by default.
        library: Stands in for `library_matmul` in tests.

    Raises:
        EngineFailure: No kernel multiplies by some weight.
    """
    distinct = list({shape_of(weight): weight.detach() for weight in weights}.values())
    rows = sorted(set(buckets))
    if not distinct or (distinct[0].device.type != "cuda" and meter is None):
        return GemmTable(library=library)
    device = distinct[0].device
    prepare_counters(device)
    meter = meter or CudaMeter(device)
    path = None if cache is None else cache / gemm_cache.file_name(distinct, rows, key)
    with torch.inference_mode():
        shapes = None if path is None else gemm_cache.load(path, distinct, rows)
        if shapes is None:
            shapes = []
            for number, weight in enumerate(distinct, 1):
                place = f"{weight.shape[1]} -> {weight.shape[0]}, {number} of {len(distinct)}"
                progress("products", place)
                shapes.append(_Chooser(weight, rows, meter, library).choose())
            if path is not None:
                gemm_cache.save(path, shapes)
        _load_kernels(distinct, shapes, meter)
    del meter
    if device.type == "cuda":
        torch.cuda.empty_cache()  # copies and results of timing would stay reserved
    return GemmTable(shapes, library=library)


class _Chooser:
    """Chooses for one weight."""

    def __init__(
        self, weight: torch.Tensor, rows: Sequence[int], meter: Meter, library: Library
    ) -> None:
        self.weight, self.rows, self.meter, self.library = weight, rows, meter, library
        self.num_outputs, self.num_inputs = weight.shape
        self.splits = num_splits(self.num_inputs, self.num_outputs)
        # Proofs read a normal input, and one with the outlying columns that activations have.
        generator = torch.Generator(weight.device).manual_seed(0)
        size, device = (rows[-1] + 1, self.num_inputs), weight.device
        normal = torch.randn(size, generator=generator, device=device)
        columns, even = normal[:1].exp(), normal[1:]
        self.inputs = [even.to(weight.dtype), (even * columns).to(weight.dtype)]

    def choose(self) -> ShapeChoices:
        """Compile, time and compare."""
        groups = [list(rows) for _, rows in groupby(self.rows, partial(bisect_left, _CLASSES))]
        tiles = [candidates(rows[-1], self.splits, self.weight.dtype) for rows in groups]
        distinct = list(dict.fromkeys(tile for group in tiles for tile in group))
        failed = _compile(self.meter, self.inputs[0][:1], self.weight, distinct)
        choices: list[Choice] = []
        for rows, group in zip(groups, tiles, strict=True):
            choices += self._choose_in(rows, [tile for tile in group if tile not in failed])
        return ShapeChoices(
            num_outputs=self.num_outputs,
            num_inputs=self.num_inputs,
            dtype=str(self.weight.dtype),
            choices=tuple(choices),
        )

    def _choose_in(self, rows: list[int], tiles: list[Tile]) -> Iterator[Choice]:
        """Time all tiles for the most rows of a class, and the best for the others."""
        times = self._times(tiles, rows[-1], prove=True)
        best = sorted(times, key=lambda tile: times[tile])[:_NUM_FINALISTS]
        for num_rows in rows:
            if num_rows != rows[-1]:
                times = self._times(best, num_rows, prove=False)
            if not times:
                raise EngineFailure(
                    f"no kernel multiplies {num_rows} rows by weights "
                    f"[{self.num_outputs}, {self.num_inputs}] in the fixed order"
                )
            tile = min(times, key=lambda tile: times[tile])
            yield self._against_library(num_rows, tile, times[tile])

    def _against_library(self, num_rows: int, tile: Tile, tile_us: float) -> Choice:
        """The tile, or cuBLAS where it is faster in some way that keeps the order."""
        x = self.inputs[0][:num_rows]
        library_us = self.meter.us(self._in_library(1, num_rows), x, self.weight)
        us, library_rows = tile_us, 0
        for rows_at_once in (num_rows, *(size for size in _SLICES if size < num_rows)):
            product = self._in_library(self.splits, rows_at_once)
            is_whole = self.splits == 1 and rows_at_once == num_rows
            if not is_whole and num_rows < _LEAST_IN_PARTS:
                continue
            taken = library_us if is_whole else self.meter.us(product, x, self.weight)
            if taken < us and self._keeps(product, num_rows):
                us, library_rows = taken, rows_at_once
                if is_whole:
                    break
        return Choice(
            num_rows=num_rows,
            tile=tile,
            tile_us=tile_us,
            library_us=library_us,
            us=us,
            library_rows=library_rows,
        )

    def _in_library(self, splits: int, rows_at_once: int) -> Product:
        return partial(self.library, splits=splits, rows_at_once=rows_at_once)

    def _times(self, tiles: Iterable[Tile], num_rows: int, *, prove: bool) -> dict[Tile, float]:
        """Microseconds of those that run and, where asked, are seen to keep the order."""
        times = {tile: self._time(tile, num_rows, prove=prove) for tile in tiles}
        return {tile: us for tile, us in times.items() if us is not None}

    def _time(self, tile: Tile, num_rows: int, *, prove: bool) -> float | None:
        product = partial(fixed_order_matmul, tile=tile, splits=self.splits)
        try:
            us = self.meter.us(product, self.inputs[0][:num_rows], self.weight)
            if not prove or self._keeps(product, num_rows):
                return us
        except Exception as error:
            # For example too little shared memory; whatever it is, another tile may run.
            log.get().warning(
                "a product's tile does not run", tile=tile.name, weight=self._name, error=str(error)
            )
        else:
            log.get().warning("a product's tile adds otherwise", tile=tile.name, weight=self._name)
        return None

    def _keeps(self, product: Product, num_rows: int) -> bool:
        """Whether a product's bits are those of the fixed order."""
        return all(
            _same_bits(
                product(x[:num_rows], self.weight),
                fixed_order_matmul(x[:num_rows], self.weight, _PROOF_TILE, self.splits),
            )
            for x in self.inputs
        )

    @property
    def _name(self) -> str:
        return f"{self.num_inputs} -> {self.num_outputs}"


def _compile(
    meter: Meter, x: torch.Tensor, weight: torch.Tensor, tiles: Sequence[Tile]
) -> set[Tile]:
    """Compile tiles side by side; those that failed."""
    splits = num_splits(weight.shape[1], weight.shape[0])
    jobs = [partial(compile_tile, x, weight, tile, splits) for tile in tiles]
    errors = dict(zip(tiles, meter.compile(jobs), strict=True))
    for tile, error in errors.items():
        if error:
            log.get().warning("a product's tile does not compile", tile=tile.name, error=str(error))
    return {tile for tile, error in errors.items() if error}


def _load_kernels(
    weights: Sequence[torch.Tensor], shapes: Sequence[ShapeChoices], meter: Meter
) -> None:
    """Compile what the choices need and launch it once: captures must not load code."""
    for weight, shape in zip(weights, shapes, strict=True):
        x = weight.new_zeros(1, shape.num_inputs)
        tiles = list(dict.fromkeys(choice.tile for choice in shape.choices))
        _compile(meter, x, weight, tiles)
        for tile in tiles:
            fixed_order_matmul(x, weight, tile, num_splits(shape.num_inputs, shape.num_outputs))
    if weights[0].device.type == "cuda":
        torch.cuda.synchronize(weights[0].device)  # whatever stream runs products next


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    integers = torch.int32 if a.dtype is torch.float32 else torch.int16
    return torch.equal(a.view(integers), b.view(integers))
