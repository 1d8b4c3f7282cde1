"""The arithmetic fingerprint: workers with equal ones give equal bits for equal inputs."""

from __future__ import annotations

import hashlib

import torch
import transformers

from worker.model.device import CPU, Placement, device_kind
from worker.model.forward import ModelForward
from worker.model.linear import can_pack
from worker.model.probe_rows import ProbeRows

ARITHMETIC_VERSION = 3  # raised by whoever changes an order of additions
_PROBE_TOKENS = 4


def fingerprint(
    forward: ModelForward, *, dtype: str, build: str, placement: Placement = CPU
) -> str:
    """SHA-256 over what decides the bits, a fixed probe's logits included."""
    parts = (
        "nightjar-cuda" if placement.kernels else "nightjar-cpu",
        ARITHMETIC_VERSION,
        "exact" if forward.runtime.exact else "free",
        device_kind(placement),
        torch.__version__,
        transformers.__version__,
        build,
        dtype,
        *(_of_kernels() if placement.kernels else _of_processor()),
        probe_digest(forward),
    )
    return hashlib.sha256("|".join(map(str, parts)).encode()).hexdigest()


def _of_processor() -> tuple[int, str]:
    return torch.get_num_threads(), "packed" if can_pack() else "plain"


def _of_kernels() -> tuple[str]:
    import triton  # only here: a CPU's worker does without

    return (triton.__version__,)


def probe_digest(forward: ModelForward) -> str:
    """Digest of the logits of a few tokens after a prompt, both fixed."""
    start = max(0, min(40, forward.max_model_len - _PROBE_TOKENS))
    count = min(_PROBE_TOKENS, forward.max_model_len)
    rows = ProbeRows(forward, starts=[start], num_checked=count)
    try:
        logits = rows.run([(rows.rows[0], 0, count)])
    finally:
        rows.close()
    return hashlib.sha256(logits.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
