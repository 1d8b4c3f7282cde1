"""A small Llama's weights as a wide, deep Llama's that computes the same function.

The residual stream holds r copies of the source's. What writes to it is repeated; what reads it
is repeated times powers of two that add up to one, so that every weight stays exact in bfloat16
(the idea of Net2WiderNet, arXiv 1511.05641). Norms see the same mean of squares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")
Read = Callable[[str], Tensor]  # a tensor of the source by its name


class CannotReplicate(Exception):
    """This source, or this shape of it, has no exact replica; says why."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How often each part of a source is repeated."""

    width_copies: int  # of the residual stream
    num_layers: int  # the source's, and between them layers that add nothing
    num_heads: int
    num_kv_heads: int
    ffn_copies: int


# Of SmolLM2-135M (576 wide, 30 layers, 9/3 heads of 64, FFN 1536), and of its draft (256 wide,
# 4 layers, 4/2 heads of 64, FFN 768).
SHAPES = {
    "7b": Shape(width_copies=6, num_layers=30, num_heads=48, num_kv_heads=8, ffn_copies=13),
    "13b": Shape(width_copies=9, num_layers=48, num_heads=72, num_kv_heads=18, ffn_copies=9),
    "30b": Shape(width_copies=9, num_layers=64, num_heads=72, num_kv_heads=18, ffn_copies=18),
    "draft": Shape(width_copies=4, num_layers=24, num_heads=16, num_kv_heads=2, ffn_copies=6),
    "draft-shallow": Shape(
        width_copies=4, num_layers=4, num_heads=16, num_kv_heads=2, ffn_copies=6
    ),
}


def split(count: int) -> list[float]:
    """`count` powers of two that add up to one, as even as can be."""
    half = 2.0 ** -int(math.log2(count))
    num_small = 2 * (count - round(1 / half))
    return [half] * (count - num_small) + [half / 2] * num_small


class Replica:
    """Tensors of the replica of one source in one shape."""

    def __init__(self, config: dict[str, Any], shape: Shape) -> None:
        """Plan.

        Args:
            config: The source's config.json.
            shape: Of the replica.

        Raises:
            CannotReplicate: The source is no plain Llama, or the shape does not hold it.
        """
        if config.get("model_type") != "llama":
            raise CannotReplicate(f"model_type is {config.get('model_type')!r}, not 'llama'")
        for bias in ("attention_bias", "mlp_bias"):
            if config.get(bias):
                raise CannotReplicate(f"{bias} is set, and biases are not replicated")
        heads = int(config["num_attention_heads"])
        self.source, self.shape = config, shape
        self.head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
        self.kv_heads = int(config.get("num_key_value_heads") or heads)
        self.group = heads // self.kv_heads
        self.num_layers = int(config["num_hidden_layers"])
        if shape.num_layers < self.num_layers:
            raise CannotReplicate(f"{shape.num_layers} layers are fewer than {self.num_layers}")
        if int(config["hidden_size"]) * shape.width_copies % shape.num_heads:
            raise CannotReplicate(
                f"the width, {shape.width_copies} times {config['hidden_size']}, is no multiple of "
                f"{shape.num_heads} heads, and transformers refuses that"
            )
        if shape.num_heads % shape.num_kv_heads:
            raise CannotReplicate(f"{shape.num_heads} heads over {shape.num_kv_heads} KV heads")
        if shape.num_kv_heads < self.kv_heads or set(self.q_heads) != set(range(heads)):
            raise CannotReplicate(
                f"{shape.num_heads}/{shape.num_kv_heads} heads do not hold {heads}/{self.kv_heads}"
            )

    @property
    def config(self) -> dict[str, Any]:
        """The replica's config.json."""
        own = {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": self.source["hidden_size"] * self.shape.width_copies,
            "intermediate_size": self.source["intermediate_size"] * self.shape.ffn_copies,
            "num_hidden_layers": self.shape.num_layers,
            "num_attention_heads": self.shape.num_heads,
            "num_key_value_heads": self.shape.num_kv_heads,
            "head_dim": self.head_dim,
            "tie_word_embeddings": False,
        }
        kept = {key: value for key, value in self.source.items() if key != "_name_or_path"}
        return {**kept, **own}

    @cached_property
    def kv_sources(self) -> list[int]:
        """Source KV head of each KV head."""
        return [
            i * self.kv_heads // self.shape.num_kv_heads for i in range(self.shape.num_kv_heads)
        ]

    @cached_property
    def q_heads(self) -> list[int]:
        """Source head of each head: those of a source KV head take its copies' places in turn."""
        places, found = self.shape.num_heads // self.shape.num_kv_heads, []
        used = [0] * self.kv_heads
        for kv in self.kv_sources:
            for _ in range(places):
                found.append(kv * self.group + used[kv] % self.group)
                used[kv] += 1
        return found

    @cached_property
    def q_scales(self) -> list[float]:
        """Factor on each head's output."""
        left = {head: split(self.q_heads.count(head)) for head in set(self.q_heads)}
        return [left[head].pop() for head in self.q_heads]

    @cached_property
    def layer_sources(self) -> list[tuple[int, bool]]:
        """Source layer of each layer, and whether it counts; one that does not adds nothing."""
        total, found, last = self.shape.num_layers, [], -1
        for at in range(total):
            source = min(at * self.num_layers // total, self.num_layers - 1)
            found.append((source, source != last))
            last = source
        return found

    def layers(self, read: Read) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors of the replica, layer after layer; reads each source as it comes."""
        r = self.shape.width_copies
        embedding = read("model.embed_tokens.weight")
        yield "model.embed_tokens.weight", embedding.repeat(1, r)
        for at, (source, counts) in enumerate(self.layer_sources):
            for name, tensor in self._layer(lambda n, i=source: read(f"model.layers.{i}.{n}")):
                adds = counts or name.split(".")[1] not in ("o_proj", "down_proj")
                yield f"model.layers.{at}.{name}", tensor if adds else torch.zeros_like(tensor)
        yield "model.norm.weight", read("model.norm.weight").repeat(r)
        tied = self.source.get("tie_word_embeddings", False)
        yield "lm_head.weight", self._reading(embedding if tied else read("lm_head.weight"))

    def _layer(self, read: Read) -> Iterator[tuple[str, Tensor]]:
        r, m = self.shape.width_copies, self.shape.ffn_copies
        for name in LAYER_NORMS:
            yield f"{name}.weight", read(f"{name}.weight").repeat(r)
        for letter, heads in (("q", self.q_heads), ("k", self.kv_sources), ("v", self.kv_sources)):
            weight = read(f"self_attn.{letter}_proj.weight")
            chosen = weight.unflatten(0, (-1, self.head_dim))[heads].flatten(0, 1)
            yield f"self_attn.{letter}_proj.weight", self._reading(chosen)
        out = read("self_attn.o_proj.weight").unflatten(1, (-1, self.head_dim))
        scaled = [_times(out[:, h], s) for h, s in zip(self.q_heads, self.q_scales, strict=True)]
        yield "self_attn.o_proj.weight", torch.cat(scaled, dim=1).repeat(r, 1)
        for name in ("gate", "up"):
            weight = read(f"mlp.{name}_proj.weight")
            yield f"mlp.{name}_proj.weight", self._reading(weight).repeat(m, 1)
        down = read("mlp.down_proj.weight")
        yield "mlp.down_proj.weight", _copies(down, m).repeat(r, 1)

    def _reading(self, weight: Tensor) -> Tensor:
        """A weight [out, D] that reads the residual stream."""
        return _copies(weight, self.shape.width_copies)


def _copies(weight: Tensor, count: int) -> Tensor:
    """`count` copies beside each other, times powers of two that add up to one."""
    scaled = {factor: _times(weight, factor) for factor in set(split(count))}
    return torch.cat([scaled[factor] for factor in split(count)], dim=1)


def _times(weight: Tensor, factor: float) -> Tensor:
    """The weight times a power of two.

    Raises:
        CannotReplicate: A weight is so small that it would be rounded.
    """
    scaled = weight * factor
    if not torch.equal(scaled / factor, weight):
        raise CannotReplicate(f"a weight is too small to be multiplied by {factor} exactly")
    return scaled
