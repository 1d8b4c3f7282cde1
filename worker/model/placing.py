"""Sizes of the pool, and both models' places: KV in the arena, a draft's weights in its tail."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memory_agent.layout import ArenaLayout
from nightjar.errors import ConfigError
from worker.config import WorkerConfig
from worker.messages import PoolInfo
from worker.model.block_copy import warm_copy
from worker.model.device import Placement
from worker.model.forward import DraftForward, ModelForward
from worker.model.linear import pack
from worker.model.pool import Arena, KVCache, KVGeometry, image_size, move_into
from worker.model.self_check import free_memory

if TYPE_CHECKING:
    from worker.gpu.buckets import Buckets

_GRAPHS_BYTES = 1 << 30  # of captured graphs, compiled kernels and torch's own
_KEPT_BYTES = 8  # of one logit: in the model's dtype, in float32, and what is made of it


def layout_of(
    config: WorkerConfig,
    geometries: list[KVGeometry],
    draft: DraftForward | None,
    placement: Placement,
    *,
    workspace_bytes: int,
) -> ArenaLayout:
    """Blocks of the pool, and what its tail holds; weights must be loaded.

    Args:
        config: Its sizes are resolved.
        geometries: The target's, and the draft's where one drafts.
        draft: The draft, whose weights move into the tail.
        placement: Where the pool will lie.
        workspace_bytes: That forwards need beside it, on a GPU.

    Raises:
        ConfigError: Not one block fits.
    """
    block_bytes = geometries[0].block_bytes
    draft_block_bytes = 0 if draft is None else geometries[1].block_bytes
    image_bytes = 0 if draft is None else image_size(tensors_of(draft.model))
    if config.num_blocks:
        num_blocks, flag = config.num_blocks, ""
    elif config.kv_mb or placement.device.type != "cuda":
        num_blocks, flag = (config.kv_mb << 20) // block_bytes, f"--kv-mb={config.kv_mb}"
    else:
        free_memory()
        free, _ = torch.cuda.mem_get_info(placement.device)
        room = int(free * config.gpu_memory_share) - workspace_bytes - image_bytes
        num_blocks = room // (block_bytes + draft_block_bytes)
        flag = f"--gpu-memory-share={config.gpu_memory_share:g} of {free >> 20} MB"
    if num_blocks < 1:
        raise ConfigError(f"{flag}: a block alone takes {block_bytes} bytes")
    return ArenaLayout(
        block_bytes=block_bytes,
        draft_block_bytes=draft_block_bytes,
        image_bytes=image_bytes,
        num_base_blocks=num_blocks,
    )


def workspace_bytes(config: Any, dtype: torch.dtype, *, max_tokens: int, max_kept: int) -> int:
    """What one forward of a model of `config` and a step around it need, generously.

    Args:
        config: The model's.
        dtype: Of its activations.
        max_tokens: Of the largest forward.
        max_kept: Logits of the largest step.
    """
    text = config.get_text_config()
    width = 8 * text.hidden_size + 4 * (getattr(text, "intermediate_size", None) or 0)
    activations = max_tokens * width * dtype.itemsize
    return int(_GRAPHS_BYTES + activations + max_kept * text.vocab_size * _KEPT_BYTES)


def device_sizes(
    config: WorkerConfig, model_config: Any, dtype: torch.dtype
) -> tuple[Buckets, int]:
    """Sizes of a device's forwards, and bytes that they need beside weights and pool."""
    from worker.gpu.placing import buckets_of  # only here: it loads triton

    buckets = buckets_of(config)
    most = {"max_tokens": buckets.max_tokens, "max_kept": max(buckets.max_kept, 256)}
    return buckets, workspace_bytes(model_config, dtype, **most)


def forward_kinds(placement: Placement) -> tuple[type[ModelForward], type[DraftForward]]:
    """Classes of the target's and the draft's forward."""
    if not placement.kernels:
        return ModelForward, DraftForward
    from worker.gpu.forward import DeviceDraftForward, DeviceForward

    return DeviceForward, DeviceDraftForward


def put_in_place(
    arena: Arena,
    target: ModelForward,
    draft: DraftForward | None,
    geometries: list[KVGeometry],
) -> PoolInfo | None:
    """Give both models their KV and, in the tail, the draft its weights; pack the linears.

    Returns:
        What a memory agent may be told of the pool: nothing without a draft or a shared file.
    """
    layout = arena.layout
    num_blocks = layout.num_base_blocks + layout.num_extra_blocks
    target.runtime.cache = KVCache(arena.memory, geometries[0], num_blocks)
    pack(target.runtime, target.model, keep_plain=False)
    if not target.runtime.kernels:
        for tensor in tensors_of(target.model):  # what is left lets go of the mapped checkpoint
            tensor.data = tensor.data.clone()
    if draft is None:
        return None
    tail = arena.memory[layout.tail_offset :]
    draft.runtime.cache = KVCache(tail, geometries[1], layout.num_base_blocks)
    image = arena.memory[layout.image_offset : layout.image_offset + layout.image_bytes]
    move_into(tensors_of(draft.model), image)
    draft.restore()
    if not arena.path:
        return None
    warm_copy(arena.memory, layout.block_bytes)
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
        cuda_ipc_handle=arena.handle,
        cuda_device_uuid=arena.device_uuid,
    )


def tensors_of(model: nn.Module) -> list[torch.Tensor]:
    """Everything a forward reads that belongs to the model: parameters and buffers."""
    return [*model.parameters(), *model.buffers()]
