"""The compiled build's attention against a float64 reference, and its bits against its own."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import torch

from worker.model import native
from worker.model.batch import Batch
from worker.model.pool import KVCache, KVGeometry

NUM_HEADS, NUM_KV_HEADS, NUM_LAYERS, BLOCK = 6, 2, 3, 16
NUM_BLOCKS = 24


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernel, compiled for this machine."""
    folder = tmp_path_factory.mktemp("native")
    native.compile_library(folder)
    return folder


class Case:
    """A pool full of NaN, and rows whose KV is written through the kernel itself."""

    def __init__(self, library: Path, dtype: torch.dtype, head_dim: int, seed: int) -> None:
        geometry = KVGeometry(
            num_layers=NUM_LAYERS,
            num_heads=NUM_HEADS,
            num_kv_heads=NUM_KV_HEADS,
            head_dim=head_dim,
            block_size=BLOCK,
            dtype=dtype,
        )
        memory = torch.full((NUM_BLOCKS * geometry.block_bytes,), 0xFF, dtype=torch.uint8)
        self.kernel = native.NativeAttention(library, geometry)
        self.cache = KVCache(memory, geometry, NUM_BLOCKS)
        self.memory, self.dtype = memory, dtype
        torch.manual_seed(seed)
        self.lengths = [1, 17, 64, 83]
        blocks = iter(random.Random(seed).sample(range(NUM_BLOCKS), NUM_BLOCKS))
        self.tables = [[next(blocks) for _ in range(-(-n // BLOCK))] for n in self.lengths]
        shapes = [(NUM_HEADS, n, head_dim) for n in self.lengths]
        self.queries = [torch.randn(shape).to(dtype) for shape in shapes]
        self.keys = [torch.randn(NUM_KV_HEADS, n, head_dim).to(dtype) for n in self.lengths]
        self.values = [torch.randn(NUM_KV_HEADS, n, head_dim).to(dtype) for n in self.lengths]

    def run(self, parts: list[tuple[int, int, int]], *, window: int, softcap: float) -> list:
        """Attend for (row, first, count) parts in one call; outputs [count, heads, head_dim]."""
        starts, ids = [0], []
        for row, first, count in parts:
            ids += [(row, at) for at in range(first, first + count)]
            starts.append(len(ids))
        batch = Batch(
            input_ids=[0] * len(ids),
            positions=[at for _, at in ids],
            slots=[self.tables[row][at // BLOCK] * BLOCK + at % BLOCK for row, at in ids],
            query_starts=starts,
            block_tables=[self.tables[row] for row, _, _ in parts],
            logit_tokens=[],
        )
        self.kernel.prepare(self.cache, batch, max(2, len(ids)))
        padded = ids + [ids[-1]] * (2 - len(ids))

        def columns(tensors: list[torch.Tensor]) -> torch.Tensor:
            return torch.stack([tensors[row][:, at] for row, at in padded], 1)[None]

        output = self.kernel.attend(
            1,
            columns(self.queries),
            columns(self.keys),
            columns(self.values),
            scaling=0.3,
            window=window,
            softcap=softcap,
        )[0]
        return [output[a:b] for a, b in itertools.pairwise(starts)]

    def reference(self, row: int, *, window: int, softcap: float) -> torch.Tensor:
        """The same in float64, [length, heads, head_dim]."""
        group = NUM_HEADS // NUM_KV_HEADS
        keys = self.keys[row].double().repeat_interleave(group, 0)
        values = self.values[row].double().repeat_interleave(group, 0)
        scores = self.queries[row].double() @ keys.transpose(1, 2) * 0.3
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        at = torch.arange(self.lengths[row])
        hidden = at > at[:, None]
        if window:
            hidden |= at <= at[:, None] - window
        weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1)
        return (weights @ values).transpose(0, 1)


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (20, 0.0), (0, 5.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_equals_its_reference(
    library: Path, dtype: torch.dtype, head_dim: int, window: int, softcap: float
) -> None:
    """Odd lengths, empty and full blocks, windows and caps, in a pool of NaN: right to rounding."""
    case = Case(library, dtype, head_dim, seed=head_dim)
    rule = {"window": window, "softcap": softcap}
    outputs = case.run([(row, 0, n) for row, n in enumerate(case.lengths)], **rule)
    for row, output in enumerate(outputs):
        expected = case.reference(row, **rule)
        limit = 2e-6 if dtype == torch.float32 else 2**-8
        error = (output.double() - expected).abs().max() / expected.abs().max()
        assert error <= limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_the_call(library: Path, dtype: torch.dtype) -> None:
    """Chunks, batches and single tokens give a position the same bits."""
    case = Case(library, dtype, 64, seed=3)
    rule = {"window": 0, "softcap": 0.0}
    whole = case.run([(row, 0, n) for row, n in enumerate(case.lengths)], **rule)
    rng = random.Random(5)
    for _ in range(20):
        row = rng.randrange(len(case.lengths))
        first = rng.randrange(case.lengths[row])
        count = rng.randint(1, min(9, case.lengths[row] - first))
        others = [(r, n - 1, 1) for r, n in enumerate(case.lengths) if r != row]
        part = case.run([*others[: rng.randint(0, 3)], (row, first, count)], **rule)[-1]
        assert torch.equal(part, whole[row][first : first + count])


def test_a_missing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a C++ compiler a build is refused with what to install."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(native.ConfigError, match="needs a C\\+\\+ compiler"):
        native.compile_library(tmp_path)


def test_a_forward_writes_to_its_own_cache_alone(library: Path) -> None:
    """A kernel that is given another cache, as a proof does, leaves the first one's bytes."""
    case = Case(library, torch.bfloat16, 64, seed=1)
    before = case.memory.clone()
    first, case.cache = case.cache, KVCache(case.memory.clone(), case.cache.geometry, NUM_BLOCKS)
    case.run([(1, 0, 17)], window=0, softcap=0.0)
    assert torch.equal(case.memory, before)
    case.cache = first
    case.run([(1, 0, 17)], window=0, softcap=0.0)
    assert not torch.equal(case.memory, before)
