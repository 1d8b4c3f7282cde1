"""From a configuration and built models to an engine that is ready to run."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from memory_agent.arena import is_written_elsewhere
from nightjar.errors import ConfigError
from worker.config import WorkerConfig
from worker.engine.block_manager import BlockManager
from worker.engine.drafting import Drafting
from worker.engine.elastic import ElasticMemory
from worker.engine.engine import Channel, Engine
from worker.engine.links import Clock, CpuMeter, Memory, Planner
from worker.engine.runner import Runner
from worker.engine.scheduler import Scheduler
from worker.engine.sequence import StopDetector
from worker.sampling import sample
from worker.speculative.draft_model import DraftModelProposer
from worker.speculative.ngram import NgramProposer
from worker.speculative.proposer import Proposer

if TYPE_CHECKING:
    from worker.model.build import Models

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


def assemble(
    config: WorkerConfig,
    models: Models,
    channel: Channel,
    *,
    vocab_size: int,
    eos_token_ids: Iterable[int],
    stop_detector: Callable[[tuple[str, ...]], StopDetector],
    num_threads: int,
    clock: Clock = time.monotonic,
) -> Engine:
    """Put an engine together.

    Args:
        config: Checked by `check_config`.
        models: Target, draft and pool.
        channel: To the front.
        vocab_size: Of the tokenizer; the models may have padding above it.
        eos_token_ids: Of the tokenizer; the models' own count too.
        stop_detector: Makes what finds stop strings.
        num_threads: Threads that forwards run on.
        clock: Seconds, monotonic.

    Raises:
        ConfigError: Lengths do not fit model and pool.
    """
    layout, draft = models.layout, models.draft
    length = max_model_len(config, models.target.max_model_len, layout.num_base_blocks)
    num_ids = min(vocab_size, models.target.vocab_size)
    proposer: Proposer | None = NgramProposer() if config.proposer == "ngram" else None
    if draft is not None:
        proposer = DraftModelProposer(
            draft,
            sample,
            vocab_size=min(num_ids, draft.vocab_size),
            block_size=config.block_size,
            clock=clock,
        )
    blocks = BlockManager(
        layout.num_base_blocks,
        layout.num_extra_blocks,
        config.block_size,
        config.prefix_cache,
        secrets.token_bytes(32),
    )
    scheduler = Scheduler(
        blocks,
        Drafting(
            blocks,
            proposer,
            max_gamma=config.max_gamma,
            max_catchup_tokens=config.max_catchup_tokens,
        ),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
    )
    pool = models.pool
    elastic = ElasticMemory(
        scheduler,
        blocks,
        draft,
        clock,
        lambda: pool is None or not is_written_elsewhere(pool.arena_path),
    )
    return Engine(
        scheduler,
        Runner(
            models.target,
            proposer,
            sample,
            vocab_size=num_ids,
            block_size=config.block_size,
            clock=clock,
        ),
        Planner(
            planned=bool(config.planner),
            fixed_gamma=config.gamma or 0,
            send=channel.send,
            clock=clock,
            cpu=CpuMeter(num_threads, clock),
        ),
        Memory(
            scheduler,
            elastic,
            has_agent=bool(config.memory_agent) and pool is not None,
            send=channel.send,
            clock=clock,
        ),
        channel,
        max_model_len=length,
        vocab_size=num_ids,
        eos_token_ids={*models.eos_token_ids, *eos_token_ids},
        stop_detector=stop_detector,
        clock=clock,
    )
