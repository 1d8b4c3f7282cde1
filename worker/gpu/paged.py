"""Attention of one model's forwards on a device: the kernels, and the inputs they now read."""

from __future__ import annotations

import torch

from worker.gpu.buckets import Buckets
from worker.kernels.attention import (
    LayerRule,
    attend,
    paged_attention,
    partial_floats,
)
from worker.kernels.attention_filling import programs_per_tile, shape_of
from worker.kernels.attention_inputs import SHORT_HEIGHTS, AttentionInputs, num_parts
from worker.kernels.rope_write import rope_write
from worker.model.pool import KVCache, KVGeometry

_MOST_PARTIALS = 1 << 26  # floats; forwards that would need more do not split, to the same bits


class PagedAttention:
    """What `nightjar::attention` and `nightjar::rope_attention` call where kernels run."""

    def __init__(self, geometry: KVGeometry, num_sms: int) -> None:
        """Attend over caches of `geometry`, on `num_sms` multiprocessors."""
        self.geometry, self.num_sms = geometry, num_sms
        self.inputs: AttentionInputs | None = None
        self.reached: set[int] = set()  # layers that attended since it was last emptied

    def partial_floats(self, buckets: Buckets, *, max_rows: int, table_width: int) -> int:
        """Scratch for every forward that is worth splitting, in floats."""
        geometry = self.geometry
        parts = num_parts(table_width, geometry.block_size)
        resident = {
            height: shape_of(
                height=height,
                group=geometry.num_heads // geometry.num_kv_heads,
                head_dim=geometry.head_dim,
                itemsize=geometry.dtype.itemsize,
            ).resident
            for height in SHORT_HEIGHTS
        }
        sizes = [
            size
            for size in (2, *buckets.products)
            if any(
                programs_per_tile(
                    capacity=min(size, max_rows),
                    num_kv_heads=geometry.num_kv_heads,
                    num_parts=parts,
                    num_sms=self.num_sms,
                    height=height,
                    resident=resident[height],
                )
                > 1
                for height in SHORT_HEIGHTS
            )
        ]
        needed = [
            partial_floats(
                max_tokens=size,
                num_heads=geometry.num_heads,
                head_dim=geometry.head_dim,
                num_parts=parts,
            )
            for size in sizes
        ]
        return max((floats for floats in needed if floats <= _MOST_PARTIALS), default=1)

    def attend(
        self,
        cache: KVCache,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float,
        window: int,
        softcap: float,
    ) -> torch.Tensor:
        """Write the tokens' KV, then attend; shapes as in `attention.attend`."""
        assert self.inputs is not None
        self.reached.add(layer)
        return paged_attention(
            query,
            key,
            value,
            cache.strips[layer],
            self.inputs,
            LayerRule(scaling=scaling, window=window, softcap=softcap),
            geometry=self.geometry,
            num_sms=self.num_sms,
        )

    def rope_attend(  # noqa: PLR0917 - as the operator passes them
        self,
        cache: KVCache,
        layer: int,
        qkv: torch.Tensor,
        bias: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        *,
        scaling: float,
        window: int,
    ) -> torch.Tensor:
        """Like `attend` from a merged product, as `rope_write` takes it."""
        assert self.inputs is not None
        self.reached.add(layer)
        strips, slots = cache.strips[layer], self.inputs.slots
        query = rope_write(qkv, bias, cos, sin, slots, strips, geometry=self.geometry)
        return attend(
            query[None].transpose(1, 2),
            strips,
            self.inputs,
            LayerRule(scaling=scaling, window=window),
            geometry=self.geometry,
            num_sms=self.num_sms,
        )
