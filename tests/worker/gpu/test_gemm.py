"""Matrix products in a fixed order: right, and chosen by time only among equal bits."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from nightjar.errors import EngineFailure
from worker.gpu import gemm_cache
from worker.gpu.gemm_choice import choose_gemms
from worker.gpu.gemm_library import library_matmul
from worker.gpu.gemm_meter import Product
from worker.gpu.gemm_table import GemmTable, Library, default_table, free_table
from worker.kernels.gemm import fixed_order_matmul, num_splits, reference_matmul, split_size
from worker.kernels.gemm_tiles import Join, Tile, candidates

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ERROR = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal values on the device that kernels run on."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Size of the difference over the size of what is wanted, in float64."""
    return float((got.double() - wanted).norm() / wanted.norm())


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """New tensors hold NaN until a kernel writes them."""
    plain: Callable[..., torch.Tensor] = torch.Tensor.new_empty

    def new_empty(*args: object, **kwargs: object) -> torch.Tensor:
        made = plain(*args, **kwargs)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("join", ["reduce", "last", "serial"])
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"), [(1, 33, 100), (2, 64, 256), (17, 40, 513), (33, 31, 128)]
)
def test_product_is_right_at_odd_sizes(
    rows: int, outputs: int, inputs: int, splits: int, join: Join
) -> None:
    """A product has float32's accuracy whatever its sizes, splits and way of joining them."""
    x, weight = random(rows, inputs), random(outputs, inputs, seed=1)
    got = fixed_order_matmul(x, weight, Tile(16, 32, 64, 4, 3, join), splits)
    assert relative_error(got, reference_matmul(x, weight, splits)) < ERROR[torch.float32]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_product_rounds_once_to_half_types(dtype: torch.dtype) -> None:
    """Inputs of 16 bits are summed in float32 and rounded at the end."""
    x, weight = random(5, 600, dtype=dtype), random(48, 600, seed=1, dtype=dtype)
    for splits in (1, 4):
        got = fixed_order_matmul(x, weight, Tile(16, 64, 64, 4, 3, "last"), splits)
        assert got.dtype is dtype
        assert relative_error(got, reference_matmul(x, weight, splits)) < ERROR[dtype]


@pytest.mark.usefixtures("poisoned")
def test_many_row_tiles_are_each_written_once() -> None:
    """More tiles of rows than run side by side cover all rows."""
    x, weight = random(160, 64), random(48, 64, seed=1)
    got = fixed_order_matmul(x, weight, Tile(16, 16, 64, 4, 3), 1)
    assert relative_error(got, reference_matmul(x, weight, 1)) < ERROR[torch.float32]


def test_last_comer_leaves_its_counters_as_it_found_them() -> None:
    """A second product that joins by its last comer is as right as the first."""
    weight = random(40, 512, seed=1)
    for seed in range(2):
        x = random(20, 512, seed=seed)
        got = fixed_order_matmul(x, weight, Tile(16, 16, 64, 4, 3, "last"), 4)
        assert relative_error(got, reference_matmul(x, weight, 4)) < ERROR[torch.float32]


def test_rows_apart_in_memory_are_read_where_they_lie() -> None:
    """An input may be columns of a wider tensor."""
    wide, weight = random(3, 200), random(20, 72, seed=1)
    x = wide[:, 16:88]
    got = fixed_order_matmul(x, weight, Tile(16, 32, 64, 4, 3), 1)
    assert relative_error(got, reference_matmul(x, weight, 1)) < ERROR[torch.float32]


def test_no_rows_give_no_rows() -> None:
    """An empty product is empty."""
    got = fixed_order_matmul(random(0, 64), random(20, 64), Tile(16, 32, 64, 4, 3), 1)
    assert got.shape == (0, 20)


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (random(2, 64), random(8, 32)),
        (random(2, 64), random(8, 64, dtype=torch.bfloat16)),
        (random(2, 64).double(), random(8, 64).double()),
        (random(64, 2).T, random(8, 64)),
        (random(2, 64), random(64, 8).T),
    ],
    ids=["sizes", "types", "float64", "columns", "transposed"],
)
def test_what_does_not_fit_is_refused(x: torch.Tensor, weight: torch.Tensor) -> None:
    """Tensors that the kernel would misread are refused with a sentence."""
    with pytest.raises(EngineFailure, match="product"):
        fixed_order_matmul(x, weight, Tile(16, 32, 64, 4, 3), 1)


def test_splits_follow_the_shape_alone() -> None:
    """Only long, narrow weights are split, at borders that every tile's steps divide."""
    shapes = {
        (18944, 3584): 4,
        (3584, 37888): 1,
        (3584, 3584): 1,
        (4864, 896): 4,
        (1536, 576): 1,
        (4608, 1024): 4,
        (8192, 2048): 4,
    }
    shapes |= {(4095, 100): 1, (16384, 4097): 1}
    for (inputs, outputs), splits in shapes.items():
        assert num_splits(inputs, outputs) == splits
    assert split_size(18944, 4) == 4736
    assert split_size(300, 4) == 128
    for dtype in (torch.bfloat16, torch.float32):
        for rows in (1, 16, 17, 64, 200, 4000):
            for splits in (1, 4):
                tiles = candidates(rows, splits, dtype)
                assert tiles[0].join == "reduce"
                assert len(set(tiles)) == len(tiles)
                assert all(split_size(1, 1) % tile.block_k == 0 for tile in tiles)
                assert all(tile.shared_bytes(dtype) <= 227 * 1024 for tile in tiles)


class FakeMeter:
    """Says how long a product takes; the library's comes under None."""

    def __init__(self, times: dict[Tile | None, float], failing: Tile | None = None) -> None:
        self.times, self.failing = times, failing
        self.num_timed = self.num_compiled = 0

    def compile(self, jobs: Sequence[Callable[[], None]]) -> list[Exception | None]:
        """Count jobs; all succeed."""
        self.num_compiled += len(jobs)
        return [None] * len(jobs)

    def us(self, product: Product, x: torch.Tensor, weight: torch.Tensor) -> float:
        """Look the time up."""
        self.num_timed += 1
        tile = getattr(product, "keywords", {}).get("tile")
        if tile is not None and tile == self.failing:
            raise RuntimeError("out of shared memory")
        return self.times.get(tile, 50.0)


WEIGHT = random(32, 64, seed=3)
FIRST, SECOND = candidates(2, 1, torch.float32)[:2]


def exact_library(
    x: torch.Tensor, weight: torch.Tensor, splits: int = 1, rows_at_once: int = 0
) -> torch.Tensor:
    """Stands in for a library that adds in the fixed order."""
    return fixed_order_matmul(x, weight, FIRST, splits)


def other_library(
    x: torch.Tensor, weight: torch.Tensor, splits: int, rows_at_once: int
) -> torch.Tensor:
    """Stands in for a library that adds in another order."""
    return (x.double() @ weight.double().T).float() * (1 + 2**-20)


def choose(
    meter: FakeMeter, library: Library, *, cache: Path | None = None, key: str = "a"
) -> GemmTable:
    """Choose for 2 and 8 rows, two weights of one shape."""
    stages: list[tuple[str, str]] = []
    table = choose_gemms(
        [WEIGHT, WEIGHT.clone()],
        [8, 2, 2],
        cache=cache,
        progress=lambda stage, detail: stages.append((stage, detail)),
        key=key,
        meter=meter,
        library=library,
    )
    assert stages in ([], [("products", "64 -> 32, 1 of 1")])
    return table


def kernels(table: GemmTable) -> list[str]:
    """Names of what was chosen."""
    return [choice.kernel for choice in table.describe()]


def test_the_fastest_tile_is_chosen_where_the_library_is_slower() -> None:
    """Time decides between tiles; weights of one shape share the choice."""
    table = choose(FakeMeter({None: 40.0, FIRST: 30.0, SECOND: 20.0}), exact_library)
    assert [choice.num_rows for choice in table.describe()] == [2, 8]
    assert kernels(table) == [SECOND.name, SECOND.name]
    assert [choice.ratio for choice in table.describe()] == [0.5, 0.5]
    x = random(2, 64)
    assert relative_error(table.product(x, WEIGHT), reference_matmul(x, WEIGHT, 1)) < 1e-6


def test_the_library_is_chosen_for_rows_it_was_seen_with() -> None:
    """A faster library of equal bits runs at the buckets, and a tile at all other sizes."""
    calls: list[int] = []

    def library(
        x: torch.Tensor, weight: torch.Tensor, splits: int, rows_at_once: int
    ) -> torch.Tensor:
        calls.append(len(x))
        return exact_library(x, weight)

    table = choose(FakeMeter({None: 10.0}), library)
    assert kernels(table) == ["cublas", "cublas"]
    calls.clear()
    expected = exact_library(random(9, 64), WEIGHT)
    for rows in (1, 2, 5, 8, 9):
        assert torch.equal(table.product(random(9, 64)[:rows], WEIGHT), expected[:rows])
    shifted = random(9, 65)[:2, 1:]
    assert (
        relative_error(table.product(shifted, WEIGHT), reference_matmul(shifted, WEIGHT, 1))
        < (ERROR[torch.float32])
    )
    assert calls == [2, 8]


def test_a_library_that_keeps_the_order_of_fewer_rows_multiplies_so_many_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where all rows at once are added otherwise, parts of them run, if they are fast."""
    monkeypatch.setattr("worker.gpu.gemm_choice._SLICES", (6, 4))
    monkeypatch.setattr("worker.gpu.gemm_choice._LEAST_IN_PARTS", 8)

    def library(
        x: torch.Tensor, weight: torch.Tensor, splits: int, rows_at_once: int
    ) -> torch.Tensor:
        right = min(rows_at_once, len(x)) <= 4
        return (exact_library if right else other_library)(x, weight, splits, rows_at_once)

    table = choose(FakeMeter({None: 10.0}), library)
    assert [(c.num_rows, c.kernel) for c in table.describe()] == [
        (2, "cublas"),
        (8, "cublas, 2 calls"),
    ]
    x = random(8, 64)
    assert torch.equal(table.product(x, WEIGHT), exact_library(x, WEIGHT))


@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.parametrize("rows_at_once", [3, 5, 7, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_library_cut_by_rows_and_splits_multiplies(
    dtype: torch.dtype, rows_at_once: int, splits: int
) -> None:
    """Parts of rows and of inputs make the whole product, the last ones shorter."""
    x, weight = random(10, 600).to(dtype), random(24, 600).to(dtype)
    got = library_matmul(x, weight, splits, rows_at_once)
    assert got.dtype is dtype
    assert relative_error(got, reference_matmul(x, weight, splits)) < ERROR[dtype]


def test_a_library_of_other_bits_is_refused_however_fast() -> None:
    """A last bit that differs rules cuBLAS out."""
    table = choose(FakeMeter({None: 0.1}), other_library)
    assert "cublas" not in kernels(table)


def test_a_tile_that_fails_is_left_out() -> None:
    """A tile that raises is not chosen; without any tile there is no product."""
    table = choose(FakeMeter({FIRST: 1.0, SECOND: 2.0}, failing=FIRST), exact_library)
    assert kernels(table) == [SECOND.name, SECOND.name]

    class NothingCompiles(FakeMeter):
        def compile(self, jobs: Sequence[Callable[[], None]]) -> list[Exception | None]:
            """Fail every job."""
            return [RuntimeError("no compiler") for _ in jobs]

    with pytest.raises(EngineFailure, match="no kernel multiplies"):
        choose(NothingCompiles({}), exact_library)


def test_a_tile_of_other_bits_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles too are held to the order, not trusted."""

    def crooked(x: torch.Tensor, weight: torch.Tensor, tile: Tile, splits: int) -> torch.Tensor:
        return fixed_order_matmul(x, weight, tile, splits) + (tile == SECOND)

    monkeypatch.setattr("worker.gpu.gemm_choice.fixed_order_matmul", crooked)
    table = choose(FakeMeter({SECOND: 1.0}), other_library)
    assert kernels(table) == [FIRST.name, FIRST.name]


def test_choices_are_kept_and_not_timed_again(tmp_path: Path) -> None:
    """A second start reads the first one's choices; another key does not."""
    first = choose(FakeMeter({SECOND: 3.0}), exact_library, cache=tmp_path / "products")
    meter = FakeMeter({FIRST: 1.0})
    again = choose(meter, exact_library, cache=tmp_path / "products")
    assert again.describe() == first.describe()
    assert meter.num_timed == 0
    assert meter.num_compiled == 1
    other = choose(meter, exact_library, cache=tmp_path / "products", key="b")
    assert kernels(other) == [FIRST.name, FIRST.name]
    assert len(list((tmp_path / "products").iterdir())) == 2


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: b"[]",
        lambda data: data.replace(b'"block_m":16', b'"block_m":48'),
        lambda data: data.replace(b'"num_rows":8', b'"num_rows":9'),
        lambda data: data.replace(b'"library_rows":0', b'"library_rows":"no"'),
        lambda data: data.replace(b'"library_us":50.0', b'"library_us":0.0'),
    ],
)
def test_a_spoilt_file_is_ignored(
    tmp_path: Path, spoil: Callable[[bytes], bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever a cache file holds, the choice is then made anew, and kept."""
    first = choose(FakeMeter({SECOND: 3.0}), exact_library, cache=tmp_path)
    (file,) = tmp_path.iterdir()
    good = file.read_bytes()
    file.write_bytes(spoil(good))
    assert file.read_bytes() != good
    meter = FakeMeter({SECOND: 3.0})
    assert choose(meter, exact_library, cache=tmp_path).describe() == first.describe()
    assert meter.num_timed > 0
    assert file.read_bytes() == good


def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    """Without a place for the choices they are used all the same."""
    (tmp_path / "file").write_text("")
    table = choose(FakeMeter({}), exact_library, cache=tmp_path / "file" / "folder")
    assert len(table.describe()) == 2


@pytest.mark.skipif(DEVICE.type == "cuda", reason="kernels run on the GPU here")
def test_without_a_gpu_nothing_is_measured(tmp_path: Path) -> None:
    """Tensors of a CPU run the first candidate, and no file is written."""
    table = choose_gemms([WEIGHT], [2], cache=tmp_path, progress=print, key="a")
    assert table.describe() == default_table().describe() == ()
    assert not list(tmp_path.iterdir())
    x = random(3, 64)
    assert torch.equal(table.product(x, WEIGHT), default_table().product(x, WEIGHT))
    assert relative_error(table.product(x, WEIGHT), reference_matmul(x, WEIGHT, 1)) < 1e-6


def test_free_arithmetic_is_torchs_own() -> None:
    """The free table multiplies as torch does and describes nothing."""
    x = random(3, 64)
    assert torch.equal(free_table().product(x, WEIGHT), torch.nn.functional.linear(x, WEIGHT))
    assert free_table().describe() == ()


def test_file_names_tell_shapes_rows_and_keys_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choices for other weights, rows, builds or settings of cuBLAS lie in other files."""
    names = {
        gemm_cache.file_name([WEIGHT], [2], "a"),
        gemm_cache.file_name([WEIGHT], [2, 4], "a"),
        gemm_cache.file_name([WEIGHT], [2], "b"),
        gemm_cache.file_name([WEIGHT.bfloat16()], [2], "a"),
        gemm_cache.file_name([WEIGHT[:16]], [2], "a"),
    }
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    names.add(gemm_cache.file_name([WEIGHT], [2], "a"))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"99 of {name}")
    names.add(gemm_cache.file_name([WEIGHT], [2], "a"))
    assert len(names) == 7
