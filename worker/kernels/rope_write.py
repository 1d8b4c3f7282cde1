"""Between the merged q, k, v product and attention: bias, rotary embedding, K and V written.

Rotary embedding (RoFormer, https://arxiv.org/abs/2104.09864) in the rotate-half convention: a
head's first half pairs with its second.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from worker.kernels.kv_write import block_stride, reference_write_kv
from worker.model.pool import KVGeometry

_WARP_VALUES = 256  # of half a head's width, times heads: 16 bytes of 2-byte values a thread
_FEW_TOKENS = 128  # up to it programs are one warp, so that they are many
_MOST_WARPS = 4


@triton.jit
def _rope_write_kernel(  # type: ignore[no-untyped-def]
    qkv,
    bias,
    cos,
    sin,
    slots,
    pool,
    query,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    BIASED: tl.constexpr,
):
    # One program: HEADS of one token's heads, which are its q, then its k, then its v.
    dtype = qkv.dtype.element_ty
    half: tl.constexpr = HEAD_DIM // 2
    all_heads: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    dims = tl.arange(0, HALF_PAD)[None, :]
    live = (heads < all_heads) & (dims < half)
    at = heads * HEAD_DIM + dims

    slot = tl.load(slots + token)
    # Each head loads the angles anew: spread over a warp, they would pass through shared memory.
    angles = tl.broadcast_to(token * HEAD_DIM + dims, HEADS, HALF_PAD)
    cosine = tl.load(cos + angles, mask=live, other=0).to(tl.float32)
    sine = tl.load(sin + angles, mask=live, other=0).to(tl.float32)
    row = qkv + token * (all_heads * HEAD_DIM)
    low = tl.load(row + at, mask=live, other=0).to(tl.float32)
    high = tl.load(row + at + half, mask=live, other=0).to(tl.float32)
    if BIASED:
        low += tl.load(bias + at, mask=live, other=0).to(tl.float32)
        high += tl.load(bias + at + half, mask=live, other=0).to(tl.float32)
        low = low.to(dtype).to(tl.float32)
        high = high.to(dtype).to(tl.float32)

    # Explicit, so that no compilation may choose which product is rounded.
    is_value = heads >= NUM_HEADS + NUM_KV_HEADS
    first = tl.where(is_value, low, tl.fma(low, cosine, high * (-sine))).to(dtype)
    second = tl.where(is_value, high, tl.fma(high, cosine, low * sine)).to(dtype)

    to = query + token * (NUM_HEADS * HEAD_DIM) + at
    is_query = live & (heads < NUM_HEADS)
    tl.store(to, first, mask=is_query)
    tl.store(to + half, second, mask=is_query)

    if slot >= 0:
        to = pool + (slot // BLOCK_SIZE).to(tl.int64) * BLOCK_STRIDE
        to += (slot % BLOCK_SIZE) * HEAD_DIM
        to += (heads - NUM_HEADS) * (BLOCK_SIZE * HEAD_DIM) + dims  # V's strips follow K's
        is_written = live & (heads >= NUM_HEADS)
        tl.store(to, first, mask=is_written)
        tl.store(to + half, second, mask=is_written)


def rope_write(
    qkv: torch.Tensor,
    bias: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    layer_kv: torch.Tensor,
    *,
    geometry: KVGeometry,
) -> torch.Tensor:
    """Add the bias, rotate q and k, write k and v; one launch.

    The sum with the bias is rounded to the model's dtype, as `linear + bias` is. Rotation is
    float32 and rounded once. A token's bits do not depend on T.

    Args:
        qkv: [T, (num_heads + 2 * num_kv_heads) * head_dim], of the pool's dtype; also with
            leading dimensions of 1.
        bias: [(num_heads + 2 * num_kv_heads) * head_dim], or None.
        cos: [T, head_dim], of the same dtype, its halves equal: the first alone is read; also
            with leading dimensions of 1.
        sin: The same.
        slots: int32 [T], block * block_size + offset, all different; -1 is not written.
        layer_kv: `KVCache.strips` of the layer.
        geometry: Of the pool; its head_dim is even.

    Returns:
        The rotated queries, [T, num_heads, head_dim], contiguous.
    """
    heads, kv_heads, head_dim = geometry.num_heads, geometry.num_kv_heads, geometry.head_dim
    num_tokens, all_heads = slots.shape[0], heads + 2 * kv_heads
    assert qkv.dtype == cos.dtype == sin.dtype == layer_kv.dtype == geometry.dtype
    assert qkv.numel() == num_tokens * all_heads * head_dim
    assert cos.numel() == sin.numel() == num_tokens * head_dim
    assert head_dim % 2 == 0
    assert bias is None or (bias.dtype == qkv.dtype and bias.numel() == all_heads * head_dim)
    qkv, cos, sin = qkv.contiguous(), cos.contiguous(), sin.contiguous()
    query = qkv.new_empty(num_tokens, heads, head_dim)
    half_pad = triton.next_power_of_2(head_dim // 2)
    per_warp = max(1, _WARP_VALUES // half_pad)
    warps = 1 if num_tokens <= _FEW_TOKENS else _MOST_WARPS
    per_program = min(per_warp * warps, triton.next_power_of_2(all_heads))
    _rope_write_kernel[(num_tokens, -(-all_heads // per_program))](
        qkv,
        qkv if bias is None else bias.contiguous(),
        cos,
        sin,
        slots,
        layer_kv,
        query,
        NUM_HEADS=heads,
        NUM_KV_HEADS=kv_heads,
        HEADS=per_program,
        HEAD_DIM=head_dim,
        HALF_PAD=half_pad,
        BLOCK_SIZE=geometry.block_size,
        BLOCK_STRIDE=block_stride(geometry),
        BIASED=bias is not None,
        num_warps=warps,
    )
    return query


def reference_rope_write(
    qkv: torch.Tensor,
    bias: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    layer_kv: torch.Tensor,
    *,
    geometry: KVGeometry,
) -> torch.Tensor:
    """`rope_write` in torch."""
    heads, kv_heads, head_dim = geometry.num_heads, geometry.num_kv_heads, geometry.head_dim
    biased = qkv if bias is None else qkv + bias
    biased = biased.reshape(len(slots), heads + 2 * kv_heads, head_dim)
    low, high = biased[:, : heads + kv_heads].float().chunk(2, -1)
    cosine, sine = (
        part.reshape(len(slots), 1, head_dim)[..., : head_dim // 2].float() for part in (cos, sin)
    )
    rotated = torch.cat((low * cosine - high * sine, high * cosine + low * sine), -1)
    rotated = rotated.to(qkv.dtype)
    query, key, value = rotated[:, :heads], rotated[:, heads:], biased[:, heads + kv_heads :]
    key, value = (part.transpose(0, 1)[None] for part in (key, value))
    reference_write_kv(key, value, layer_kv, slots, geometry=geometry)
    return query.contiguous()
