"""Flags that contradict each other or the model, told before anything is loaded."""

from __future__ import annotations

from nightjar.errors import ConfigError
from worker.config import WorkerConfig

DEFAULT_MAX_MODEL_LEN = 2048


def check_config(config: WorkerConfig) -> None:
    """Refuse flags that contradict each other, before anything is loaded.

    Raises:
        ConfigError: Names the flags.
    """
    if config.max_num_batched_tokens < config.max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens={config.max_num_batched_tokens}: must be at least "
            f"--max-num-seqs={config.max_num_seqs}, a token of a step for each row"
        )
    if config.draft and config.proposer != "draft_model":
        raise ConfigError(f"--draft={config.draft!r}: --proposer={config.proposer} uses no draft")
    if config.gamma is None:
        return
    if config.planner:
        raise ConfigError(f"--gamma={config.gamma}: the planner of --planner decides; leave it out")
    most = 0 if config.proposer == "none" else config.max_gamma
    if not 0 <= config.gamma <= most:
        raise ConfigError(f"--gamma={config.gamma}: must be 0 to {most}")


def max_model_len(config: WorkerConfig, model_len: int, num_base_blocks: int) -> int:
    """Most tokens of prompt and answer.

    Args:
        config: --max-model-len, or 0 for min(model's, 2048, the pool's).
        model_len: The model's own limit.
        num_base_blocks: Blocks of the pool's head, which must hold one full-length row.

    Raises:
        ConfigError: The given length exceeds the model's or the pool's.
    """
    num_slots = num_base_blocks * config.block_size
    given = config.max_model_len
    if given == 0:
        return min(model_len, DEFAULT_MAX_MODEL_LEN, num_slots)
    if given > model_len:
        raise ConfigError(f"--max-model-len={given}: the model's context is {model_len} tokens")
    if given > num_slots:
        flag = f"--num-blocks={num_base_blocks}" if config.num_blocks else f"--kv-mb={config.kv_mb}"
        raise ConfigError(
            f"{flag}: holds {num_slots} tokens, less than one row of --max-model-len={given}"
        )
    return given
