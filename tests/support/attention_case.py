"""One forward's arguments to paged attention over a poisoned pool, and what must come of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from worker.kernels.attention import (
    LayerRule,
    paged_attention,
    partial_floats,
    reference_attention,
)
from worker.kernels.attention_inputs import (
    LONG_HEIGHT,
    NUM_COUNTERS,
    AttentionInputs,
    TileList,
    num_parts,
)
from worker.kernels.kv_write import reference_write_kv
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
        self, rule: LayerRule, *, num_sms: int = 0, reference: bool = False
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
            counters=torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=device),
        ),
        geometry=geometry,
    )


def check(case: Case, rule: LayerRule, *, num_sms: int = 0, tolerance: float = 3e-6) -> None:
    """Tokens in tiles are the reference's, others untouched, and the pool is as it left it."""
    out, memory = case.run(rule, num_sms=num_sms)
    expected, expected_memory = case.run(rule, num_sms=num_sms, reference=True)
    assert torch.equal(memory, expected_memory)
    assert not case.inputs.counters.any()
    num_tokens = out.shape[1] - 2
    assert out.is_contiguous()
    assert out[0, num_tokens:].isnan().all()
    result, wanted = out[0, :num_tokens].double(), expected[0, :num_tokens].double()
    error = (result - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert error.max() < tolerance  # NaN fails
