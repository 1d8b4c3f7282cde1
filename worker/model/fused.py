"""Attention modules whose bias, rotary embedding and KV write are one kernel, on a device.

They stand in for transformers' modules of the same arithmetic, known by class.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from nightjar.errors import ModelRefused
from worker.model.attention import refuse_unserved
from worker.model.linear import Merged, MergedPart
from worker.model.operators import define, is_watched
from worker.model.runtime import Runtime, get_runtime

_MODELS = "transformers.models"
# Where each class keeps its window; without one it sees all keys.
_WINDOWS = {
    f"{_MODELS}.llama.modeling_llama.LlamaAttention": "",
    f"{_MODELS}.qwen2.modeling_qwen2.Qwen2Attention": "sliding_window",
    f"{_MODELS}.mistral.modeling_mistral.MistralAttention": "config.sliding_window",
}
_PARTS = ("q_proj", "k_proj", "v_proj")
_UNSUPPORTED = ("cache", "past_key_values", "past_key_value", "s_aux", "position_bias", "head_mask")


class FusedAttention(nn.Module):
    """Stands in for an attention module with merged q, k, v and rotary embedding over all of D."""

    def __init__(self, runtime: Runtime, own: Any, whole: Merged, window: int) -> None:
        """Take the parts of `own`, a module that `fuse_attention` knows."""
        super().__init__()
        self.qkv, self.o_proj = whole, own.o_proj
        self.nightjar_runtime, self.layer_idx = runtime.name, own.layer_idx
        self.num_heads = own.q_proj.out_features // own.head_dim
        self.num_kv_heads = own.k_proj.out_features // own.head_dim
        self.head_dim, self.scaling, self.window = own.head_dim, own.scaling, window

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """[1, T, in] -> [1, T, out], and no weights.

        Raises:
            ModelRefused: It is given what the paged forward would leave out.
        """
        refuse_unserved(_UNSUPPORTED, kwargs, attention_mask)
        cos, sin = position_embeddings
        if cos.shape[-1] != self.head_dim:
            raise ModelRefused("its rotary embedding leaves out a part of the head")
        linear = self.qkv.linear
        product = linear.product(hidden_states)
        operator = torch.ops.nightjar.rope_attention.default
        attend = operator if is_watched() else _rope_attention
        output = attend(
            product,
            linear.bias,
            cos,
            sin,
            self.nightjar_runtime,
            self.layer_idx,
            self.num_heads,
            self.num_kv_heads,
            self.scaling,
            self.window,
        )
        return self.o_proj(output), None


def fuse_attention(model: nn.Module, runtime: Runtime) -> int:
    """Put `FusedAttention` in place of modules it can stand in for; returns their number.

    Args:
        model: Its linears are merged already, by `replace_linears`.
        runtime: Of kernels.
    """
    assert runtime.kernels
    count = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            fused = _fused(child, runtime)
            if fused is not None:
                setattr(module, name, fused)
                count += 1
    return count


def _fused(own: Any, runtime: Runtime) -> FusedAttention | None:
    """The stand-in of a module; None if there is none."""
    where = _WINDOWS.get(f"{type(own).__module__}.{type(own).__qualname__}")
    if where is None or {name for name, _ in own.named_children()} != {*_PARTS, "o_proj"}:
        return None
    parts = [getattr(own, name) for name in _PARTS]
    if not all(isinstance(part, MergedPart) for part in parts):
        return None
    query, key, value = parts
    whole, head_dim = query.whole, own.head_dim
    ends = [0, query.stop, key.stop, whole.linear.out_features]
    if (
        any(part.whole is not whole for part in parts)
        or [part.start for part in parts] + [value.stop] != ends
        or key.out_features != value.out_features
        or any(part.out_features % head_dim for part in parts)
        or head_dim % 2
    ):
        return None
    window: Any = own
    for name in where.split(".") if where else ():
        window = getattr(window, name, None)
    return FusedAttention(runtime, own, whole, (window if where else None) or 0)


def _rope_attention(  # noqa: PLR0917 - an operator's schema
    qkv: torch.Tensor,
    bias: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    runtime: str,
    layer: int,
    num_heads: int,
    num_kv_heads: int,
    scaling: float,
    window: int,
) -> torch.Tensor:
    state = get_runtime(runtime)
    assert state.cache is not None
    assert state.paged is not None
    geometry = state.cache.geometry
    assert (num_heads, num_kv_heads) == (geometry.num_heads, geometry.num_kv_heads)
    output = state.paged.rope_attend(
        state.cache, layer, qkv, bias, cos, sin, scaling=scaling, window=window
    )
    return output.flatten(2)


def _fake_rope_attention(  # noqa: PLR0917 - an operator's schema
    qkv: torch.Tensor,
    bias: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    runtime: str,
    layer: int,
    num_heads: int,
    num_kv_heads: int,
    scaling: float,
    window: int,
) -> torch.Tensor:
    head_dim = qkv.shape[-1] // (num_heads + 2 * num_kv_heads)
    return qkv.new_empty(*qkv.shape[:-1], num_heads * head_dim)


define(
    "rope_attention(Tensor qkv, Tensor? bias, Tensor cos, Tensor sin, str runtime, int layer, "
    "int num_heads, int num_kv_heads, float scaling, int window) -> Tensor",
    _rope_attention,
    _fake_rope_attention,
)
