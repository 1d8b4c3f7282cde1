"""Tiny random Llamas with a byte-level tokenizer, targets and drafts, made in a second."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

Kind = Literal["target", "noisy", "random"]

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
EOS_TOKEN_ID = 2
_MERGES = (
    "Ġ t,h e,i n,Ġ a,r e,o n,Ġt he,e r,Ġ s,a t,Ġ w,o u,e n,Ġ c,i t,i s,o r,Ġ b,e d,Ġ f,in g,Ġ p,"
    "Ġ o,a n,a l,a r,Ġt o,Ġ m,Ġo f,Ġ in,Ġ d,Ġ h,Ġa n,i c,a s,l e,Ġan d,i on,o m,l l,en t,Ġ n,Ġ l,"
    "s t,Ġ re,v e,Ġ e,r o,l y,Ġb e,Ġ g,Ġ T,c t,Ġ S,i d,o t,Ġ I,u t,e t,Ġ A"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class TinyModels:
    """Folders of a tiny target and two of its drafts; the target itself is the third."""

    target: Path
    noisy: Path
    random: Path


def tiny_folder(
    root: Path, kind: Kind, seed: int = 0, *, noise: float = 0.06, **config: Any
) -> Path:
    """Write a model folder under `root` and return it.

    Args:
        root: Where the folder is made; its name says what it holds.
        kind: "target"; "noisy", the target of the same seed plus noise, so that some of its
            drafts are accepted; "random", other weights, so that few are.
        seed: Seed of the target's weights.
        noise: Standard deviation of a noisy copy's noise, relative to each tensor's own.
        config: Fields of `LlamaConfig`. A `vocab_size` above the tokenizer's is padding: pad
            ids get large logits, so that a sampler that forgets to mask them is found out.
    """
    tokenizer = byte_tokenizer()
    own = tokenizer.get_vocab_size()
    vocab_size = config.pop("vocab_size", own)
    shape = LlamaConfig(
        **{
            "vocab_size": own,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "tie_word_embeddings": False,  # tied random weights would echo their input
            "initializer_range": 0.15,  # wide enough that answers do not loop at once
            "bos_token_id": None,
            "eos_token_id": EOS_TOKEN_ID,
            "dtype": "float32",
            **config,
        }
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed if kind != "random" else seed + 1_000_003)
        model = LlamaForCausalLM(shape).eval()
        if kind == "noisy":
            _add_noise(model, noise)
        if vocab_size != own:
            _pad_vocabulary(model, own, vocab_size)
    parts = [kind, str(seed), *(f"{key}{value}" for key, value in sorted(config.items()))]
    parts += [f"vocab{vocab_size}"] if vocab_size != own else []
    parts += [f"noise{noise:g}"] if kind == "noisy" else []
    folder = root / "-".join(parts)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[EOS_TOKEN_ID],
        "pad_token": "<|pad|>",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def byte_tokenizer() -> Tokenizer:
    """A byte-level BPE of 320 tokens: 4 special ones, 256 bytes, 60 merges."""
    vocab = {token: i for i, token in enumerate(SPECIAL_TOKENS)}
    for symbol in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[symbol] = len(vocab)
    merges = [(left, right) for left, right in (pair.split(" ") for pair in _MERGES.split(","))]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS]
    )
    return tokenizer


def _add_noise(model: LlamaForCausalLM, noise: float) -> None:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:  # norms stay as they are
                draw = torch.randn(parameter.shape, generator=generator)
                parameter.add_(draw * parameter.std() * noise)


def _pad_vocabulary(model: LlamaForCausalLM, own: int, vocab_size: int) -> None:
    if vocab_size < own:
        raise ValueError(f"vocab_size {vocab_size} is below the tokenizer's {own}")
    model.resize_token_embeddings(vocab_size, mean_resizing=False)
    with torch.no_grad():
        model.lm_head.weight[own:] = 4 * torch.randn(vocab_size - own, model.config.hidden_size)
