"""Model folders of given shapes: configuration and tokenizer only, weights are drawn at load."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A Qwen2 of these sizes."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    tied: bool
    positions: int = 32768

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.hidden // self.heads

    @property
    def step_params(self) -> int:
        """Parameters of the matrices that every step reads, LM head included."""
        kv = self.kv_heads * self.head_dim
        attention = self.hidden * (2 * self.hidden + 2 * kv)
        mlp = 3 * self.hidden * self.intermediate
        return self.layers * (attention + mlp) + self.vocab * self.hidden

    @property
    def kv_values(self) -> int:
        """Numbers that a token's KV holds."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    def write(self, root: Path) -> Path:
        """Write the folder under `root` and return it."""
        folder = root / self.name
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocab,
            "tie_word_embeddings": self.tied,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "max_position_embeddings": self.positions,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "use_sliding_window": False,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "torch_dtype": "bfloat16",
        }
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer(self.vocab)))
        return folder


# The sizes of Qwen2-7B and Qwen2-0.5B, the draft's vocabulary widened to the target's.
TARGET = Shape(
    name="target7b",
    hidden=3584,
    intermediate=18944,
    layers=28,
    heads=28,
    kv_heads=4,
    vocab=152064,
    tied=False,
)
DRAFT = Shape(
    name="draft05b",
    hidden=896,
    intermediate=4864,
    layers=24,
    heads=14,
    kv_heads=2,
    vocab=152064,
    tied=True,
)
TINY_TARGET = Shape(
    name="target",
    hidden=64,
    intermediate=128,
    layers=2,
    heads=4,
    kv_heads=2,
    vocab=512,
    tied=False,
    positions=512,
)
TINY_DRAFT = Shape(
    name="draft",
    hidden=32,
    intermediate=64,
    layers=1,
    heads=2,
    kv_heads=1,
    vocab=512,
    tied=True,
    positions=512,
)


def tokenizer(size: int) -> dict[str, Any]:
    """A byte-level tokenizer of exactly `size` tokens: bytes, then invented words."""
    symbols = [*_byte_symbols()]
    words = [f"word{number}" for number in range(size - len(symbols))]
    vocab = {token: number for number, token in enumerate([*symbols, *words])}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    model = {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": False}
    return {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {**level, "use_regex": True},
        "decoder": {**level, "use_regex": True},
        "model": model,
    }


def _byte_symbols() -> list[str]:
    """The printable stand-in of each byte in byte-level vocabularies."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [byte for byte in range(256) if byte not in kept]
    symbols = {byte: chr(byte) for byte in kept}
    symbols |= {byte: chr(256 + rank) for rank, byte in enumerate(moved)}
    return [symbols[byte] for byte in range(256)]
