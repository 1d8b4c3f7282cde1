"""Between our operators an eager forward on a device gives a row the same bits in any batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from model_families import family_folder
from tiny import TinyModels

from worker.config import WorkerConfig
from worker.gpu.row_wise import RowWise
from worker.kernels.row_mean import reference_row_mean, row_mean
from worker.model.build import build_models
from worker.model.forward import ModelForward
from worker.model.linear import pack, replace_linears
from worker.model.loading import attach, load_model, read_config
from worker.model.runtime import new_runtime, release_runtime

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def values(num_rows: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Squares, as a norm averages, of far apart sizes; the first rows are always the same."""
    generator = torch.Generator().manual_seed(width)
    drawn = torch.randn(4096, width, generator=generator)[:num_rows]
    return (drawn * torch.logspace(-2, 2, width)).pow(2).to(DEVICE, dtype)


@pytest.mark.parametrize("width", [1, 3, 64, 257, 576, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_means_are_those_of_float64(width: int, dtype: torch.dtype) -> None:
    """Rows of any number, also of none, and of any width."""
    for num_rows in (0, 1, 19):
        drawn = values(num_rows, width, dtype)
        mean = row_mean(drawn, keepdim=True)
        assert (mean.shape, mean.dtype) == ((num_rows, 1), dtype)
        torch.testing.assert_close(mean, reference_row_mean(drawn, keepdim=True))
    several = values(6, width, dtype).view(2, 3, width)[:, 1:]
    expected = reference_row_mean(several, keepdim=False)
    torch.testing.assert_close(row_mean(several, keepdim=False), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [576, 896, 3584])
def test_bits_of_a_mean_are_its_rows_own(width: int) -> None:
    """On a GPU no number of rows changes a bit; by torch's own mean some numbers do."""
    whole = values(4096, width)
    mean, theirs = row_mean(whole, keepdim=False), whole.mean(-1)
    differ = 0
    for num_rows in (1, 2, 3, 4, 8, 17, 64, 200, 1000):
        for first in (0, 5, 1021):
            part = whole[first : first + num_rows]
            assert torch.equal(row_mean(part, keepdim=False), mean[first : first + num_rows])
            differ += int((part.mean(-1) != theirs[first : first + num_rows]).sum())
    assert differ > 0


def watched(function: Callable[[torch.Tensor], object]) -> tuple[set[str], object]:
    """What a function of a row-major matrix is doubted for, and its result."""
    mode = RowWise()
    with mode:
        result = function(values(5, 48))
    return mode.doubtful, result


def test_means_over_rows_are_ours() -> None:
    """Whatever their spelling; dtype, and whether the dimension stays, are as torch has them."""
    drawn = values(5, 48)
    spellings: list[tuple[Callable[[torch.Tensor], object], bool]] = [
        (lambda x: x.mean(-1), False),
        (lambda x: x.mean(dim=1, keepdim=True), True),
        (lambda x: torch.mean(x, [1], keepdim=True), True),
        (lambda x: x.bfloat16().mean(-1, dtype=torch.float32), False),
    ]
    for number, (spelling, keepdim) in enumerate(spellings):
        doubtful, mean = watched(spelling)
        own = drawn.bfloat16().float() if number == 3 else drawn
        assert not doubtful
        assert isinstance(mean, torch.Tensor)
        assert torch.equal(mean, row_mean(own, keepdim=keepdim))


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("aten.sum.dim_IntList", lambda x: x.sum(-1)),
        ("aten.mean.dim", lambda x: x.mean(0)),
        ("aten.mean.default", lambda x: x.mean()),
        ("aten.mm.default", lambda x: x @ x.T),
        ("aten._softmax.default", lambda x: torch.softmax(x, -1)),
        ("aten.cumsum.default", lambda x: x.cumsum(-1)),
        ("aten.var.correction", lambda x: x.var(-1)),
        ("aten.index_add.default", lambda x: x.index_add(0, torch.tensor([0]), x[:1])),
    ],
)
def test_what_adds_up_is_named(name: str, function: Callable[[torch.Tensor], object]) -> None:
    """Sums whose order torch chooses by shape are doubted by name."""
    assert name in watched(function)[0]


def test_what_adds_nothing_is_not_doubted() -> None:
    """Views, copies, pointwise operators, whole numbers, norms of one row, products of one term."""

    def steps(x: torch.Tensor) -> torch.Tensor:
        angles = x[:, :1] @ x[:1, :4]
        turned = torch.cat([angles.sin(), angles.cos()], -1)
        ids = torch.arange(5, device=x.device).cumsum(0).clamp(max=4)
        normed = torch.nn.functional.layer_norm(x, [48])
        return torch.nn.functional.silu(normed[ids] * turned.repeat(1, 6)).to(torch.bfloat16)

    assert watched(steps)[0] == set()


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2", "gpt_neox", "phi3"])
def test_families_are_exact_by_what_they_call(tmp_path: Path, family: str) -> None:
    """Nothing is doubted that these architectures call between our operators."""
    folder = family_folder(tmp_path, family)
    model = load_model(folder, read_config(folder), torch.float32, device=torch.device("cpu"))
    runtime = new_runtime("watched", exact=True)  # without a cache, attention gives zeros
    attach(model, runtime.name)
    replace_linears(model, runtime, merge=True)
    pack(runtime, model, keep_plain=True)
    mode, ids = RowWise(), torch.tensor([[3, 5, 7]])
    with torch.inference_mode(), mode:
        model(input_ids=ids, position_ids=torch.tensor([[0, 1, 2]]), use_cache=False)
    release_runtime(runtime)
    assert mode.doubtful == set()


def test_a_forward_that_calls_what_is_doubted_is_not_exact(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proof names the operator; --arithmetic=auto falls back to free arithmetic."""
    monkeypatch.setattr(ModelForward, "doubtful", {"aten.sum.dim_IntList"})
    config = WorkerConfig(build="eager", arithmetic="auto", num_threads=1, num_blocks=24)
    models = build_models(config, tiny.target, None, lambda stage, detail: None)
    assert models.arithmetic == "free"
    assert "aten.sum.dim_IntList, whose order of additions may depend" in models.arithmetic_reason
    models.close()
