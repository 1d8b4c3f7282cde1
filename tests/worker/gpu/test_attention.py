"""Paged attention against its float64 reference, and its bits against themselves."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from nightjar.errors import ModelRefused
from worker.kernels.attention import (
    LayerRule,
    paged_attention,
    partial_floats,
    programs_per_tile,
    reference_attention,
    shape_of,
)
from worker.kernels.attention_inputs import LONG_HEIGHT, AttentionInputs, TileList, num_parts
from worker.kernels.kv_write import reference_write_kv, write_kv
from worker.model.pool import KVCache, KVGeometry

LAYER = 1
NAN = float("nan")


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row's queries, keys and values [heads, length, head_dim]; the last `count` are new."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    count: int

    def cut(self, length: int, count: int) -> Row:
        """The same row when it had `length` tokens, the last `count` of them new."""
        return Row(
            query=self.query[:, :length],
            key=self.key[:, :length],
            value=self.value[:, :length],
            count=count,
        )


@dataclass(frozen=True, kw_only=True)
class Case:
    """One forward's arguments over a pool that is NaN where no token of a row lies."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    memory: torch.Tensor
    inputs: AttentionInputs
    geometry: KVGeometry

    def run(
        self, rule: LayerRule, *, num_sms: int = 1, reference: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What attention returns, NaN before it was written, and the pool it left."""
        memory = self.memory.clone()
        cache = KVCache(memory, self.geometry, memory.numel() // self.geometry.block_bytes)
        function = reference_attention if reference else paged_attention
        if not reference:  # what torch.empty returns is NaN then
            torch.use_deterministic_algorithms(True)
        try:
            out = function(
                self.query,
                self.key,
                self.value,
                cache.strips[LAYER],
                self.inputs,
                rule,
                geometry=self.geometry,
                num_sms=num_sms,
            )
        finally:
            torch.use_deterministic_algorithms(False)
        return out, memory


def make_geometry(
    num_heads: int = 2,
    num_kv_heads: int = 1,
    head_dim: int = 64,
    *,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
) -> KVGeometry:
    """Two layers, of which the second is used."""
    return KVGeometry(
        num_layers=2,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
    )


def random_row(
    geometry: KVGeometry, length: int, count: int, seed: int, device: str = "cpu"
) -> Row:
    """A row of normal values, its queries large enough that some keys weigh much."""
    generator = torch.Generator().manual_seed(seed)

    def normal(num_heads: int, factor: float) -> torch.Tensor:
        values = torch.randn(num_heads, length, geometry.head_dim, generator=generator)
        return (values * factor).to(device, geometry.dtype)

    return Row(
        query=normal(geometry.num_heads, 2.0),
        key=normal(geometry.num_kv_heads, 1.0),
        value=normal(geometry.num_kv_heads, 1.0),
        count=count,
    )


def make_case(
    geometry: KVGeometry,
    short: list[Row],
    long: list[Row] | None = None,
    *,
    height: int = 2,
    capacity: int = 0,
    max_length: int = 0,
    splits: bool = True,
) -> Case:
    """Lay rows out: tiles of `height` for `short`, of LONG_HEIGHT for `long`, empty ones between.

    Args:
        geometry: Of the pool.
        short: Rows of at most `height` new tokens.
        long: Rows of any number.
        height: Of a short tile.
        capacity: Of the short list, at least.
        max_length: Tokens that the tables can hold, at least.
        splits: Whether there is scratch for splitting.
    """
    rows = [*short, *(long or [])]
    device, size = rows[0].query.device, geometry.block_size
    lengths = [row.key.shape[1] for row in rows]
    width = -(-max(max_length, *lengths) // size) + 1
    needed = [-(-length // size) for length in lengths]
    poison = sum(needed)  # a block that nobody owns
    generator = torch.Generator().manual_seed(poison)
    blocks = torch.randperm(poison, generator=generator).to(device)
    memory = torch.full(
        ((poison + 1) * geometry.block_bytes // geometry.dtype.itemsize,),
        NAN,
        dtype=geometry.dtype,
        device=device,
    ).view(torch.uint8)
    cache = KVCache(memory, geometry, poison + 1)
    tables = torch.full((len(rows) + 1, width), poison, dtype=torch.int32, device=device)
    slots: list[torch.Tensor] = []
    lists: list[list[tuple[int, int, int, int]]] = [[], []]
    token = taken = 0
    for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        at, start = index + 1, length - row.count  # row 0 of the tables is nobody's
        tables[at, : needed[index]] = blocks[taken : taken + needed[index]]
        taken += needed[index]
        positions = torch.arange(length, device=device)
        own = tables[at, positions // size] * size + positions % size
        reference_write_kv(
            row.key[None, :, :start],
            row.value[None, :, :start],
            cache.strips[LAYER],
            own[:start],
            geometry=geometry,
        )
        slots.append(own[start:].int())
        is_long = index >= len(short)
        step = LONG_HEIGHT if is_long else height
        for first in range(0, row.count, step):
            count = min(step, row.count - first)
            lists[is_long].append((at, token + first, count, start + first))
            if index % 2 == 0:
                lists[is_long].append((0, 0, 0, 0))
        token += row.count
    lists[0] += [(0, 0, 0, 0)] * (capacity - len(lists[0]))
    slots.append(torch.full((2,), -1, dtype=torch.int32, device=device))  # padding tokens

    def joined(tensors: list[torch.Tensor], num_heads: int) -> torch.Tensor:
        # As a model hands it over: [1, heads, T, head_dim] inside a merged projection.
        values = torch.cat([tensor.transpose(0, 1) for tensor in tensors])
        merged = values.new_full((token + 2, num_heads + 1, geometry.head_dim), NAN)
        merged[:token, :num_heads] = values
        return merged[None, :, :num_heads].transpose(1, 2)

    def fresh(name: str) -> list[torch.Tensor]:
        return [getattr(row, name)[:, row.key.shape[1] - row.count :] for row in rows]

    def tile_list(step: int, tiles: list[tuple[int, int, int, int]]) -> TileList:
        columns = torch.tensor(tiles, dtype=torch.int32, device=device).T.contiguous()
        return TileList(
            height=step,
            rows=columns[0],
            first_tokens=columns[1],
            num_queries=columns[2],
            first_positions=columns[3],
        )

    floats = partial_floats(
        max_tokens=token + 2,
        num_heads=geometry.num_heads,
        head_dim=geometry.head_dim,
        num_parts=num_parts(width, size),
    )
    return Case(
        query=joined(fresh("query"), geometry.num_heads),
        key=joined(fresh("key"), geometry.num_kv_heads),
        value=joined(fresh("value"), geometry.num_kv_heads),
        memory=memory,
        inputs=AttentionInputs(
            slots=torch.cat(slots),
            tables=tables,
            lists=tuple(
                tile_list(step, tiles)
                for step, tiles in zip((height, LONG_HEIGHT), lists, strict=True)
                if tiles
            ),
            partials=torch.full((floats if splits else 1,), NAN, device=device),
        ),
        geometry=geometry,
    )


def check(case: Case, rule: LayerRule, *, num_sms: int = 1, tolerance: float = 3e-6) -> None:
    """Tokens in tiles are the reference's, others untouched, and the pool is as it left it."""
    out, memory = case.run(rule, num_sms=num_sms)
    expected, expected_memory = case.run(rule, num_sms=num_sms, reference=True)
    assert torch.equal(memory, expected_memory)
    num_tokens = out.shape[1] - 2
    assert out.is_contiguous()
    assert out[0, num_tokens:].isnan().all()
    result, wanted = out[0, :num_tokens].double(), expected[0, :num_tokens].double()
    error = (result - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert error.max() < tolerance  # NaN fails


# Few multiprocessors never split, many always do.
SMS = pytest.mark.parametrize("num_sms", [1, 999], ids=["joined", "split"])


@SMS
@pytest.mark.parametrize("height", [2, 4, 8, 16])
def test_short_tiles(height: int, num_sms: int) -> None:
    """Every height gives the reference's result, at odd lengths and at a block's edges."""
    geometry = make_geometry(2, 1, 32)
    rows = [
        random_row(geometry, length, min(count, length), seed)
        for seed, (length, count) in enumerate(
            [(1, 1), (16, height), (17, 1), (65, height - 1), (257, height), (300, height)]
        )
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
    long = [random_row(geometry, 263, 19, 3)]
    case = make_case(geometry, short, long, max_length=700)
    check(case, LayerRule(scaling=head_dim**-0.5), num_sms=num_sms)


@SMS
@pytest.mark.parametrize(
    "rule",
    [
        LayerRule(scaling=0.2, window=1),
        LayerRule(scaling=0.2, window=65),
        LayerRule(scaling=0.2, window=300),
        LayerRule(scaling=0.2, softcap=2.0),
        LayerRule(scaling=400.0, softcap=30.0),
        LayerRule(scaling=0.3, window=40, softcap=5.0),
    ],
    ids=str,
)
def test_rules(rule: LayerRule, num_sms: int) -> None:
    """Windows that cut tiles and skip parts, and caps of small and huge scores, are right."""
    geometry = make_geometry(2, 1, 16)
    short = [random_row(geometry, 600, 4, 1), random_row(geometry, 30, 3, 2)]
    long = [random_row(geometry, 275, 40, 3)]
    case = make_case(geometry, short, long, height=4)
    check(case, rule, num_sms=num_sms, tolerance=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    """Half-precision values are read, weighed and written at their own precision."""
    geometry = make_geometry(2, 1, 32, dtype=dtype)
    rows = [random_row(geometry, 260, 2, 1), random_row(geometry, 9, 1, 2)]
    for num_sms in (1, 999):
        check(make_case(geometry, rows), LayerRule(scaling=0.2), num_sms=num_sms, tolerance=8e-3)


def test_split_and_joined_bits() -> None:
    """Splitting, several parts to a program, the height and the chunk change no bit."""
    geometry = make_geometry(2, 1, 16)
    row = random_row(geometry, 1100, 16, 5)
    rule = LayerRule(scaling=0.4)
    whole, _ = make_case(geometry, [], [row]).run(rule)
    alone = make_case(geometry, [row.cut(1095, 1)], capacity=4)
    for num_sms in (1, 3, 999):  # one, three and five programs for the five parts
        out, _ = alone.run(rule, num_sms=num_sms)
        assert torch.equal(out[0, 0], whole[0, 10])
    verified, _ = make_case(geometry, [row.cut(1096, 4)], height=4).run(rule, num_sms=999)
    assert torch.equal(verified[0, :4], whole[0, 8:12])


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
    """Small lists are split until about four programs run per multiprocessor, others never."""

    def programs(capacity: int, parts: int) -> int:
        return programs_per_tile(capacity=capacity, num_kv_heads=4, num_parts=parts, num_sms=132)

    assert programs(2, 9) == 9
    assert programs(2, 200) == 66
    assert programs(65, 9) == 3
    assert programs(66, 9) == programs(256, 9) == programs(2, 1) == 1


def test_cut_rule() -> None:
    """A program has 16 to 128 rows, the fewer the wider its keys, and room for them."""
    plain = shape_of(height=16, group=7, head_dim=128, itemsize=2, split=False)
    assert plain == (8, 128, 8, 3)
    assert shape_of(height=2, group=7, head_dim=128, itemsize=2, split=True) == (8, 16, 4, 4)
    assert shape_of(height=2, group=1, head_dim=64, itemsize=2, split=False)[:2] == (1, 16)
    assert shape_of(height=16, group=24, head_dim=64, itemsize=2, split=False)[:2] == (8, 128)
    wide = shape_of(height=16, group=4, head_dim=256, itemsize=4, split=True)
    assert wide.rows == 32
    assert wide.stages == 1


def test_refusals() -> None:
    """A head dimension or a rule that would be computed wrongly is refused."""
    geometry = make_geometry(2, 1, 258)
    case = make_case(geometry, [random_row(geometry, 3, 1, 1)])
    with pytest.raises(ModelRefused, match="258"):
        case.run(LayerRule(scaling=1.0))
    with pytest.raises(ModelRefused, match="scaling"):
        LayerRule(scaling=0.0)
