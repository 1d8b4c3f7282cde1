"""From configuration and folders to models that run: checks, pool, arithmetic, build."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from memory_agent.layout import ArenaLayout
from nightjar.errors import ConfigError, ModelRefused
from worker.config import WorkerConfig
from worker.messages import PoolInfo
from worker.model import device
from worker.model.compiled import build_key, compile_forward, is_built, mark_built
from worker.model.fingerprint import fingerprint
from worker.model.forward import DraftForward, ModelForward
from worker.model.linear import pack, replace_linears
from worker.model.loading import (
    attach,
    eos_token_ids,
    identity,
    load_model,
    max_positions,
    read_config,
)
from worker.model.pool import Arena, KVCache, KVGeometry, image_size, move_into
from worker.model.proof import prove_exact
from worker.model.runtime import new_runtime, release_runtime
from worker.model.self_check import Finding, check_architecture, free_memory

Progress = Callable[[str, str], None]
DEFAULT_CONTEXT = 2048  # tokens, where --max-model-len is 0
PROOF_BUDGET_S = 2.0  # of random comparisons after the fixed ones
ForwardT = TypeVar("ForwardT", bound=ModelForward)


@dataclass(kw_only=True)
class Models:
    """What the engine runs, and what the rest must know of it."""

    target: ModelForward
    draft: DraftForward | None
    layout: ArenaLayout
    pool: PoolInfo | None  # None without a draft: nothing to give back
    block_size: int
    dtype: str
    arithmetic: str  # "exact" or "free"
    arithmetic_reason: str
    fingerprint: str
    build: str  # "eager" or "compiled"
    target_identity: str
    draft_identity: str  # "" without a draft
    eos_token_ids: tuple[int, ...]
    arena: Arena

    def close(self) -> None:
        """Unlink the shared files and forget the models; twice does no harm."""
        for forward in (self.target, self.draft):
            if forward is not None:
                forward.runtime.cache = forward.runtime.native = None
                release_runtime(forward.runtime)
        self.arena.close()
        atexit.unregister(self.arena.close)


def build_models(
    config: WorkerConfig, target_folder: Path, draft_folder: Path | None, progress: Progress
) -> Models:
    """Load, check, place and prove the models of a worker.

    Args:
        config: The worker's configuration.
        target_folder: Folder with config.json and safetensors.
        draft_folder: The draft's, or None where no model drafts.
        progress: Told (stage, detail) before each long step.

    Raises:
        ConfigError: A flag does not fit the model or the machine.
        ModelRefused: The model would be answered wrongly, or exact arithmetic was asked for
            and cannot be proved.
    """
    return _build(config, target_folder, draft_folder, progress, build=config.build)


def compile_build(
    config: WorkerConfig, target_folder: Path, draft_folder: Path | None, progress: Progress
) -> str:
    """Compile both models into the cache, prove them, mark the build complete.

    Returns:
        The arithmetic that the compiled build runs, "exact" or "free".

    Raises:
        ConfigError: A flag does not fit.
        ModelRefused: The forward does not compile, or what `build_models` raises.
    """
    models = _build(config, target_folder, draft_folder, progress, build="fill")
    models.close()
    return models.arithmetic


def _build(
    config: WorkerConfig,
    target_folder: Path,
    draft_folder: Path | None,
    progress: Progress,
    *,
    build: str,
) -> Models:
    device.set_up(config.num_threads)
    dtype = device.resolve_dtype(config.dtype)
    name = str(dtype).removeprefix("torch.")
    progress("check", "comparing the paged forward with the model's own")
    folders = [target_folder] + ([draft_folder] if draft_folder is not None else [])
    configs = [read_config(folder) for folder in folders]
    length = _context_length(config, configs[0])
    findings = [check_architecture(f, c) for f, c in zip(folders, configs, strict=True)]
    cache_dir = Path(config.cache_dir or Path.home() / ".cache" / "nightjar")
    keys = [build_key(folder, dtype=name) for folder in folders]
    compiled = _choose_compiled(build, cache_dir, keys)

    progress("load", f"{target_folder.name} in {name}")
    geometries = [finding.geometry(config.block_size, dtype) for finding in findings]
    target = _prepare(ModelForward, "target", (folders[0], configs[0], findings[0]), config)
    target.max_model_len = length
    draft = None
    if draft_folder is not None:
        draft = _prepare(DraftForward, "draft", (folders[1], configs[1], findings[1]), config)
        draft.max_model_len = min(length, draft.max_model_len)

    layout = _layout(config, geometries, draft)
    progress("pool", f"{layout.num_bytes >> 20} MB for {layout.num_base_blocks} blocks")
    arena = Arena(layout, None if draft is None else config.shm_dir)
    atexit.register(arena.close)
    try:
        pool = _place(arena, target, draft, geometries)
        free_memory()
        forwards = [target] if draft is None else [target, draft]
        if compiled:
            for forward, key in zip(forwards, keys, strict=True):
                progress("compile", f"{forward.runtime.name}: first use of the compiled build")
                compile_forward(forward, cache_dir, key, fill=build == "fill")
        reason = _settle_arithmetic(config, forwards, progress)
        if build == "fill":
            for key, folder in zip(keys, folders, strict=True):
                mark_built(cache_dir, key, f"{folder.name} {name} {reason}")
        kind = "compiled" if compiled else "eager"
        mark = fingerprint(target, dtype=name, build=kind)
        free_memory()
        return Models(
            target=target,
            draft=draft,
            layout=layout,
            pool=pool,
            block_size=config.block_size,
            dtype=name,
            arithmetic="exact" if target.runtime.exact else "free",
            arithmetic_reason=reason,
            fingerprint=mark,
            build=kind,
            target_identity=identity(target_folder),
            draft_identity=identity(draft_folder) if draft_folder is not None else "",
            eos_token_ids=eos_token_ids(target.model),
            arena=arena,
        )
    except BaseException:
        arena.close()
        for model in (target, draft):
            if model is not None:
                release_runtime(model.runtime)
        raise


def _context_length(config: WorkerConfig, model_config: Any) -> int:
    limit = max_positions(model_config)
    if config.max_model_len > limit:
        raise ConfigError(
            f"--max-model-len={config.max_model_len}: the model was made for {limit} tokens"
        )
    return config.max_model_len or min(limit, DEFAULT_CONTEXT)


def _choose_compiled(build: str, cache_dir: Path, keys: list[str]) -> bool:
    built = all(is_built(cache_dir, key) for key in keys)
    if build == "compiled" and not built:
        raise ConfigError(
            "--build='compiled': no compiled build of this model, dtype, thread count and "
            "machine is cached; make it with `nightjar compile` and the same flags"
        )
    return build == "fill" or (built and build != "eager")


def _prepare(
    kind: type[ForwardT], role: str, source: tuple[Path, Any, Finding], config: WorkerConfig
) -> ForwardT:
    """Load a model and put our linears in; weights are packed once they have their place."""
    folder, model_config, finding = source
    model: nn.Module = load_model(folder, model_config, device.resolve_dtype(config.dtype))
    runtime = new_runtime(role, exact=config.arithmetic != "free")
    attach(model, runtime.name)
    replace_linears(model, runtime, merge=finding.merge)
    size = model_config.get_text_config().vocab_size
    return kind(model, runtime, vocab_size=size, max_model_len=max_positions(model_config))


def _layout(
    config: WorkerConfig, geometries: list[KVGeometry], draft: DraftForward | None
) -> ArenaLayout:
    block_bytes = geometries[0].block_bytes
    num_blocks = config.num_blocks or (config.kv_mb << 20) // block_bytes
    if num_blocks < 1:
        raise ConfigError(f"--kv-mb={config.kv_mb}: a block alone takes {block_bytes} bytes")
    return ArenaLayout(
        block_bytes=block_bytes,
        draft_block_bytes=0 if draft is None else geometries[1].block_bytes,
        image_bytes=0 if draft is None else image_size(_tensors(draft.model)),
        num_base_blocks=num_blocks,
    )


def _place(
    arena: Arena,
    target: ModelForward,
    draft: DraftForward | None,
    geometries: list[KVGeometry],
) -> PoolInfo | None:
    """Give both models their KV and, in the tail, the draft its weights; pack the linears."""
    layout = arena.layout
    num_blocks = layout.num_base_blocks + layout.num_extra_blocks
    target.runtime.cache = KVCache(arena.memory, geometries[0], num_blocks)
    pack(target.runtime, target.model, keep_plain=False)
    for tensor in _tensors(target.model):  # what is left lets go of the mapped checkpoint
        tensor.data = tensor.data.clone()
    if draft is None:
        return None
    tail = arena.memory[layout.tail_offset :]
    draft.runtime.cache = KVCache(tail, geometries[1], layout.num_base_blocks)
    image = arena.memory[layout.image_offset : layout.image_offset + layout.image_bytes]
    move_into(_tensors(draft.model), image)
    draft.restore()
    path, digest = arena.write_image()
    return PoolInfo(
        arena_path=arena.path,
        arena_bytes=layout.num_bytes,
        block_bytes=layout.block_bytes,
        num_base_blocks=layout.num_base_blocks,
        num_extra_blocks=layout.num_extra_blocks,
        image_path=path,
        image_offset=layout.image_offset,
        image_bytes=layout.image_bytes,
        image_sha256=digest,
    )


def _tensors(model: nn.Module) -> list[torch.Tensor]:
    """Everything a forward reads that belongs to the model: parameters and buffers."""
    return [*model.parameters(), *model.buffers()]


def _settle_arithmetic(
    config: WorkerConfig, forwards: list[ModelForward], progress: Progress
) -> str:
    """Prove exact arithmetic, or fall back to free where that is allowed; why, in words.

    The draft is not proved: answers are the target's own, whatever a draft proposes.
    """
    target = forwards[0]
    if not target.runtime.exact:
        return "chosen by configuration"
    progress("prove", "that bits do not depend on batch, chunking or gamma")
    problem = prove_exact(target, max_num_seqs=config.max_num_seqs, budget_s=PROOF_BUDGET_S)
    if problem is None:
        return "proved at start"
    if config.arithmetic == "exact":
        raise ModelRefused(f"--arithmetic='exact' cannot be kept on this machine: {problem}")
    for forward in forwards:
        forward.runtime.exact = False
    return f"not exact: {problem}"
