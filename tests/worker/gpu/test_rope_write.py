"""Bias, rotary embedding and KV write in one kernel, and the models whose attention it serves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from model_driver import Driver, Part, random_sequences
from model_families import family_folder

from nightjar.errors import ModelRefused
from worker.config import WorkerConfig
from worker.gpu import paged
from worker.kernels.rope_write import reference_rope_write, rope_write
from worker.model import build
from worker.model.build import Models, build_models
from worker.model.device import Placement
from worker.model.fused import FusedAttention, fuse_attention
from worker.model.loading import read_config
from worker.model.placing import forward_kinds
from worker.model.pool import KVCache, KVGeometry
from worker.model.runtime import release_runtime
from worker.model.self_check import Finding, check_architecture

NAN = float("nan")
LAYER = 1
NUM_BLOCKS = 24
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KERNELS = Placement(DEVICE, kernels=True)
CONFIG = WorkerConfig(
    device="cpu",
    dtype="float32",
    build="eager",
    arithmetic="free",
    num_threads=1,
    num_blocks=NUM_BLOCKS,
    max_num_seqs=4,
    max_num_batched_tokens=16,
    max_model_len=64,
)
TOLERANCE = 1e-4  # of the largest logit
STEPS: list[list[Part]] = [[(0, 0, 13)], [(0, 13, 1), (1, 0, 11)], [(0, 14, 3), (1, 11, 1)]]
# Tokens of nobody multiply whatever their memory holds.
pytestmark = pytest.mark.filterwarnings(
    "ignore:(invalid value|overflow) encountered:RuntimeWarning"
)


@dataclasses.dataclass(kw_only=True)
class Case:
    """Arguments of one write; the pool is NaN."""

    geometry: KVGeometry
    qkv: torch.Tensor
    bias: torch.Tensor | None
    cos: torch.Tensor
    sin: torch.Tensor
    slots: torch.Tensor
    num_blocks: int

    def run(
        self, function: Callable[..., torch.Tensor] = rope_write
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [T, H, D], and the pool's values."""
        size = self.num_blocks * self.geometry.block_bytes // self.geometry.dtype.itemsize
        pool = torch.full((size,), NAN, dtype=self.geometry.dtype, device=self.qkv.device)
        cache = KVCache(pool.view(torch.uint8), self.geometry, self.num_blocks)
        torch.use_deterministic_algorithms(True)  # what torch.empty returns is NaN then
        try:
            query = function(
                self.qkv,
                self.bias,
                self.cos,
                self.sin,
                self.slots,
                cache.strips[LAYER],
                geometry=self.geometry,
            )
        finally:
            torch.use_deterministic_algorithms(False)
        return query, pool

    def cut(self, first: int, count: int) -> Case:
        """The same of some tokens alone."""
        at = slice(first, first + count)
        return dataclasses.replace(
            self, qkv=self.qkv[at], cos=self.cos[at], sin=self.sin[at], slots=self.slots[at]
        )


def make_case(
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    dtype: torch.dtype = torch.float32,
    biased: bool = True,
    block_size: int = 16,
    device: str = "cpu",
) -> Case:
    """Seeded values; every third token from the second on has no slot."""
    generator = torch.Generator().manual_seed(num_tokens * 1000 + head_dim)
    width = (num_heads + 2 * num_kv_heads) * head_dim
    num_blocks = num_tokens // block_size + 2
    slots = torch.randperm(num_blocks * block_size, generator=generator)[:num_tokens].int()
    slots[1::3] = -1
    angles = torch.randn(num_tokens, head_dim // 2, generator=generator).repeat(1, 2) * 9
    qkv = torch.randn(num_tokens, width, generator=generator)
    bias = torch.randn(width, generator=generator)
    return Case(
        geometry=KVGeometry(
            num_layers=3,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            dtype=dtype,
        ),
        qkv=qkv.to(device, dtype),
        bias=bias.to(device, dtype) if biased else None,
        cos=angles.cos().to(device, dtype),
        sin=angles.sin().to(device, dtype),
        slots=slots.to(device),
        num_blocks=num_blocks,
    )


def check(case: Case) -> None:
    """Queries and pool are the reference's, NaN where nothing was written."""
    exact = case.geometry.dtype is not torch.float32  # products of shorter values are exact
    tolerance = 0 if exact else 2e-6
    for mine, own in zip(case.run(), case.run(reference_rope_write), strict=True):
        assert torch.equal(mine.isnan(), own.isnan())
        torch.testing.assert_close(mine, own, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "num_kv_heads", "head_dim"),
    [(1, 14, 2, 64), (5, 7, 1, 128), (4, 3, 3, 48), (2, 28, 4, 128), (3, 1, 1, 6)],
)
def test_kernel_is_the_reference(
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    biased: bool,
    dtype: torch.dtype,
) -> None:
    """Odd shapes are rotated and written, tokens without a slot rotated alone, nothing else."""
    case = make_case(num_tokens, num_heads, num_kv_heads, head_dim, dtype=dtype, biased=biased)
    check(case)
    query, pool = case.run()
    written = int((case.slots >= 0).sum()) * 2 * num_kv_heads * head_dim
    assert not query.isnan().any()
    assert int((~pool.isnan()).sum()) == written


def test_larger_programs_give_the_same_bits() -> None:
    """Many tokens take larger programs, which change no bit; leading dimensions may be 1."""
    case = make_case(130, 3, 1, 16, dtype=torch.float16, block_size=4)
    check(case)
    query, _ = case.run()
    few = case.cut(57, 3)
    few.qkv, few.cos, few.sin = few.qkv[None], few.cos[None], few.sin[None]
    assert torch.equal(few.run()[0], query[57:60])


def silent(stage: str, detail: str) -> None:
    """Progress that nobody reads."""


def fused_modules(models: Models) -> int:
    """Attention modules that were replaced."""
    return sum(isinstance(m, FusedAttention) for m in models.target.model.modules())


@pytest.mark.parametrize(
    ("family", "changes", "is_fused"),
    [
        ("llama", {"num_key_value_heads": 1, "head_dim": 24, "attention_bias": True}, True),
        ("qwen2", {"num_hidden_layers": 2, "sliding_window": 6}, True),
        ("mistral", {"sliding_window": 6}, True),
        ("qwen3", {}, False),
    ],
    ids=["llama", "qwen2", "mistral", "qwen3"],
)
def test_logits_are_those_of_the_cpu(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    changes: dict[str, int | bool],
    is_fused: bool,
) -> None:
    """With biases, windows or neither, fused models give the CPU's logits; others stay whole."""
    folder = biased_folder(tmp_path, family, **{"num_hidden_layers": 1, **changes})
    config = read_config(folder)
    finding = Finding(
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or 16,
        merge=True,
        fuse=True,
    )
    monkeypatch.setattr(build, "check_architecture", lambda *_: finding)
    mine = build_models(CONFIG, folder, None, silent, KERNELS)
    finding = finding._replace(fuse=False)
    own = build_models(CONFIG, folder, None, silent)
    num_fused = finding.num_layers if is_fused else 0
    assert (fused_modules(mine), fused_modules(own)) == (num_fused, 0)
    sequences = random_sequences(own.target.vocab_size, [18, 12])
    drivers = [Driver(m.target, sequences, NUM_BLOCKS, seed=3) for m in (own, mine)]
    for driver in drivers:
        driver.fill_with_nan()
    for parts in STEPS:
        expected, logits = (torch.cat(driver.run(parts)) for driver in drivers)
        assert (expected - logits).abs().max() <= TOLERANCE * expected.abs().max()
    assert mine.target.last_layers == set(range(finding.num_layers))
    for models in (mine, own):
        models.close()


def biased_folder(root: Path, family: str, **changes: int | bool) -> Path:
    """A family's checkpoint with biases that are not zero."""
    from safetensors.torch import load_file, save_file

    folder = family_folder(root, family, **changes)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name, tensor in sorted(tensors.items()):
        is_bias = name.endswith("bias")
        scale = 0.5 if is_bias else 4.0 if "_proj" in name else 1.0
        new = torch.randn(tensor.shape, generator=generator) if is_bias else tensor
        tensors[name] = (new * scale).to(tensor.dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_family_that_fusing_breaks_is_served_unfused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the fused attention gives wrong answers, the model runs with its own, merged."""
    folder = family_folder(tmp_path, "llama", num_hidden_layers=1)
    config = read_config(folder)
    monkeypatch.setattr(paged, "attend", lambda query, *_, **__: query.transpose(1, 2).contiguous())
    finding = check_architecture(folder, config, KERNELS)
    assert (finding.merge, finding.fuse) == (True, False)


def test_what_it_would_leave_out_is_refused(tmp_path: Path) -> None:
    """A mask, a cache, or a rotary embedding of a part of the head is refused."""
    folder = family_folder(tmp_path, "llama")
    finding = check_architecture(folder, read_config(folder))._replace(fuse=True)
    target = build._prepare(
        forward_kinds(KERNELS)[0],
        "target",
        (folder, read_config(folder), finding),
        CONFIG,
        dtype=torch.float32,
        placement=KERNELS,
    )
    module = next(m for m in target.model.modules() if isinstance(m, FusedAttention))
    x, angles = torch.zeros(1, 2, 64, device=DEVICE), torch.zeros(1, 2, 16, device=DEVICE)
    with pytest.raises(ModelRefused, match="mask"):
        module(x, (angles, angles), attention_mask=torch.zeros(1))
    with pytest.raises(ModelRefused, match="past_key_values"):
        module(hidden_states=x, position_embeddings=(angles, angles), past_key_values=object())
    with pytest.raises(ModelRefused, match="part of the head"):
        module(x, (angles[..., :8], angles[..., :8]))
    assert fuse_attention(target.model, target.runtime) == 0
    release_runtime(target.runtime)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(28, 4, 128), (14, 2, 64)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_bits_do_not_depend_on_the_number_of_tokens(
    dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    """A token's q, k and v have the same bits alone, in small programs and in large ones."""
    whole = make_case(300, *shape, dtype=dtype, device="cuda")
    check(whole)
    query, pool = whole.run()
    for count in (1, 2, 7, 64, 300):
        part = whole.cut(300 - count, count)
        mine, written = part.run()
        assert torch.equal(mine, query[300 - count :])
        live = ~written.isnan()
        assert int(live.sum()) == int((part.slots >= 0).sum()) * 2 * shape[1] * shape[2]
        assert torch.equal(written[live], pool[live])


@pytest.mark.gpu
def test_error_is_a_rounding() -> None:
    """Beside the same in float64, queries are off by about one rounding of the biased sum."""
    case = make_case(64, 28, 4, 128, dtype=torch.bfloat16, device="cuda")
    query, _ = case.run()
    assert case.bias is not None
    biased = (case.qkv + case.bias).double().view(64, 36, 128)[:, :28]
    low, high = biased.chunk(2, -1)
    cos, sin = (part[:, None, :64].double() for part in (case.cos, case.sin))
    own = torch.cat((low * cos - high * sin, high * cos + low * sin), -1)
    assert ((query.double() - own).abs() / own.abs().clamp_min(1e-6)).max() <= 2**-8 * 1.001
