"""Training a draft: its distribution is brought near the target's on rows that the target wrote."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

HELD_OUT = 0.02  # of the rows, for the loss that is told
WARM_STEPS = 300
HEAD_DIM = 64


class Training:
    """A target that stays as it is, and the draft that learns from it."""

    def __init__(
        self,
        *,
        target: Path,
        init: Path | None,
        shape: tuple[int, int, int] | None,
        device: str,
        batch: int,
        seed: int,
    ) -> None:
        """Load.

        Args:
            target: Folder of the target.
            init: Folder of the draft to go on from; None: a new one.
            shape: Width, layers and FFN of a new one.
            device: Where it runs.
            batch: Rows of a step.
            seed: Of new weights and of the rows' order.
        """
        torch.manual_seed(seed)
        self._device, self._batch = device, batch
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self._target: Any = AutoModelForCausalLM.from_pretrained(target, dtype=dtype)
        self._target.to(device).eval().requires_grad_(False)
        if init is not None:
            self._draft: Any = AutoModelForCausalLM.from_pretrained(init, dtype=torch.float32)
        else:
            assert shape is not None
            self._draft = narrow(self._target, *shape)
        self._draft.to(device)

    def run(
        self,
        tokens: Tensor,
        first: Tensor,
        seconds: float,
        rate: float,
        say: Callable[[str], None],
    ) -> None:
        """Train for so long.

        Args:
            tokens: [rows, length].
            first: [rows]: tokens of each row that are its prompt.
            seconds: The learning rate falls to nothing over them.
            rate: Largest learning rate.
            say: Takes progress; last the divergence on held-out rows, before and after.
        """
        held = max(1, round(HELD_OUT * len(tokens)))
        before = self._held_out(tokens[:held], first[:held])
        fast: Any = torch.compile(self._loss) if self._device == "cuda" else self._loss
        optimizer = torch.optim.AdamW(
            self._draft.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.05
        )
        begin, step = time.monotonic(), 0
        while (part := (time.monotonic() - begin) / seconds) < 1:
            warm, fall = min(1, (step + 1) / WARM_STEPS), 0.51 + 0.49 * math.cos(math.pi * part)
            for group in optimizer.param_groups:
                group["lr"] = rate * warm * fall
            chosen = torch.randint(held, len(tokens), (self._batch,))
            loss = fast(*self._moved(tokens[chosen], first[chosen]))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(self._draft.parameters(), 1.0)
            optimizer.step()
            if step % 200 == 0:
                say(f"step {step}, {time.monotonic() - begin:.0f} s: divergence {loss.item():.3f}")
            step += 1
        after = self._held_out(tokens[:held], first[:held])
        say(f"{step} steps; divergence on held-out rows {before:.4f} before, {after:.4f} after")

    def save(self, folder: Path) -> None:
        """Write the draft in bfloat16."""
        self._draft.to(torch.bfloat16).save_pretrained(folder)

    def _loss(self, tokens: Tensor, first: Tensor) -> Tensor:
        """Mean divergence of draft from target, where the target wrote the next token."""
        with torch.no_grad():
            wanted = self._target(input_ids=tokens, use_cache=False).logits.float()
        with torch.autocast(self._device, torch.bfloat16, enabled=self._device == "cuda"):
            given = self._draft(input_ids=tokens, use_cache=False).logits
        wanted, given = wanted.log_softmax(-1), given.float().log_softmax(-1)
        divergence = (wanted.exp() * (wanted - given)).sum(-1)[:, :-1]
        at = torch.arange(1, tokens.shape[1], device=tokens.device)  # of the token that comes next
        counts = (at[None] >= first[:, None]).float()
        mean: Tensor = (divergence * counts).sum() / counts.sum()
        return mean

    @torch.no_grad()
    def _held_out(self, tokens: Tensor, first: Tensor) -> float:
        size = self._batch
        losses = [
            float(self._loss(*self._moved(tokens[i : i + size], first[i : i + size])))
            for i in range(0, len(tokens), size)
        ]
        return sum(losses) / len(losses)

    def _moved(self, tokens: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        return tokens.to(self._device), first.to(self._device)


def narrow(target: Any, width: int, layers: int, ffn: int) -> Any:
    """A new draft: random layers, and the target's embedding on its strongest directions."""
    own = target.config
    config = LlamaConfig(
        vocab_size=own.vocab_size,
        hidden_size=width,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=width // HEAD_DIM,
        num_key_value_heads=max(1, width // (2 * HEAD_DIM)),
        head_dim=HEAD_DIM,
        max_position_embeddings=own.max_position_embeddings,
        rms_norm_eps=own.rms_norm_eps,
        rope_parameters=own.rope_parameters,
        tie_word_embeddings=True,
        bos_token_id=own.bos_token_id,
        eos_token_id=own.eos_token_id,
    )
    draft = LlamaForCausalLM(config)
    embedding = target.get_input_embeddings().weight.detach().float()
    left, size, _ = torch.pca_lowrank(embedding, q=width, center=False)
    directions = (left * size).cpu()
    with torch.no_grad():
        draft.get_input_embeddings().weight.copy_(directions / directions.std() * 0.05)
    return draft
