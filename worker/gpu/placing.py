"""What a model needs to run on a device, once its weights lie where they stay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from worker.config import WorkerConfig
from worker.gpu.buckets import Buckets
from worker.gpu.forward import DeviceForward
from worker.gpu.gemm_choice import choose_gemms
from worker.gpu.gemm_table import GemmTable, free_table
from worker.model.device import Placement
from worker.model.forward import ModelForward


def buckets_of(config: WorkerConfig) -> Buckets:
    """Sizes that a worker's forwards are padded to."""
    return Buckets.of(
        max_num_seqs=config.max_num_seqs,
        max_gamma=0 if config.proposer == "none" else config.max_gamma,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_catchup_tokens=config.max_catchup_tokens,
    )


def equip(
    forwards: Sequence[ModelForward],
    keys: Sequence[str],
    config: WorkerConfig,
    placement: Placement,
    buckets: Buckets,
    *,
    max_model_len: int,
    cache_dir: Path,
    progress: Callable[[str, str], None],
) -> None:
    """Make the forwards' inputs and choose their matrix products.

    Args:
        forwards: `DeviceForward`s that have their caches.
        keys: Of their builds, under which choices are kept.
        config: The worker's.
        placement: Where they run.
        buckets: Sizes that forwards are padded to.
        max_model_len: Tokens of the longest row.
        cache_dir: Where choices are kept.
        progress: Told (stage, detail) while candidates are timed.
    """
    for forward, key in zip(forwards, keys, strict=True):
        assert isinstance(forward, DeviceForward)
        forward.allocate(
            placement,
            buckets,
            max_rows=config.max_num_seqs,
            table_width=-(-max_model_len // config.block_size),
        )
        runtime = forward.runtime
        if not runtime.exact:
            runtime.gemms = free_table()
            continue
        weights = [weight.plain for weight in runtime.weights if weight.plain is not None]
        heads = [weight for weight in weights if len(weight) == forward.vocab_size]
        others = [weight for weight in weights if len(weight) != forward.vocab_size]
        choose = partial(choose_gemms, cache=cache_dir / "products", progress=progress, key=key)
        tables = choose(others, buckets.products), choose(heads, buckets.logits)
        runtime.gemms = GemmTable(shape for table in tables for shape in table.shapes)
