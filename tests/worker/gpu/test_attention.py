"""Paged attention against its float64 reference, in the interpreter."""

from __future__ import annotations

import pytest
import torch
from attention_case import LAYER, NAN, check, make_case, make_geometry, random_row

from nightjar.errors import ModelRefused
from worker.kernels.attention import LayerRule
from worker.kernels.attention_filling import Load, Shape, load_of, programs_per_tile, shape_of
from worker.kernels.kv_write import write_kv
from worker.model.pool import KVCache

# No multiprocessors never split, many always do.
SMS = pytest.mark.parametrize("num_sms", [0, 999], ids=["joined", "split"])


@SMS
@pytest.mark.parametrize("height", [2, 4, 8, 16])
def test_short_tiles(height: int, num_sms: int) -> None:
    """Every height gives the reference's result, at odd lengths and at a block's edges."""
    geometry = make_geometry(2, 1, 32)
    rows = [
        random_row(geometry, length, count, seed)
        for seed, (length, count) in enumerate([(1, 1), (65, height - 1), (257, 2), (16, height)])
    ]
    check(make_case(geometry, rows, height=height), LayerRule(scaling=0.2), num_sms=num_sms)


@SMS
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size"),
    [(2, 2, 64, 16), (4, 2, 48, 32), (7, 1, 64, 64), (14, 2, 48, 16), (24, 1, 16, 32)],
)
def test_shapes(
    num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, num_sms: int
) -> None:
    """Groups of 1, 2, 7 and more than a program holds, and padded head sizes, are right."""
    geometry = make_geometry(num_heads, num_kv_heads, head_dim, block_size=block_size)
    short = [random_row(geometry, 70, 2, 1), random_row(geometry, 256, 1, 2)]
    long = [random_row(geometry, 259, 5, 3)]
    case = make_case(geometry, short, long)
    check(case, LayerRule(scaling=head_dim**-0.5), num_sms=num_sms)


@SMS
@pytest.mark.parametrize(
    "rule",
    [
        LayerRule(scaling=0.2, window=1),
        LayerRule(scaling=0.2, window=300),
        LayerRule(scaling=0.2, softcap=2.0),
        LayerRule(scaling=400.0, softcap=30.0),
        LayerRule(scaling=0.3, window=65, softcap=5.0),
    ],
    ids=str,
)
def test_rules(rule: LayerRule, num_sms: int) -> None:
    """Windows that cut tiles and skip parts, and caps of small and huge scores, are right."""
    geometry = make_geometry(2, 1, 16)
    short = [random_row(geometry, 580, 3, 1)]
    long = [random_row(geometry, 264, 17, 3)]
    case = make_case(geometry, short, long, height=4)
    check(case, rule, num_sms=num_sms, tolerance=2e-5)


@SMS
def test_half_precision(num_sms: int) -> None:
    """Half-precision values are read, weighed and written at their own precision."""
    geometry = make_geometry(2, 1, 32, dtype=torch.float16)
    rows = [random_row(geometry, 260, 2, 1), random_row(geometry, 9, 1, 2)]
    check(make_case(geometry, rows), LayerRule(scaling=0.2), num_sms=num_sms, tolerance=1e-3)


def test_split_and_joined_bits() -> None:
    """Splitting, several parts to a program, the height and the chunk change no bit."""
    geometry = make_geometry(2, 1, 16)
    row = random_row(geometry, 1100, 16, 5)
    rule = LayerRule(scaling=0.4)
    whole, _ = make_case(geometry, [], [row]).run(rule)
    alone = make_case(geometry, [row.cut(1095, 1)], capacity=4)
    for num_sms in (0, 4, 999):  # one program for the nine parts, three, and nine
        out, _ = alone.run(rule, num_sms=num_sms)
        assert torch.equal(out[0, 0], whole[0, 10])
    verified, _ = make_case(geometry, [row.cut(1096, 3)], height=4).run(rule, num_sms=999)
    assert torch.equal(verified[0, :3], whole[0, 9:12])


def test_scratch_bounds_splitting() -> None:
    """Without scratch nothing is split, and the bits are those of a split."""
    geometry = make_geometry(2, 1, 16)
    rows = [random_row(geometry, 600, 2, 1)]
    rule = LayerRule(scaling=0.4)
    split, _ = make_case(geometry, rows).run(rule, num_sms=999)
    case = make_case(geometry, rows, splits=False)
    joined, _ = case.run(rule, num_sms=999)
    assert torch.equal(split[0, :2], joined[0, :2])
    assert case.inputs.partials.isnan().all()


def test_write_skips_padding() -> None:
    """Each token's K and V lie at its slot, read from any strides, and nothing else changes."""
    geometry = make_geometry(3, 3, 6, block_size=4)
    generator = torch.Generator().manual_seed(0)
    memory = torch.full((5 * geometry.block_bytes // 4,), NAN).view(torch.uint8)
    cache = KVCache(memory, geometry, 5)
    both = torch.randn(4, 2, 3, 6, generator=generator)
    key, value = (both[:, side].transpose(0, 1)[None] for side in (0, 1))
    slots = torch.tensor([19, -1, 0, 6], dtype=torch.int32)
    write_kv(key, value, cache.strips[LAYER], slots, geometry=geometry)
    blocks = memory.view(torch.float32).view(5, 2, 2, 3, 4, 6)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert torch.equal(blocks[slot // 4, LAYER, :, :, slot % 4], both[token])
    assert (~blocks.isnan()).sum() == 3 * both[0].numel()


def test_splitting_rule() -> None:
    """Lists are split while the device holds all programs at once; taller tiles are full."""

    def programs(capacity: int, parts: int, *, height: int = 2, resident: int = 3) -> int:
        return programs_per_tile(
            capacity=capacity,
            num_kv_heads=4,
            num_parts=parts,
            num_sms=132,
            height=height,
            resident=resident,
        )

    assert programs(2, 9) == 9
    assert programs(2, 200) == 49
    assert programs(32, 9) == 3
    assert programs(32, 9, resident=1) == 1
    assert programs(49, 9) == programs(128, 9, height=4, resident=2) == 2
    assert programs(49, 9, height=16) == 2
    assert programs(50, 9) == programs(256, 9) == programs(2, 1) == 1


def test_cut_rule() -> None:
    """A program has 16 to 128 rows, the fewer the wider its keys, and room for them."""

    def cut(
        height: int, group: int, head_dim: int, itemsize: int = 2, *, load: Load = "usual"
    ) -> Shape:
        return shape_of(
            height=height,
            group=group,
            head_dim=head_dim,
            itemsize=itemsize,
            load=load,
        )

    assert cut(16, 7, 128) == (8, 128, 1, 8, 4)
    assert cut(8, 7, 128) == (8, 64, 1, 8, 4)
    assert cut(4, 7, 128) == (8, 32, 2, 8, 4)
    assert cut(2, 7, 128) == (8, 16, 3, 4, 3)
    assert cut(2, 7, 128, load="sparse") == (8, 16, 2, 8, 3)
    assert cut(2, 7, 128, load="full") == (8, 16, 4, 4, 2)
    assert cut(2, 7, 64, load="full") == (8, 16, 4, 4, 4)
    assert cut(2, 1, 64) == (1, 16, 3, 4, 4)
    assert cut(16, 24, 64) == (8, 128, 1, 8, 4)
    assert cut(16, 4, 256) == (4, 64, 1, 8, 2)
    assert cut(16, 4, 256, 4) == (1, 16, 1, 8, 1)
    assert cut(2, 7, 128).options == {"num_warps": 4, "num_stages": 3, "maxnreg": 168}
    assert cut(4, 7, 128).options == {"num_warps": 8, "num_stages": 4, "maxnreg": 128}
    assert "maxnreg" not in cut(16, 7, 128).options


def test_load_rule() -> None:
    """Few programs are wide; those that a fourth on each multiprocessor spares a turn are four."""

    def load(capacity: int, height: int = 2, itemsize: int = 2) -> Load:
        shape = shape_of(height=height, group=7, head_dim=128, itemsize=itemsize)
        return load_of(capacity=capacity, columns=4, num_sms=132, height=height, shape=shape)

    loads = {capacity: load(capacity) for capacity in (2, 8, 9, 64, 99, 100, 128, 132, 133, 256)}
    assert loads == {
        **dict.fromkeys((2, 8), "sparse"),
        **dict.fromkeys((9, 64, 99, 133, 256), "usual"),
        **dict.fromkeys((100, 128, 132), "full"),
    }
    assert load(128, height=4) == load(128, height=16) == load(128, itemsize=4) == "usual"


def test_refusals() -> None:
    """A head dimension or a rule that would be computed wrongly is refused."""
    geometry = make_geometry(2, 1, 258)
    case = make_case(geometry, [random_row(geometry, 3, 1, 1)])
    with pytest.raises(ModelRefused, match="258"):
        case.run(LayerRule(scaling=1.0))
    with pytest.raises(ModelRefused, match="scaling"):
        LayerRule(scaling=0.0)
