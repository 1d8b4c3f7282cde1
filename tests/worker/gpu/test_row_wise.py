"""Between our operators an eager forward on a device gives a row the same bits in any batch."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from model_families import family_folder
from tiny import TinyModels

from nightjar.errors import ModelRefused
from worker.config import WorkerConfig
from worker.gpu import row_wise
from worker.gpu.row_wise import RowWise
from worker.kernels.row_mean import reference_row_mean, row_mean
from worker.model import build, compiled
from worker.model.build import build_models
from worker.model.device import Placement
from worker.model.forward import ModelForward
from worker.model.linear import pack, replace_linears
from worker.model.loading import attach, load_model, read_config
from worker.model.proof import MAX_WIDTH, NUM_CHECKED, _filling
from worker.model.runtime import new_runtime, release_runtime
from worker.model.self_check import Finding

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
    """On a GPU neither the number of rows nor their place in memory changes a bit.

    By torch's own mean some numbers do.
    """
    whole = values(4096, width)
    mean, theirs = row_mean(whole, keepdim=False), whole.mean(-1)
    differ = 0
    for num_rows in (1, 2, 3, 4, 8, 17, 64, 200, 1000):
        for first in (0, 5, 1021):
            part = whole[first : first + num_rows]
            assert torch.equal(row_mean(part, keepdim=False), mean[first : first + num_rows])
            differ += int((part.mean(-1) != theirs[first : first + num_rows]).sum())
    assert differ > 0
    moved = torch.empty(whole.numel() + 1, device=DEVICE)[1:].view_as(whole).copy_(whole)
    assert torch.equal(row_mean(moved, keepdim=False), mean)


def watched(function: Callable[[torch.Tensor], object]) -> tuple[set[str], object]:
    """What a function of a row-major matrix is doubted for, and its result."""
    mode = RowWise()
    drawn = values(5, 48)
    with torch.inference_mode(), mode:  # where operators made of others are seen whole
        result = function(drawn)
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
        ("aten.mean.dim", lambda x: x.double().mean(-1)),
        ("aten.matmul.default", lambda x: x @ x.T),
        ("aten.linear.default", lambda x: torch.nn.functional.linear(x, x)),
        ("aten.softmax.int", lambda x: torch.softmax(x, -1)),
        ("aten.cumsum.default", lambda x: x.cumsum(-1)),
        ("aten.var.dim", lambda x: x.var(-1)),
        ("aten.sum.dim_IntList", lambda x: torch.complex(x, x).sum(-1)),
        ("aten.index_add.default", lambda x: x.index_add(0, torch.tensor([0]), x[:1])),
    ],
)
def test_what_adds_up_is_named(name: str, function: Callable[[torch.Tensor], object]) -> None:
    """Sums whose order torch chooses by shape are doubted by name."""
    assert name in watched(function)[0]


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("aten.amax.default", lambda x: x.amax()),
        ("aten.max.default", lambda x: x.max()),
        ("aten.max.dim", lambda x: x.max(0)),
        ("aten.argmax.default", lambda x: x.argmax()),
        ("aten.sort.default", lambda x: x.sort(0)),
        ("aten.topk.default", lambda x: x.topk(2, 0)),
    ],
)
def test_what_compares_rows_is_named(name: str, function: Callable[[torch.Tensor], object]) -> None:
    """A scale taken from the whole batch, say, makes a row depend on its neighbours."""
    assert name in watched(function)[0]


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_norms_of_mixed_dtypes_take_our_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are made of several operators, a mean among them."""
    calls: list[torch.Size] = []

    def recorded(x: torch.Tensor, *, keepdim: bool) -> torch.Tensor:
        calls.append(x.shape)
        return row_mean(x, keepdim=keepdim)

    monkeypatch.setattr(row_wise, "row_mean", recorded)
    weight = torch.linspace(0.5, 2, 48, device=DEVICE)

    def norm(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x.bfloat16(), [48], weight)

    doubtful, normed = watched(norm)
    assert doubtful == set()
    assert calls == [(5, 48)]
    torch.testing.assert_close(normed, norm(values(5, 48)), rtol=0.01, atol=0.01)


def test_what_adds_nothing_is_not_doubted() -> None:
    """Views, copies, pointwise operators, whole numbers, norms of one row, products of one term."""

    def steps(x: torch.Tensor) -> torch.Tensor:
        angles = x[:, :1] @ x[:1, :4]
        turned = torch.cat([angles.sin(), angles.cos()], -1)
        ids = torch.arange(5, device=x.device).cumsum(0).clamp(max=4)
        normed = torch.nn.functional.layer_norm(x, [48])
        normed = normed / normed.abs().amax(-1, keepdim=True) + normed.max(-1)[0][:, None]
        normed = normed + normed.sort()[0] + normed.topk(3)[1][:, :1].repeat_interleave(48, -1)
        return torch.nn.functional.silu(normed[ids] * turned.repeat(1, 6)).to(torch.bfloat16)

    assert watched(steps)[0] == set()


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2", "gpt_neox", "phi3"])
def test_families_are_exact_by_what_they_call(tmp_path: Path, family: str) -> None:
    """Nothing is doubted that these architectures call between our operators."""
    assert doubted(tmp_path, family) == set()


def doubted(root: Path, family: str) -> set[str]:
    """What an eager forward of an architecture is doubted for."""
    folder = family_folder(root, family)
    model = load_model(folder, read_config(folder), torch.float32, device=torch.device("cpu"))
    runtime = new_runtime("watched", exact=True)  # without a cache, attention gives zeros
    attach(model, runtime.name)
    replace_linears(model, runtime, merge=True)
    pack(runtime, model, keep_plain=True)
    mode, ids = RowWise(), torch.tensor([[3, 5, 7]])
    with torch.inference_mode(), mode:
        model(input_ids=ids, position_ids=torch.tensor([[0, 1, 2]]), use_cache=False)
    release_runtime(runtime)
    return mode.doubtful


def test_a_compiled_forward_is_doubted_for_what_libraries_compute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph leaves a router's product to cuBLAS, whose order is another for other sizes."""
    folder = family_folder(tmp_path, "qwen3_moe", num_hidden_layers=1)
    config = WorkerConfig(
        device="cpu",
        dtype="float32",
        arithmetic="exact",
        num_threads=1,
        num_blocks=8,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        max_model_len=32,
        max_gamma=1,
        proposer="none",
        cache_dir=str(tmp_path),
    )

    untimed: list[bool] = []

    def uncompiled(forward: ModelForward) -> Callable[..., torch.Tensor]:
        def step(*inputs: torch.Tensor) -> torch.Tensor:
            untimed.append(torch._inductor.config.deterministic)
            return ModelForward.eager_step(forward, *inputs)

        return step

    monkeypatch.setattr(torch, "compile", lambda step, **options: step)
    monkeypatch.setattr(compiled, "_own_code", uncompiled)
    finding = Finding(
        num_layers=3, num_heads=4, num_kv_heads=2, head_dim=32, merge=True, fuse=False
    )
    monkeypatch.setattr(build, "check_architecture", lambda *_: finding)
    monkeypatch.setattr(compiled, "_TRACED_BY_KERNELS", (2, 2))
    monkeypatch.setattr(build, "prove_exact", lambda forward, **_: " ".join(forward.doubtful))
    with pytest.raises(ModelRefused, match=r"aten\.linear\.default") as refused:
        build_models(config, folder, None, lambda *_: None, Placement(DEVICE, kernels=True))
    assert "softmax" not in str(refused.value)
    assert untimed == [True]  # what cuts the sums of two starts alike


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


@pytest.mark.parametrize("widest", [1, 3, 5, MAX_WIDTH])
@pytest.mark.parametrize("most", [1, 4, 256])
def test_a_size_is_proved_at_every_width(widest: int, most: int) -> None:
    """Its rows are as wide as asked, or must be to fill it, so that tiles of all heights run."""
    for size in (2, 6, 27, 36, 512, 2304):
        parts = _filling(size, most, NUM_CHECKED, 6, widest, random.Random(0))
        counts = [count for _, _, count in parts]
        assert sum(counts) == min(size, most * MAX_WIDTH)
        assert len(counts) <= most
        assert max(counts) == counts[0] == min(max(widest, -(-size // most)), MAX_WIDTH, size)
