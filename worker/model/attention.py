"""Attention over the paged pool, registered with transformers under `ATTENTION`.

Heads of a group are folded into query rows; sums are float32 inside each operation. Exact
arithmetic takes P·V as one product per tile of 64 keys and joins the tiles, in float32, by a
binary tree in order of position. Missing tiles would add zero, so a row's bits depend on its
own positions alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from nightjar.errors import ModelRefused
from worker.model.operators import define, is_watched
from worker.model.plan import CONTEXT_TILE, Group, Plan
from worker.model.pool import KVCache
from worker.model.runtime import get_runtime

ATTENTION = "nightjar"
_UNSUPPORTED = ("s_aux", "sinks", "position_bias", "head_mask")


class Rule(NamedTuple):
    """How one layer turns scores into weights."""

    layer: int  # in the cache
    scaling: float
    window: int  # keys that a query sees, itself included; 0 sees all
    softcap: float  # scores become softcap * tanh(score / softcap); 0 leaves them
    exact: bool  # whether bits must not depend on the batch


def attend(
    cache: KVCache,
    plan: Plan,
    rule: Rule,
    *,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> torch.Tensor:
    """Write the tokens' KV, then attend.

    Args:
        cache: The model's KV.
        plan: The forward's plan.
        rule: The layer's.
        query: [1, num_heads, num_tokens, head_dim].
        key: [1, num_kv_heads, num_tokens, head_dim].
        value: Like key.

    Returns:
        [1, num_tokens, num_heads, head_dim].
    """
    plan.layers.add(rule.layer)
    head_dim = query.shape[3]
    new = torch.cat((key, value)).view(-1, head_dim)
    cache.rows[rule.layer].index_copy_(0, plan.write_rows, new)
    outputs = [_attend_group(cache, group, rule, query[0]) for group in plan.groups]
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    if plan.output_rows is not None:
        output = output.index_select(0, plan.output_rows)
    return output.view(1, plan.num_tokens, query.shape[1], head_dim)


def _attend_group(cache: KVCache, group: Group, rule: Rule, query: torch.Tensor) -> torch.Tensor:
    """Attend for one group; returns [R * n, num_heads * head_dim]."""
    geometry = cache.geometry
    kv_heads, head_dim, dtype = geometry.num_kv_heads, geometry.head_dim, geometry.dtype
    rows, queries, context = group.num_rows, group.num_queries, group.context
    if group.gathered is None:
        strip = geometry.block_size * head_dim
        group.gathered = torch.empty(len(group.strips), strip, dtype=dtype)
    torch.index_select(cache.strips[rule.layer], 0, group.strips, out=group.gathered)
    if group.stale is not None:
        group.gathered.view(-1, head_dim).index_fill_(0, group.stale, 0)
    keys, values = group.gathered.view(2, rows * kv_heads, context, head_dim)

    if group.query_tokens is not None:
        query = query.index_select(1, group.query_tokens)
    folded = query.reshape(kv_heads, -1, rows, queries, head_dim).permute(2, 0, 1, 3, 4)
    shape = folded.shape  # [R, kv_heads, heads per kv head, n, head_dim]
    folded = folded.reshape(rows * kv_heads, -1, head_dim)

    mask = group.mask(rule.window, shape[1], shape[2], dtype)
    if rule.softcap:
        scores = torch.bmm(folded, keys.transpose(1, 2)).float()
        scores = scores.mul_(rule.scaling / rule.softcap).tanh_().mul_(rule.softcap).add_(mask)
        weights = torch.softmax(scores, -1).to(dtype)
    else:
        scores = torch.baddbmm(mask, folded, keys.transpose(1, 2), alpha=rule.scaling)
        weights = torch.softmax(scores, -1)
    result = _join_tiles(weights, values) if rule.exact else torch.bmm(weights, values)
    return result.view(shape).permute(0, 3, 1, 2, 4).reshape(rows * queries, -1)


def _join_tiles(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """P·V in tiles: weights [B, M, S], values [B, S, head_dim] -> [B, M, head_dim]."""
    batch, height, context = weights.shape
    count, head_dim = context // CONTEXT_TILE, values.shape[2]
    tiles = weights.view(batch, height, count, CONTEXT_TILE).transpose(1, 2)
    parts = torch.bmm(
        tiles.reshape(batch * count, height, CONTEXT_TILE),
        values.reshape(batch * count, CONTEXT_TILE, head_dim),
    )
    if count == 1:
        return parts
    joined = parts.view(batch, count, height, head_dim)
    if count == 2:  # one addition rounds once: the bits of the tree below
        return joined[:, 0] + joined[:, 1]
    joined = joined.float()
    while count > 1:
        half = count // 2
        pairs = joined[:, 0 : 2 * half : 2] + joined[:, 1 : 2 * half : 2]
        joined = pairs if count % 2 == 0 else torch.cat((pairs, joined[:, -1:]), 1)
        count = joined.shape[1]
    return joined[:, 0].to(values.dtype)


def refuse_unserved(
    names: Iterable[str], given: Mapping[str, object], attention_mask: torch.Tensor | None
) -> None:
    """Refuse what the paged forward would leave out.

    Raises:
        ModelRefused: There is a mask, or one of `names` is given.
    """
    for name in names:
        if given.get(name) is not None:
            raise ModelRefused(f"its attention uses {name}, which is not served")
    if attention_mask is not None:
        raise ModelRefused("its attention adds a mask of its own, which is not served")


def _registered(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls; refuses what the paged forward would leave out."""
    refuse_unserved(_UNSUPPORTED, kwargs, attention_mask)
    if value.shape != key.shape:
        raise ModelRefused("its keys and values differ in shape, which is not served")
    runtime, layer = module.nightjar_runtime, module.layer_idx
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    window, cap = sliding_window or 0, softcap or 0.0
    if is_watched():
        op = torch.ops.nightjar.attention.default
        return op(query, key, value, runtime, layer, scale, window, cap), None
    return _attention(query, key, value, runtime, layer, scale, window, cap), None  # type: ignore[arg-type]


def _attention(  # noqa: PLR0917 - an operator's schema
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    runtime: str,
    layer: int,
    scaling: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    state = get_runtime(runtime)
    if state.cache is None:
        state.shapes.add((query.shape[1], key.shape[1], key.shape[3]))
        return torch.zeros_like(query.transpose(1, 2))
    if state.paged is not None:
        return state.paged.attend(
            state.cache,
            layer,
            query,
            key,
            value,
            scaling=scaling,
            window=window,
            softcap=softcap,
        )
    if state.native is not None:
        return state.native.attend(
            layer, query, key, value, scaling=scaling, window=window, softcap=softcap
        )
    assert state.plan is not None
    rule = Rule(layer, scaling, window, softcap, state.exact)
    return attend(state.cache, state.plan, rule, query=query, key=key, value=value)


def _fake_attention(  # noqa: PLR0917 - an operator's schema
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    runtime: str,
    layer: int,
    scaling: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], query.shape[3])


define(
    "attention(Tensor query, Tensor key, Tensor value, str runtime, int layer, float scaling, "
    "int window, float softcap) -> Tensor",
    _attention,
    _fake_attention,
)


def _no_mask(*args: object, **kwargs: object) -> None:
    return None


AttentionInterface.register(ATTENTION, _registered)
AttentionMaskInterface.register(ATTENTION, _no_mask)
