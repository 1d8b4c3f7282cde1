"""Matrix products on a GPU: equal bits whatever the tile, the rows and the neighbours; speed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from worker.gpu.gemm_choice import choose_gemms
from worker.gpu.gemm_library import library_matmul
from worker.gpu.gemm_meter import CudaMeter
from worker.gpu.gemm_table import GemmTable
from worker.kernels.gemm import compile_tile, fixed_order_matmul, num_splits, reference_matmul
from worker.kernels.gemm_tiles import Tile, candidates

pytestmark = pytest.mark.gpu

# Outputs and inputs of the linears of a 7.6B and a 0.5B model, q, k, v and gate, up merged.
QKV, OUT, GATE_UP, DOWN, HEAD = (
    (4608, 3584),
    (3584, 3584),
    (37888, 3584),
    (3584, 18944),
    (152064, 3584),
)
DRAFT = ((1152, 896), (896, 896), (9728, 896), (896, 4864), (151936, 896))
ROWS = (1, 2, 7, 16, 17, 32, 33, 64, 65, 100, 128, 129, 256, 300, 512)
PROOF = Tile(16, 64, 64, 4, 3)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Normal values on the GPU."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def weight_of(shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A weight of the usual scale."""
    return normal(*shape, seed=1, dtype=dtype) * 0.02


def compile_all(x: torch.Tensor, weight: torch.Tensor, rows: tuple[int, ...]) -> None:
    """Compile the candidates for these rows side by side: one by one they would take minutes."""
    splits = num_splits(*reversed(weight.shape))
    tiles = {tile: None for m in rows for tile in candidates(m, splits, weight.dtype)}
    jobs = [partial(compile_tile, x, weight, tile, splits) for tile in (PROOF, *tiles)]
    assert not any(CudaMeter(weight.device).compile(jobs))


@pytest.fixture(autouse=True)
def _as_in_a_worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sums are kept in float32, as a worker sets it; large weights do not outlive their test."""
    matmul = torch.backends.cuda.matmul
    monkeypatch.setattr(matmul, "allow_bf16_reduced_precision_reduction", False)
    yield
    torch.cuda.empty_cache()


@pytest.mark.parametrize("shape", [QKV, OUT, GATE_UP, DOWN, *DRAFT[:4], (513, 9000)])
def test_all_tiles_and_rows_give_equal_bits(shape: tuple[int, int]) -> None:
    """A row's bits are the same from every candidate, for every number of rows around it."""
    weight, x = weight_of(shape), normal(ROWS[-1], shape[1])
    splits = num_splits(shape[1], shape[0])
    compile_all(x, weight, ROWS)
    wanted = fixed_order_matmul(x, weight, PROOF, splits)
    differing = []
    for rows in ROWS:
        for tile in candidates(rows, splits, weight.dtype):
            got = fixed_order_matmul(x[:rows], weight, tile, splits)
            if not torch.equal(got, wanted[:rows]):
                differing.append((rows, tile.name, int((got != wanted[:rows]).sum())))
    assert not differing


def test_the_widest_weight_is_right_to_its_last_output() -> None:
    """A head of 545 million weights gives equal bits from every tile."""
    weight, x = weight_of(HEAD), normal(256, HEAD[1])
    wanted = fixed_order_matmul(x, weight, PROOF, 1)
    exact = reference_matmul(x[:4], weight[-2000:], 1)
    assert (wanted[:4, -2000:].double() - exact).norm() < 2**-8 * exact.norm()
    for rows in (2, 16, 32, 64, 128, 256):
        for tile in candidates(rows, 1, weight.dtype):
            assert torch.equal(fixed_order_matmul(x[:rows], weight, tile, 1), wanted[:rows])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [OUT, (1000, 8200)])
def test_error_is_that_of_one_rounding(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Against float64 a product has float32's error, rounded once to its type."""
    weight, x = weight_of(shape, dtype), normal(70, shape[1], dtype=dtype)
    splits = num_splits(shape[1], shape[0])
    exact = reference_matmul(x, weight, splits)
    compile_all(x, weight, (16, 32, 70))
    bound = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 1e-5}[dtype]
    wanted = fixed_order_matmul(x, weight, PROOF, splits)
    for rows in (1, 16, 32, 70):
        for tile in candidates(rows, splits, dtype):
            got = fixed_order_matmul(x[:rows], weight, tile, splits)
            assert (got.double() - exact[:rows]).norm() < bound * exact[:rows].norm(), tile
            assert torch.equal(got, wanted[:rows]), tile


@pytest.mark.parametrize("shape", [QKV, DOWN])
def test_rows_do_not_know_their_neighbours(shape: tuple[int, int]) -> None:
    """Rows in another order, among NaN and infinity, give the same bits."""
    weight, x = weight_of(shape), normal(64, shape[1])
    splits = num_splits(shape[1], shape[0])
    for tile in candidates(64, splits, weight.dtype):
        wanted = fixed_order_matmul(x, weight, tile, splits)
        order = torch.randperm(64, generator=torch.Generator().manual_seed(0)).cuda()
        assert torch.equal(fixed_order_matmul(x[order], weight, tile, splits), wanted[order])
        spoilt = x.clone()
        spoilt[::2] = float("nan")
        spoilt[2] = float("inf")
        assert torch.equal(fixed_order_matmul(spoilt, weight, tile, splits)[1::2], wanted[1::2])


def test_last_comers_join_in_order_however_programs_race() -> None:
    """A thousand products in graphs, joined by whoever came last, have the reduce kernel's bits."""
    weight = weight_of(DOWN)
    for rows, tile in ((16, Tile(16, 64, 64, 4, 5, "last")), (64, Tile(64, 64, 64, 4, 4, "last"))):
        x = normal(rows, DOWN[1])
        wanted = fixed_order_matmul(x, weight, PROOF, 4)
        fixed_order_matmul(x, weight, tile, 4)
        torch.cuda.synchronize()
        graph, outputs = torch.cuda.CUDAGraph(), []
        with torch.cuda.graph(graph):
            outputs += [fixed_order_matmul(x, weight, tile, 4) for _ in range(20)]
        for _ in range(50):
            for output in outputs:
                output.fill_(float("nan"))
            graph.replay()
            assert all(torch.equal(output, wanted) for output in outputs)


def test_the_library_alone_changes_bits() -> None:
    """The control: torch's own product gives a row other bits for another number of rows."""
    weight, x = weight_of(DOWN), normal(512, DOWN[1])
    library = torch.nn.functional.linear
    wanted = library(x, weight)
    assert any(not torch.equal(library(x[:rows], weight), wanted[:rows]) for rows in ROWS)


@pytest.mark.parametrize("shape", [DOWN, DRAFT[3]])
def test_the_library_adds_splits_as_tiles_do(shape: tuple[int, int]) -> None:
    """Split by split, cuBLAS adds to what it is given, rounding once: some size has equal bits."""
    weight, x = weight_of(shape), normal(2048, shape[1])
    splits = num_splits(shape[1], shape[0])
    wanted = fixed_order_matmul(x, weight, PROOF, splits)
    equal = [
        rows
        for rows in (128, 256, 512, 1024, 1536, 2048)
        if torch.equal(library_matmul(x[:rows], weight, splits, rows), wanted[:rows])
    ]
    print(f"{shape}: cuBLAS in {splits} parts has the order's bits at {equal}")
    assert equal


def test_choices_keep_the_order_and_are_read_again(tmp_path: Path) -> None:
    """Whatever is chosen has the order's bits, in graphs and between buckets, and is kept."""
    weights = [weight_of(QKV), weight_of(OUT), weight_of(DOWN), weight_of((896, 896))]
    buckets = (2, 4, 16, 24, 64, 128, 192, 512)
    stages: list[str] = []

    def choose() -> tuple[GemmTable, float]:
        start = time.perf_counter()
        table = choose_gemms(
            weights,
            buckets,
            cache=tmp_path,
            progress=lambda stage, detail: stages.append(detail),
            key="test",
        )
        return table, time.perf_counter() - start

    table, seconds = choose()
    for choice in table.describe():
        print(choice)
    print(f"chosen in {seconds:.1f} s")
    assert len(stages) == len(weights)
    for weight in weights:
        x, splits = normal(512, weight.shape[1], seed=5), num_splits(*reversed(weight.shape))
        wanted = fixed_order_matmul(x, weight, PROOF, splits)
        for rows in (*buckets, 1, 3, 20, 300):
            assert torch.equal(table.product(x[:rows], weight), wanted[:rows])
        graph, outputs = torch.cuda.CUDAGraph(), []
        with torch.cuda.graph(graph):
            outputs += [table.product(x[:rows], weight) for rows in buckets]
        graph.replay()
        for output in outputs:
            assert torch.equal(output, wanted[: len(output)])
    again, seconds = choose()
    print(f"read in {seconds:.2f} s")
    assert again.describe() == table.describe()
    assert len(stages) == len(weights)


@pytest.mark.parametrize("shape", [QKV, OUT, GATE_UP, DOWN, HEAD, *DRAFT])
def test_small_products_are_as_fast_as_the_library(shape: tuple[int, int]) -> None:
    """At few rows the best tile, its bits fixed, takes at most 1.15 times what cuBLAS takes."""
    weight, x = weight_of(shape), normal(16, shape[1])
    compile_all(x, weight, (16,))
    splits, meter = num_splits(shape[1], shape[0]), CudaMeter(weight.device)
    times = {
        tile: meter.us(partial(fixed_order_matmul, tile=tile, splits=splits), x, weight)
        for tile in candidates(16, splits, weight.dtype)
    }
    library = meter.us(torch.nn.functional.linear, x, weight)
    for tile, us in sorted(times.items(), key=lambda item: item[1]):
        print(f"{shape} {tile.name}: {us:.2f} us, cuBLAS {library:.2f}")
    assert min(times.values()) < 1.15 * library
