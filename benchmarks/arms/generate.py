"""Arm: transformers' own `generate`, greedy. Reads one JSON job a line, answers one JSON line."""

from __future__ import annotations

import json
import os
import sys
import time

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    """Load, then serve jobs of prompts of equal length."""
    folder, dtype = sys.argv[1:3]
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    print(json.dumps({"ready": {"dtype": dtype}}), file=out)
    for line in sys.stdin:
        job = json.loads(line)
        count = job["max_tokens"]
        begin = time.perf_counter()
        tokens = []
        for prompt in job["prompts"]:
            ids = torch.tensor([prompt])
            with torch.inference_mode():
                answer = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    do_sample=False,
                    min_new_tokens=count,
                    max_new_tokens=count,
                    pad_token_id=0,
                )
            tokens.append(answer[0, len(prompt) :].tolist())
        print(json.dumps({"seconds": time.perf_counter() - begin, "tokens": tokens}), file=out)


if __name__ == "__main__":
    main()
