"""Logits of a Llama folder with every sum in float64, one layer in memory at a time.

With `rounding` each operation's result is rounded to that dtype, at the places where
transformers' classes round. So what two folders compute can be compared free of the order in which
kernels add.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional as F

TOLERANCE = 1e-12  # of float64 logits, relative to the largest
Found = dict[str, float | int | bool]


class Weights:
    """Tensors of a folder by name, rounded to the dtype that the model runs in."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._files: dict[str, Any] = {}
        for path in sorted(folder.glob("*.safetensors")):
            file = safe_open(path, framework="pt")
            self._files.update(dict.fromkeys(file.keys(), file))

    def __call__(self, name: str) -> Tensor:
        """One tensor, on the CPU."""
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor.to(self._dtype)


def config_of(folder: Path) -> dict[str, Any]:
    """The folder's config.json."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


@torch.inference_mode()
def logits(
    folder: Path, ids: Tensor, *, dtype: torch.dtype, rounding: torch.dtype | None, device: str
) -> Tensor:
    """[tokens, vocabulary], float64.

    Args:
        folder: A plain Llama.
        ids: [tokens].
        dtype: That the weights are rounded to.
        rounding: That results are rounded to; None: not at all.
        device: Where it runs.
    """
    config, read = config_of(folder), Weights(folder, dtype)

    def rounded(x: Tensor) -> Tensor:
        return x if rounding is None else x.to(rounding).double()

    def weight(name: str) -> Tensor:
        return read(f"{name}.weight").to(device).double()

    def norm(x: Tensor, name: str) -> Tensor:
        mean = x.square().mean(-1, keepdim=True)
        return rounded(rounded(x * torch.rsqrt(mean + config["rms_norm_eps"])) * weight(name))

    def linear(x: Tensor, name: str) -> Tensor:
        return rounded(x @ weight(name).T)

    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    width = config.get("head_dim") or config["hidden_size"] // heads
    cos, sin = (rounded(part) for part in _rotation(config, len(ids), width, device))
    hidden = torch.ones(len(ids), len(ids), dtype=torch.bool, device=device).triu(1)

    def turned(x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=-1)
        other = torch.cat([-right, left], dim=-1)
        return rounded(rounded(x * cos) + rounded(other * sin))

    def attention(x: Tensor, at: str) -> Tensor:
        q, k, v = (
            linear(x, f"{at}.{name}_proj").unflatten(-1, (-1, width)).transpose(0, 1)
            for name in "qkv"
        )
        k, v = (part.repeat_interleave(heads // kv_heads, 0) for part in (turned(k), v))
        scores = rounded(rounded(turned(q) @ k.transpose(1, 2)) * width**-0.5)
        shares = rounded(scores.masked_fill(hidden, -torch.inf).softmax(-1))
        return linear(rounded(shares @ v).transpose(0, 1).flatten(1), f"{at}.o_proj")

    def mlp(x: Tensor, at: str) -> Tensor:
        gate = rounded(F.silu(linear(x, f"{at}.gate_proj")))
        return linear(rounded(gate * linear(x, f"{at}.up_proj")), f"{at}.down_proj")

    x = weight("model.embed_tokens")[ids.to(device)]
    for index in range(config["num_hidden_layers"]):
        at = f"model.layers.{index}"
        x = rounded(x + attention(norm(x, f"{at}.input_layernorm"), f"{at}.self_attn"))
        x = rounded(x + mlp(norm(x, f"{at}.post_attention_layernorm"), f"{at}.mlp"))
    tied = config.get("tie_word_embeddings", False)
    return linear(norm(x, "model.norm"), "model.embed_tokens" if tied else "lm_head")


def compare(source: Path, replica: Path, ids: Tensor, *, dtype: torch.dtype, device: str) -> Found:
    """How far the replica's logits are from its source's.

    `exact` says that they agree to float64's own error, and to the bit where results are rounded
    to `dtype`.
    """
    plain, rounded = (
        [
            logits(folder, ids, dtype=dtype, rounding=rounding, device=device)
            for folder in (source, replica)
        ]
        for rounding in (None, dtype)
    )
    error = float((plain[1] - plain[0]).abs().max() / plain[0].abs().max())
    num_differing = int((rounded[0] != rounded[1]).sum())
    return {
        "num_tokens": len(ids),
        "float64_relative_error": error,
        "num_rounded_logits": rounded[0].numel(),
        "num_differing_rounded_logits": num_differing,
        "exact": error <= TOLERANCE and num_differing == 0,
    }


def _rotation(
    config: dict[str, Any], num_tokens: int, width: int, device: str
) -> tuple[Tensor, Tensor]:
    """Cosine and sine [tokens, width] of rotary embedding, from float32 angles."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta") or config.get("rope_theta", 10000.0)
    steps = torch.arange(0, width, 2, dtype=torch.float32, device=device) / width
    angles = torch.outer(torch.arange(num_tokens, device=device).float(), 1.0 / theta**steps)
    both = torch.cat([angles, angles], dim=-1)
    return both.cos().double(), both.sin().double()
