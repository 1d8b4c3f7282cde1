"""What one forward's attention needs, computed once for all layers.

That is where KV is written, and groups of rows that attend together, with their gathers and
masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from worker.model.batch import Batch
from worker.model.pool import KVGeometry

CONTEXT_TILE = 64  # exact: contexts are padded to it, and P·V is added in tiles of it
SHORT_QUERY = 16  # rows of at most so many query tokens share a group
SPLIT_COST = 4096  # padded tokens times KV heads that cost as much as one more group


@dataclass(kw_only=True)
class Group:
    """Rows that attend in one batched product.

    R rows, n query positions each (short rows repeat their last), S key positions each. Keys
    past a row's length come from its own blocks: finite, or listed in `stale`.
    """

    num_rows: int
    num_queries: int
    context: int
    query_tokens: torch.Tensor | None  # [R * n]; None where that is the batch's own order
    strips: torch.Tensor  # [2 * R * num_kv_heads * S / block_size], for KVCache.strips
    stale: torch.Tensor | None  # rows of the gathered [.., head_dim] that are not this row's KV
    query_positions: torch.Tensor  # [R, n]
    masks: dict[int, torch.Tensor] = field(default_factory=dict)
    gathered: torch.Tensor | None = None  # buffer that the layers share

    def mask(self, window: int, kv_heads: int, folded: int, dtype: torch.dtype) -> torch.Tensor:
        """What is added to scores, [R * kv_heads, folded * n, S]: 0, or -inf where hidden.

        Args:
            window: Keys that a query sees, itself included; 0 sees all.
            kv_heads: KV heads, for each of which the mask is repeated.
            folded: Heads folded into the query rows.
            dtype: Of the scores.
        """
        mask = self.masks.get(window)
        if mask is None:
            keys = torch.arange(self.context)
            last = self.query_positions[:, :, None]
            hidden = keys > last
            if window:
                hidden |= keys <= last - window
            mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
            mask = mask[:, None, None].expand(-1, kv_heads, folded, -1, -1)
            mask = mask.reshape(self.num_rows * kv_heads, -1, self.context)
            self.masks[window] = mask
        return mask


@dataclass(kw_only=True)
class Plan:
    """One forward of `num_tokens` tokens, padding included."""

    num_tokens: int
    write_rows: torch.Tensor  # [2 * num_kv_heads * num_tokens], for KVCache.rows
    groups: list[Group]
    output_rows: torch.Tensor | None  # [num_tokens] into the groups' outputs; None: as they lie
    layers: set[int] = field(default_factory=set)  # layers that attended


def make_plan(batch: Batch, geometry: KVGeometry, *, exact: bool, num_tokens: int) -> Plan:
    """Plan a forward over `batch`, whose last token is repeated up to `num_tokens`.

    A repeated token writes the same values to the same slot and reads the same output.
    """
    count = len(batch.input_ids)
    padding = [count - 1] * (num_tokens - count)
    groups, places = [], np.empty(count, dtype=np.int64)
    at = 0
    for rows in _grouped(batch, geometry, exact):
        group, tokens, outputs = _make_group(batch, rows, geometry, exact, num_tokens)
        places[tokens] = outputs + at
        at += group.num_rows * group.num_queries
        groups.append(group)
    order = np.concatenate((places, places[padding])) if padding else places
    in_order = at == num_tokens and bool((order == np.arange(num_tokens)).all())
    return Plan(
        num_tokens=num_tokens,
        write_rows=_write_rows(batch.slots + [batch.slots[-1]] * len(padding), geometry),
        groups=groups,
        output_rows=None if in_order else torch.from_numpy(order),
    )


def _write_rows(slots: Sequence[int], geometry: KVGeometry) -> torch.Tensor:
    heads, size = geometry.num_kv_heads, geometry.block_size
    block, offset = np.divmod(np.asarray(slots, dtype=np.int64), size)
    first = block * (geometry.num_layers * 2 * heads * size) + offset
    return torch.from_numpy((np.arange(2 * heads)[:, None] * size + first).reshape(-1))


def _grouped(batch: Batch, geometry: KVGeometry, exact: bool) -> list[list[int]]:
    """Rows of each group: short ones together while padding costs less than a group."""
    starts, positions = batch.query_starts, batch.positions
    short, groups = [], []
    for row in range(len(starts) - 1):
        if starts[row + 1] - starts[row] <= SHORT_QUERY:
            short.append(row)
        else:
            groups.append([row])
    if len(short) < 2:
        return groups + ([short] if short else [])
    length = {row: positions[starts[row + 1] - 1] + 1 for row in short}
    limit = SPLIT_COST // geometry.num_kv_heads
    if len(short) * max(length.values()) - sum(length.values()) <= limit:
        return [short, *groups]
    short.sort(key=lambda row: -length[row])
    current: list[int] = []
    waste = 0
    for row in short:
        waste += length[current[0]] - length[row] if current else 0
        if waste > limit:
            groups.append(current)
            current, waste = [], 0
        current.append(row)
    return [*groups, current]


def _make_group(
    batch: Batch, rows: list[int], geometry: KVGeometry, exact: bool, num_tokens: int
) -> tuple[Group, np.ndarray, np.ndarray]:
    """Build a group; also its tokens and where, of its R * n outputs, each one's is."""
    size, heads = geometry.block_size, geometry.num_kv_heads
    starts = np.asarray([batch.query_starts[row] for row in rows])
    counts = np.asarray([batch.query_starts[row + 1] for row in rows]) - starts
    num_queries = max(int(counts.max()), _least_queries(geometry) if exact else 1)
    steps = np.minimum(np.arange(num_queries), counts[:, None] - 1)
    tokens = starts[:, None] + steps  # [R, n]
    first = np.asarray([batch.positions[start] for start in starts])
    positions = first[:, None] + steps
    lengths = positions[:, -1] + 1
    unit = max(CONTEXT_TILE, size) if exact else size
    context = -(-int(lengths.max()) // unit) * unit

    width = context // size
    used = -(-lengths // size)
    tables = np.empty((len(rows), width), dtype=np.int64)
    for i, row in enumerate(rows):
        table = batch.block_tables[row]
        tables[i, : used[i]] = table[: used[i]]
        tables[i, used[i] :] = table[0]  # any finite block: these positions are masked
    strips = tables[:, None, :] * (geometry.num_layers * 2 * heads) + np.arange(heads)[:, None]
    strips = np.stack((strips, strips + heads))  # [2, R, heads, width]

    keys = np.arange(context)
    whole = np.where(lengths < size, context, used * size)  # a sole block also pads itself
    stale_row, stale_key = ((keys >= lengths[:, None]) & (keys < whole[:, None])).nonzero()
    stale = None
    if len(stale_row):
        head = np.arange(2 * heads)[:, None]
        kind, head = head // heads, head % heads
        stale = torch.from_numpy(
            (((kind * len(rows) + stale_row) * heads + head) * context + stale_key).reshape(-1)
        )

    flat = tokens.reshape(-1)
    real = (np.arange(num_queries) < counts[:, None]).reshape(-1)
    own_order = len(flat) == num_tokens and bool((flat == _order(batch, num_tokens)).all())
    group = Group(
        num_rows=len(rows),
        num_queries=num_queries,
        context=context,
        query_tokens=None if own_order else torch.from_numpy(flat),
        strips=torch.from_numpy(strips.reshape(-1)),
        stale=stale,
        query_positions=torch.from_numpy(positions),
    )
    return group, flat[real], np.arange(len(flat))[real]


def _least_queries(geometry: KVGeometry) -> int:
    """Query positions that keep one row's products on the kernels that many rows take.

    Few query rows take other kernels (float32 below 4, others below 2), and so do products of
    at most 16 ** 3 steps.
    """
    folded = geometry.num_heads // geometry.num_kv_heads
    least_rows = 4 if geometry.dtype == torch.float32 else 2
    per_query = geometry.num_heads * geometry.head_dim * CONTEXT_TILE
    return max(-(-least_rows // folded), 16**3 // per_query + 1)


def _order(batch: Batch, num_tokens: int) -> np.ndarray:
    return np.minimum(np.arange(num_tokens), len(batch.input_ids) - 1)
