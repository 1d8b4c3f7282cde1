"""Tiny random checkpoints of other architectures, right and wrong ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

_BASE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GPT2 = {"vocab_size": 256, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
_NEOX = {key: value for key, value in _BASE.items() if key != "num_key_value_heads"}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _BASE,
    "mistral": {**_BASE, "sliding_window": 64},
    "qwen2": {**_BASE, "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
    "qwen3": {**_BASE, "head_dim": 32},
    "gemma2": {**_BASE, "sliding_window": 16, "head_dim": 16},
    "gpt2": _GPT2,
    "gpt_neox": _NEOX,
    "phi3": _BASE,
    "bloom": {"vocab_size": 256, "hidden_size": 64, "n_layer": 2, "n_head": 4},
    "stablelm": _BASE,
    "qwen3_moe": {
        **_BASE,
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "gpt_oss": {**_BASE, "num_local_experts": 4, "head_dim": 16},
    "mamba": {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2},
    "lfm2": {**_BASE, "layer_types": ["conv", "full_attention", "conv"]},
    "deepseek_v3": {**_BASE, "kv_lora_rank": 16, "q_lora_rank": 16},
}


def family_folder(root: Path, family: str, **changes: Any) -> Path:
    """Write a checkpoint of `family` with seeded random weights; returns its folder."""
    config = AutoConfig.for_model(family, **{**FAMILIES[family], **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
    folder = root / family
    model.save_pretrained(folder)
    return folder
