"""Flags that contradict each other or the model, told before anything is loaded."""

from __future__ import annotations

from nightjar.errors import ConfigError
from worker.config import WorkerConfig, resolved

DEFAULT_MAX_MODEL_LEN = 2048
LEAST_POOL_TOKENS = 256  # of a pool without a word on how long requests are: a short chat


def check_config(config: WorkerConfig) -> None:
    """Refuse flags that contradict each other, before anything is loaded.

    Raises:
        ConfigError: Names the flags.
    """
    config = resolved(config)
    if config.max_num_batched_tokens < config.max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens={config.max_num_batched_tokens}: must be at least "
            f"--max-num-seqs={config.max_num_seqs}, a token of a step for each row"
        )
    if config.num_blocks:
        _check_pool(config, config.num_blocks * config.block_size, LEAST_POOL_TOKENS)
    if config.draft and config.proposer != "draft_model":
        raise ConfigError(f"--draft={config.draft!r}: --proposer={config.proposer} uses no draft")
    if config.device == "cpu" and config.dtype == "float16":
        raise ConfigError("--dtype='float16': runs on a GPU only; choose float32 or bfloat16")
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
        config: --max-model-len, or 0 for min(model's, 2048, the pool's); `shortened` says of
            the last that it was the least.
        model_len: The model's own limit.
        num_base_blocks: Blocks of the pool's head, which must hold one full-length row.

    Raises:
        ConfigError: The given length exceeds the model's or the pool's, or none is given and
            the pool holds no request of a usual size.
    """
    num_slots = num_base_blocks * config.block_size
    given = config.max_model_len
    if given > model_len:
        raise ConfigError(f"--max-model-len={given}: the model's context is {model_len} tokens")
    _check_pool(config, num_slots, min(model_len, LEAST_POOL_TOKENS))
    return given or min(model_len, DEFAULT_MAX_MODEL_LEN, num_slots)


def shortened(config: WorkerConfig, model_len: int, length: int) -> str:
    """What to tell of a `length` that the pool made less than the model's; empty if it did not."""
    wanted = min(model_len, DEFAULT_MAX_MODEL_LEN)
    if config.max_model_len or length >= wanted:
        return ""
    return (
        f"{_pool_flag(config)}: holds {length} tokens, so that prompt and answer have {length} at "
        f"most, not {wanted}; --max-model-len={length} says that this is meant"
    )


def _check_pool(config: WorkerConfig, num_slots: int, least: int) -> None:
    """Refuse a pool of `num_slots` tokens that is too small for one request."""
    given = config.max_model_len
    if given > num_slots:
        raise ConfigError(
            f"{_pool_flag(config)}: holds {num_slots} tokens, less than one row of "
            f"--max-model-len={given}"
        )
    if given == 0 and num_slots < least:
        raise ConfigError(
            f"{_pool_flag(config)}: holds {num_slots} tokens, prompt and answer together, where "
            f"{least} are the least; --max-model-len={num_slots} says that requests are that short"
        )


def _pool_flag(config: WorkerConfig) -> str:
    """The flag that the pool's size comes from."""
    config = resolved(config)
    if config.num_blocks:
        return f"--num-blocks={config.num_blocks}"
    if config.kv_mb:
        return f"--kv-mb={config.kv_mb}"
    return f"--gpu-memory-share={config.gpu_memory_share:g}"
