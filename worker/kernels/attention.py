"""Paged attention in an order of additions that depends on a query's position alone.

Keys are walked in tiles of TILE and parts of PART from position 0, and parts are joined in index
order (Flash-Decoding, https://pytorch.org/blog/flash-decoding/), in the registers of one program
or, of several, by the last to store its own: the same fused multiply-adds give the same bits.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import triton

from nightjar.errors import ModelRefused
from worker.kernels.attention_filling import load_of, programs_per_tile, shape_of
from worker.kernels.attention_inputs import (
    LONG_HEIGHT,
    PART,
    TILE,
    AttentionInputs,
    TileList,
    num_parts,
)
from worker.kernels.attention_programs import attend_kernel
from worker.kernels.kv_write import block_stride, reference_write_kv, write_kv
from worker.model.pool import KVGeometry

MAX_HEAD_DIM = 256
NO_WINDOW = 1 << 30  # more keys than any context has
_LOG2_E = math.log2(math.e)


@dataclass(frozen=True, kw_only=True)
class LayerRule:
    """How one layer attends."""

    scaling: float  # above 0
    window: int = 0  # keys a query sees, itself included; 0 sees all
    softcap: float = 0.0  # bound of the scores, by tanh; 0 is none

    def __post_init__(self) -> None:
        if self.scaling <= 0 or self.window < 0 or self.softcap < 0:
            raise ModelRefused(
                "its attention needs a scaling above 0, and no negative window or softcap"
            )


def partial_floats(*, max_tokens: int, num_heads: int, head_dim: int, num_parts: int) -> int:
    """Scratch that splitting needs for forwards of up to `max_tokens` tokens, in floats."""
    return max_tokens * num_heads * num_parts * (head_dim + 2)


def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer_kv: torch.Tensor,
    inputs: AttentionInputs,
    rule: LayerRule,
    *,
    geometry: KVGeometry,
    num_sms: int,
) -> torch.Tensor:
    """Write a forward's K and V, then attend; nothing waits for the device.

    Args:
        query: [1, num_heads, T, head_dim], of the pool's dtype.
        key: [1, num_kv_heads, T, head_dim].
        value: The same.
        layer_kv: `KVCache.strips` of the layer.
        inputs: Of the forward; its partials serve one layer after the other.
        rule: Of the layer.
        geometry: Of the pool.
        num_sms: Multiprocessors of the device, which decides on splitting.

    Returns:
        [1, T, num_heads, head_dim], contiguous; tokens that lie in no tile are undefined.

    Raises:
        ModelRefused: The head dimension is odd or above 256.
    """
    _check_head_dim(geometry)
    assert key.dtype == value.dtype == layer_kv.dtype
    key, value = (
        tensor if tensor.stride(3) == 1 else tensor.contiguous() for tensor in (key, value)
    )
    write_kv(key, value, layer_kv, inputs.slots, geometry=geometry)
    return attend(query, layer_kv, inputs, rule, geometry=geometry, num_sms=num_sms)


def attend(
    query: torch.Tensor,
    layer_kv: torch.Tensor,
    inputs: AttentionInputs,
    rule: LayerRule,
    *,
    geometry: KVGeometry,
    num_sms: int,
) -> torch.Tensor:
    """`paged_attention` where the forward's K and V are written already.

    Args:
        query: [1, num_heads, T, head_dim], of the pool's dtype.
        layer_kv: `KVCache.strips` of the layer.
        inputs: Of the forward; its partials serve one layer after the other.
        rule: Of the layer.
        geometry: Of the pool.
        num_sms: Multiprocessors of the device, which decides on splitting.

    Returns:
        [1, T, num_heads, head_dim], contiguous; tokens that lie in no tile are undefined.

    Raises:
        ModelRefused: The head dimension is odd or above 256.
    """
    _check_head_dim(geometry)
    assert query.dtype == layer_kv.dtype == geometry.dtype
    query = query if query.stride(3) == 1 else query.contiguous()
    num_tokens = query.shape[2]
    out = query.new_empty(1, num_tokens, geometry.num_heads, geometry.head_dim)
    for tiles in inputs.lists:
        _attend(query, layer_kv, inputs, tiles, rule, out, geometry=geometry, num_sms=num_sms)
    return out


def _check_head_dim(geometry: KVGeometry) -> None:
    if geometry.head_dim > MAX_HEAD_DIM or geometry.head_dim % 2:
        raise ModelRefused(
            f"its head dimension is {geometry.head_dim}; served are even ones up to {MAX_HEAD_DIM}"
        )


def _attend(
    query: torch.Tensor,
    layer_kv: torch.Tensor,
    inputs: AttentionInputs,
    tiles: TileList,
    rule: LayerRule,
    out: torch.Tensor,
    *,
    geometry: KVGeometry,
    num_sms: int,
) -> None:
    heads, kv_heads, head_dim = geometry.num_heads, geometry.num_kv_heads, geometry.head_dim
    group, num_tokens = heads // kv_heads, query.shape[2]
    parts = num_parts(inputs.tables.shape[1], geometry.block_size)
    cut = functools.partial(
        shape_of,
        height=tiles.height,
        group=group,
        head_dim=head_dim,
        itemsize=geometry.dtype.itemsize,
    )
    shape = cut()
    columns = kv_heads * -(-group // shape.heads)
    load = load_of(
        capacity=tiles.capacity,
        columns=columns,
        num_sms=num_sms,
        height=tiles.height,
        shape=shape,
    )
    shape = cut(load=load)
    programs = programs_per_tile(
        capacity=tiles.capacity,
        num_kv_heads=kv_heads,
        num_parts=parts,
        num_sms=num_sms,
        height=tiles.height,
        resident=shape.resident,
    )
    needed = partial_floats(
        max_tokens=num_tokens, num_heads=heads, head_dim=head_dim, num_parts=parts
    )
    split = (
        programs > 1
        and inputs.partials.numel() >= needed
        and inputs.counters.numel() >= tiles.capacity * columns
    )
    # Sums, peaks and masses by token, head and part; unsplit, none is read or written.
    peaks_at = num_tokens * heads * parts * head_dim
    masses_at = peaks_at + num_tokens * heads * parts
    partials = (inputs.partials,) * 3
    if split:
        partials = inputs.partials, inputs.partials[peaks_at:], inputs.partials[masses_at:]
    dim_pad = triton.next_power_of_2(max(16, head_dim))
    window = rule.window or NO_WINDOW
    # With a softcap, scores are tanh(x * scaling / softcap), by 2 ** of the doubled argument.
    cap_scale = 2.0 * _LOG2_E * rule.scaling / rule.softcap if rule.softcap else 0.0
    attend_kernel[(columns, tiles.capacity, programs if split else 1)](
        query,
        layer_kv,
        inputs.tables,
        tiles.rows,
        tiles.first_tokens,
        tiles.num_queries,
        tiles.first_positions,
        out,
        *partials,
        inputs.counters,
        query.stride(1),
        query.stride(2),
        inputs.tables.stride(0),
        parts,
        window,
        (rule.softcap or rule.scaling) * _LOG2_E,
        cap_scale,
        NUM_KV_HEADS=kv_heads,
        GROUP=group,
        HEADS=shape.heads,
        ROWS=shape.rows,
        HEAD_DIM=head_dim,
        DIM_PAD=dim_pad,
        BLOCK_SIZE=geometry.block_size,
        BLOCK_STRIDE=block_stride(geometry),
        WINDOWED=rule.window > 0,
        CAPPED=rule.softcap > 0,
        PART=PART,
        TILE=TILE,
        SPLIT=split,
        BACKWARDS=tiles.height == LONG_HEIGHT,
        **shape.options,
    )


def reference_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer_kv: torch.Tensor,
    inputs: AttentionInputs,
    rule: LayerRule,
    *,
    geometry: KVGeometry,
    num_sms: int,
) -> torch.Tensor:
    """`paged_attention` in torch, float64 inside; `num_sms` changes no result there or here."""
    reference_write_kv(key, value, layer_kv, inputs.slots, geometry=geometry)
    out = query.new_empty(1, query.shape[2], geometry.num_heads, geometry.head_dim)
    strips = layer_kv.view(-1, geometry.block_size, geometry.head_dim)
    kv_heads, group = geometry.num_kv_heads, geometry.num_heads // geometry.num_kv_heads
    heads = torch.arange(kv_heads, device=query.device)[:, None]
    for tiles in inputs.lists:
        fields = (tiles.rows, tiles.first_tokens, tiles.num_queries, tiles.first_positions)
        for row, token, count, position in torch.stack(fields, 1).tolist():
            if count == 0:
                continue
            end = position + count
            table = inputs.tables[row, : -(-end // geometry.block_size)].long()
            wanted = table * (geometry.num_layers * 2 * kv_heads) + heads  # [HK, blocks]
            keys, values = (
                strips[wanted + side].flatten(1, 2)[:, :end].double() for side in (0, kv_heads)
            )
            queries = query[0, :, token : token + count].double()
            queries = queries.reshape(kv_heads, group * count, geometry.head_dim)
            scores = (queries @ keys.transpose(1, 2)).view(kv_heads, group, count, end)
            scores *= rule.scaling
            if rule.softcap:
                scores = torch.tanh(scores / rule.softcap) * rule.softcap
            at = torch.arange(end, device=query.device)
            own = at[position:, None]
            visible = (at <= own) & (at > own - (rule.window or NO_WINDOW))
            scores.masked_fill_(~visible, -math.inf)
            # Keys that no query sees may hold anything.
            values = values.masked_fill(~visible.any(0)[:, None], 0.0)
            result = torch.softmax(scores, -1).flatten(1, 2) @ values
            result = result.view(geometry.num_heads, count, geometry.head_dim)
            out[0, token : token + count] = result.transpose(0, 1).to(out.dtype)
    return out
