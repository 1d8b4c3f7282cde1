"""From a configuration and built models to an engine that is ready to run."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from memory_agent.arena import is_written_elsewhere
from nightjar import log
from nightjar.errors import ModelRefused
from worker.config import WorkerConfig, resolved
from worker.engine.block_manager import BlockManager
from worker.engine.drafting import Drafting
from worker.engine.elastic import ElasticMemory
from worker.engine.engine import Channel, Engine
from worker.engine.limits import max_model_len, shortened
from worker.engine.links import Clock, CpuMeter, Memory, Planner
from worker.engine.runner import Runner, StepRunner
from worker.engine.scheduler import Scheduler
from worker.engine.sequence import StopDetector
from worker.model.block_copy import copy_blocks
from worker.sampling import sample
from worker.speculative.draft_model import DraftModelProposer
from worker.speculative.ngram import NgramProposer
from worker.speculative.proposer import Capabilities, Proposer

if TYPE_CHECKING:
    from worker.model.build import Models


def assemble(
    config: WorkerConfig,
    models: Models,
    channel: Channel,
    *,
    vocab_size: int,
    eos_token_ids: Iterable[int],
    stop_detector: Callable[[tuple[str, ...], int], StopDetector],
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
        stop_detector: Makes what finds stop strings from a minimum of tokens on.
        num_threads: Threads that forwards run on.
        clock: Seconds, monotonic.

    Raises:
        ConfigError: Lengths do not fit model and pool.
        ModelRefused: Its vocabulary is too large for a GPU's sampling.
    """
    config = resolved(config)
    layout, draft = models.layout, models.draft
    length = max_model_len(config, models.target.max_model_len, layout.num_base_blocks)
    note = shortened(config, models.target.max_model_len, length)
    if note:
        log.get().warning("the pool is smaller than a long request", why=note)
    num_ids = min(vocab_size, models.target.vocab_size)
    make = _device_runner if models.placement.kernels else _runner
    runner, proposer = make(config, models, num_ids, clock)
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
        copy=partial(copy_blocks, models.arena.memory, layout.block_bytes),
        clock=clock,
        agent_gone=lambda: pool is None or not is_written_elsewhere(pool.arena_path),
    )
    return Engine(
        scheduler,
        runner,
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


def _runner(
    config: WorkerConfig, models: Models, vocab_size: int, clock: Clock
) -> tuple[StepRunner, Proposer | None]:
    """Steps on a CPU, and what makes their drafts."""
    proposer: Proposer | None = NgramProposer() if config.proposer == "ngram" else None
    if models.draft is not None:
        proposer = DraftModelProposer(
            models.draft,
            sample,
            vocab_size=min(vocab_size, models.draft.vocab_size),
            block_size=config.block_size,
            clock=clock,
        )
    size = config.block_size
    runner = Runner(
        models.target, proposer, sample, vocab_size=vocab_size, block_size=size, clock=clock
    )
    return runner, proposer


def _device_runner(
    config: WorkerConfig, models: Models, vocab_size: int, clock: Clock
) -> tuple[StepRunner, Capabilities | None]:
    """Steps where kernels run, and what makes their drafts."""
    from worker.gpu.forward import DeviceDraftForward, DeviceForward  # only here: triton
    from worker.gpu.runner import DeviceRunner
    from worker.kernels.sampling_cut import MAX_VOCAB_SIZE

    if vocab_size > MAX_VOCAB_SIZE:
        raise ModelRefused(
            f"its vocabulary has {vocab_size} tokens; a GPU's sampling takes up to "
            f"{MAX_VOCAB_SIZE}: say --device=cpu"
        )
    target, draft = models.target, models.draft
    assert isinstance(target, DeviceForward)
    assert draft is None or isinstance(draft, DeviceDraftForward)
    assert models.buckets is not None
    ngram = NgramProposer() if config.proposer == "ngram" else None
    runner = DeviceRunner(
        target,
        draft,
        ngram,
        models.buckets,
        max_num_seqs=config.max_num_seqs,
        vocab_size=vocab_size,
        clock=clock,
    )
    return runner, ngram or runner.drafter
