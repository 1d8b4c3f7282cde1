"""The processors once more, token by token, as the order of operations says and nothing faster."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from worker.messages import SamplingParams


def plain_logits(
    logits: np.ndarray,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    ending_ids: Iterable[int],
) -> np.ndarray:
    """Logits that the token after prompt and output is chosen of. logits: [vocab] float32."""
    z = [np.float32(value) for value in logits]
    for token, bias in params.logit_bias:
        z[token] = np.float32(z[token] + np.float32(bias))
    penalty = params.repetition_penalty
    for token in set(prompt) | set(output):
        if penalty != 1 and token < len(z):
            factor = np.float32(1 / penalty) if z[token] > 0 else np.float32(penalty)
            z[token] = np.float32(z[token] * factor)
    for token in set(output):
        if token < len(z):
            count = np.float32(list(output).count(token))
            taken = np.float32(np.float32(params.frequency_penalty) * count)
            z[token] = np.float32(
                np.float32(z[token] - taken) - np.float32(params.presence_penalty)
            )
    if len(output) < params.min_tokens:
        for token in ending_ids:
            if token < len(z):
                z[token] = np.float32(-np.inf)
    return np.array(z, np.float32)
