"""Writes the K and V of a forward's tokens into their slots of the pool."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from worker.model.pool import KVGeometry


@triton.jit
def _write_kernel(  # type: ignore[no-untyped-def]
    key,
    value,
    pool,
    slots,
    key_head_stride,
    key_token_stride,
    value_head_stride,
    value_token_stride,
    NUM_KV_HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
):
    # One program: one token, all heads, K and V.
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    heads, dims = tl.arange(0, HEADS_PAD)[:, None], tl.arange(0, DIM_PAD)[None, :]
    live = (heads < NUM_KV_HEADS) & (dims < HEAD_DIM)
    keys = tl.load(key + token * key_token_stride + heads * key_head_stride + dims, mask=live)
    values = tl.load(
        value + token * value_token_stride + heads * value_head_stride + dims, mask=live
    )
    block = (slot // BLOCK_SIZE).to(tl.int64)
    to = pool + block * BLOCK_STRIDE + (slot % BLOCK_SIZE) * HEAD_DIM
    to += heads * (BLOCK_SIZE * HEAD_DIM) + dims
    tl.store(to, keys, mask=live)
    tl.store(to + NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM, values, mask=live)


def block_stride(geometry: KVGeometry) -> int:
    """Elements from one block of the pool to the next."""
    return geometry.block_bytes // geometry.dtype.itemsize


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    layer_kv: torch.Tensor,
    slots: torch.Tensor,
    *,
    geometry: KVGeometry,
) -> None:
    """Write one layer's K and V.

    Args:
        key: [1, num_kv_heads, T, head_dim], unit stride in its last dimension.
        value: The same.
        layer_kv: `KVCache.strips` of the layer.
        slots: int32 [T], block * block_size + offset, all different; -1 is not written.
        geometry: Of the pool.
    """
    num_heads, num_tokens, head_dim = key.shape[1:]
    heads_pad, dim_pad = triton.next_power_of_2(num_heads), triton.next_power_of_2(head_dim)
    _write_kernel[(num_tokens,)](
        key,
        value,
        layer_kv,
        slots,
        key.stride(1),
        key.stride(2),
        value.stride(1),
        value.stride(2),
        NUM_KV_HEADS=num_heads,
        HEADS_PAD=heads_pad,
        HEAD_DIM=head_dim,
        DIM_PAD=dim_pad,
        BLOCK_SIZE=geometry.block_size,
        BLOCK_STRIDE=block_stride(geometry),
        num_warps=min(4, max(1, heads_pad * dim_pad // 256)),
    )


def reference_write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    layer_kv: torch.Tensor,
    slots: torch.Tensor,
    *,
    geometry: KVGeometry,
) -> None:
    """`write_kv` in torch."""
    live = slots >= 0
    blocks, offsets = slots[live].long() // geometry.block_size, slots[live] % geometry.block_size
    heads = torch.arange(geometry.num_kv_heads, device=slots.device)
    strips = blocks[:, None] * (geometry.num_layers * 2 * geometry.num_kv_heads) + heads
    rows = layer_kv.view(-1, geometry.block_size, geometry.head_dim)
    rows[strips, offsets[:, None].long()] = key[0, :, live].transpose(0, 1)
    rows[strips + geometry.num_kv_heads, offsets[:, None].long()] = value[0, :, live].transpose(
        0, 1
    )
