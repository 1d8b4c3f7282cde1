"""Arm: vLLM's CPU build, run by its own Python. One JSON job a line, one JSON answer a line."""

from __future__ import annotations

import json
import os
import sys
import time

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="2",
    VLLM_LOGGING_LEVEL="ERROR",
)

from vllm import LLM, SamplingParams, TokensPrompt


def main() -> None:
    """Load, then serve jobs."""
    folder, dtype = sys.argv[1:3]
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    llm = LLM(
        model=folder,
        dtype=dtype,
        max_model_len=2048,
        max_num_seqs=16,
        enforce_eager=True,
        enable_prefix_caching=False,
    )
    print(json.dumps({"ready": {"dtype": dtype}}), file=out)
    for line in sys.stdin:
        job = json.loads(line)
        params = SamplingParams(
            temperature=0, max_tokens=job["max_tokens"], ignore_eos=True, detokenize=False
        )
        prompts = [TokensPrompt(prompt_token_ids=ids) for ids in job["prompts"]]
        begin = time.perf_counter()
        answers = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        tokens = [list(answer.outputs[0].token_ids) for answer in answers]
        print(json.dumps({"seconds": seconds, "tokens": tokens}), file=out)


if __name__ == "__main__":
    main()
