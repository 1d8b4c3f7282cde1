"""From configuration and folders to models that run: checks, pool, arithmetic, build."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from memory_agent.layout import ArenaLayout, size_in_words
from nightjar.errors import ConfigError, ModelRefused
from worker.config import WorkerConfig, resolved
from worker.messages import PoolInfo, ProductChoice
from worker.model import device
from worker.model.compiled import (
    build_key,
    compile_forward,
    discard_damaged,
    is_built,
    mark_built,
)
from worker.model.device import Placement
from worker.model.fingerprint import fingerprint
from worker.model.folders import check_positions
from worker.model.forward import DraftForward, ModelForward
from worker.model.fused import fuse_attention
from worker.model.linear import replace_linears
from worker.model.loading import (
    attach,
    checkpoint_dtype,
    eos_token_ids,
    identity,
    load_model,
    max_positions,
    read_config,
)
from worker.model.placing import device_sizes, forward_kinds, layout_of, put_in_place
from worker.model.pool import Arena
from worker.model.proof import prove_exact
from worker.model.runtime import new_runtime, release_runtime
from worker.model.self_check import Finding, check_architecture, free_memory

if TYPE_CHECKING:
    from worker.gpu.buckets import Buckets

Progress = Callable[[str, str], None]
DEFAULT_CONTEXT = 2048  # tokens, where --max-model-len is 0
PROOF_BUDGET_S = 2.0  # of random comparisons after the fixed ones
ForwardT = TypeVar("ForwardT", bound=ModelForward)


@dataclass(kw_only=True)
class Models:
    """What the engine runs, and what the rest must know of it."""

    target: ModelForward
    draft: DraftForward | None
    placement: Placement
    buckets: Buckets | None  # sizes that forwards are padded to, where kernels run
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

    @property
    def products(self) -> tuple[ProductChoice, ...]:
        """Which kernels multiply by the target's and the draft's weights; none on a CPU."""
        tables = [f.runtime.gemms for f in (self.target, self.draft) if f is not None]
        return tuple(choice for table in tables if table is not None for choice in table.describe())

    def close(self) -> None:
        """Unlink the shared files and forget the models; twice does no harm."""
        for forward in (self.target, self.draft):
            if forward is not None:
                runtime = forward.runtime
                runtime.cache = runtime.native = runtime.paged = runtime.gemms = None
                release_runtime(forward.runtime)
        self.arena.close()
        atexit.unregister(self.arena.close)


def build_models(
    config: WorkerConfig,
    target_folder: Path,
    draft_folder: Path | None,
    progress: Progress,
    placement: Placement | None = None,
) -> Models:
    """Load, check, place and prove the models of a worker.

    Args:
        config: The worker's configuration.
        target_folder: Folder with config.json and safetensors.
        draft_folder: The draft's, or None where no model drafts.
        progress: Told (stage, detail) before each long step.
        placement: Where they run; None is where the configuration says.

    Raises:
        ConfigError: A flag does not fit the model or the machine.
        ModelRefused: The model would be answered wrongly, or exact arithmetic was asked for
            and cannot be proved.
    """
    config = resolved(config)
    placement = placement or device.place(config.device)
    return _build(config, target_folder, draft_folder, progress, placement, build=config.build)


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
    config = resolved(config)
    placement = device.place(config.device)
    models = _build(config, target_folder, draft_folder, progress, placement, build="fill")
    models.close()
    return models.arithmetic


def _build(
    config: WorkerConfig,
    target_folder: Path,
    draft_folder: Path | None,
    progress: Progress,
    placement: Placement,
    *,
    build: str,
) -> Models:
    device.set_up(config.num_threads, placement)
    folders = [target_folder] + ([draft_folder] if draft_folder is not None else [])
    configs = [read_config(folder) for folder in folders]
    dtype = device.resolve_dtype(config.dtype, placement, checkpoint_dtype(configs[0]))
    name = str(dtype).removeprefix("torch.")
    progress("check", "comparing the paged forward with the model's own")
    length = _context_length(config, configs[0])
    findings = [
        check_architecture(f, c, placement, config.load_format)
        for f, c in zip(folders, configs, strict=True)
    ]
    cache_dir = Path(config.cache_dir or Path.home() / ".cache" / "nightjar")
    keys = [build_key(folder, dtype=name, placement=placement) for folder in folders]
    fills = build == "fill" or (placement.kernels and build != "eager")
    for key in keys if fills else ():
        discard_damaged(cache_dir, key)
    compiled = fills or _choose_compiled(build, cache_dir, keys)

    progress("load", f"{target_folder.name} in {name}")
    geometries = [finding.geometry(config.block_size, dtype) for finding in findings]
    sources = list(zip(folders, configs, findings, strict=True))
    target_kind, draft_kind = forward_kinds(placement)
    target = _prepare(target_kind, "target", sources[0], config, dtype=dtype, placement=placement)
    target.max_model_len = length
    draft: DraftForward | None = None
    if draft_folder is not None:
        draft = _prepare(draft_kind, "draft", sources[1], config, dtype=dtype, placement=placement)
        draft.max_model_len = min(length, draft.max_model_len)
    forwards: list[ModelForward] = [target] if draft is None else [target, draft]

    buckets, workspace = device_sizes(config, configs[0], dtype) if placement.kernels else (None, 0)
    layout = layout_of(config, geometries, draft, placement, workspace_bytes=workspace)
    progress("pool", f"{size_in_words(layout.num_bytes)} for {layout.num_base_blocks} blocks")
    # A GPU's pool is shared only where an agent is configured: its image takes host memory.
    is_shared = draft is not None and (not placement.kernels or bool(config.memory_agent))
    arena = Arena(layout, config.shm_dir if is_shared else None, placement.device)
    atexit.register(arena.close)
    try:
        pool = put_in_place(arena, target, draft, geometries)
        free_memory()
        if buckets is not None:
            from worker.gpu.placing import equip  # only here: it loads triton

            equip(
                forwards,
                keys,
                config,
                placement,
                buckets,
                max_model_len=length,
                cache_dir=cache_dir,
                progress=progress,
            )
        for forward, key in zip(forwards, keys, strict=True) if compiled else ():
            is_new = fills and not is_built(cache_dir, key)
            what = "compiling; later starts use it" if is_new else "first use of the cached build"
            progress("compile", f"{forward.runtime.name}: {what}")
            compile_forward(forward, cache_dir, key, fill=fills)
        reason = _settle_arithmetic(config, forwards, progress)
        for key, folder in zip(keys, folders, strict=True) if fills else ():
            note = f"{folder.name} {name} {reason}"
            mark_built(cache_dir, key, note, watched=not placement.kernels)
        kind = "compiled" if compiled else "eager"
        mark = fingerprint(target, dtype=name, build=kind, placement=placement)
        free_memory()
        return Models(
            target=target,
            draft=draft,
            placement=placement,
            buckets=buckets,
            layout=layout,
            pool=pool,
            block_size=config.block_size,
            dtype=name,
            arithmetic="exact" if target.runtime.exact else "free",
            arithmetic_reason=reason,
            fingerprint=mark,
            build=kind,
            target_identity=identity(target_folder, config.load_format),
            draft_identity=(
                identity(draft_folder, config.load_format) if draft_folder is not None else ""
            ),
            eos_token_ids=eos_token_ids(target.model),
            arena=arena,
        )
    except BaseException:
        arena.close()
        for forward in forwards:
            release_runtime(forward.runtime)
        raise


def _context_length(config: WorkerConfig, model_config: Any) -> int:
    limit = max_positions(model_config)
    check_positions(config, limit)
    return config.max_model_len or min(limit, DEFAULT_CONTEXT)


def _choose_compiled(build: str, cache_dir: Path, keys: list[str]) -> bool:
    built = all(is_built(cache_dir, key) for key in keys)
    if build == "compiled" and not built:
        raise ConfigError(
            "--build='compiled': no compiled build of this model, dtype, thread count and "
            "machine is cached; make it with `nightjar compile` and the same flags"
        )
    return built and build != "eager"


def _prepare(
    kind: type[ForwardT],
    role: str,
    source: tuple[Path, Any, Finding],
    config: WorkerConfig,
    *,
    dtype: torch.dtype,
    placement: Placement,
) -> ForwardT:
    """Load a model and put our linears in; weights are packed once they have their place."""
    folder, model_config, finding = source
    model: nn.Module = load_model(
        folder, model_config, dtype, device=placement.device, load_format=config.load_format
    )
    runtime = new_runtime(role, exact=config.arithmetic != "free", kernels=placement.kernels)
    attach(model, runtime.name)
    replace_linears(model, runtime, merge=finding.merge)
    if finding.fuse:
        fuse_attention(model, runtime)
    size = model_config.get_text_config().vocab_size
    return kind(model, runtime, vocab_size=size, max_model_len=max_positions(model_config))


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
        forward.set_free()
    return f"not exact: {problem}"
