"""Loading with transformers: safetensors only, no remote code, and nothing missing."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from nightjar.errors import ModelRefused
from worker.model.attention import ATTENTION
from worker.model.device import CPU

_SERVED_LAYERS = {"full_attention", "sliding_attention"}
_UNSTEADY_ROPE = {"dynamic", "longrope"}  # a row's answer depends on its neighbours' length


def read_config(folder: Path) -> Any:
    """Read a model's configuration and refuse what its fields already show cannot be served.

    Raises:
        ModelRefused: The sentence names the architecture.
    """
    with quiet():
        try:
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise ModelRefused(f"{folder}: {_first_line(error)}") from error
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    kind = config.model_type
    if getattr(config, "quantization_config", None) is not None:
        raise ModelRefused(f"{kind}: quantized checkpoints are not served")
    if model_class is None or config.is_encoder_decoder:
        raise ModelRefused(f"{kind}: not a decoder-only language model that transformers knows")
    if not getattr(model_class, "_supports_attention_backend", False):
        raise ModelRefused(f"{kind}: its attention cannot be replaced by a registered one")
    text = config.get_text_config()
    layers = set(getattr(text, "layer_types", None) or ["full_attention"])
    if layers - _SERVED_LAYERS:
        names = ", ".join(sorted(layers - _SERVED_LAYERS))
        raise ModelRefused(f"{kind}: layers of type {names} are not served")
    if getattr(text, "kv_lora_rank", None) is not None:
        raise ModelRefused(f"{kind}: latent attention (MLA) is not served")
    rope = set(_rope_types(getattr(text, "rope_parameters", None)))
    if rope & _UNSTEADY_ROPE:
        name = sorted(rope & _UNSTEADY_ROPE)[0]
        raise ModelRefused(f"{kind}: rope type {name} makes rows depend on their neighbours")
    return config


def load_model(
    folder: Path,
    config: Any,
    dtype: torch.dtype,
    *,
    device: torch.device = CPU.device,
    load_format: str = "safetensors",
) -> nn.Module:
    """Load weights under `config`, which may name fewer layers than the checkpoint has.

    Args:
        folder: The checkpoint's.
        config: As `read_config` returns it.
        dtype: Of the weights.
        device: Where they are put.
        load_format: "dummy" makes weights without reading any.

    Raises:
        ModelRefused: No safetensors, or weights are missing or of another shape.
    """
    if load_format == "dummy":
        return dummy_model(config, dtype, device)
    with quiet():
        try:
            model, info = AutoModelForCausalLM.from_pretrained(
                folder,
                config=copy.deepcopy(config),
                dtype=dtype,
                attn_implementation=ATTENTION,
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                output_loading_info=True,
            )
        except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
            raise ModelRefused(f"{config.model_type}: {_first_line(error)}") from error
    missing = sorted(info["missing_keys"]) + sorted(str(x) for x in info["mismatched_keys"])
    if missing:
        raise ModelRefused(f"{config.model_type}: {folder} lacks weights, first {missing[0]}")
    loaded: nn.Module = model.eval().requires_grad_(False).to(device)
    return loaded


def dummy_model(config: Any, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """A model with seeded weights, for measuring speed: matrices N(0, 0.02), norms 1, biases 0."""
    devices = [device] if device.type == "cuda" else []
    with quiet(), torch.random.fork_rng(devices), device:
        model: nn.Module = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=dtype, attn_implementation=ATTENTION
        )
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.02, generator=generator)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    return model.eval().requires_grad_(False)


def attach(model: nn.Module, runtime_name: str) -> None:
    """Tell every module under which name its attention finds the runtime."""
    for module in model.modules():
        module.nightjar_runtime = runtime_name  # type: ignore[assignment]


def max_positions(config: Any) -> int:
    """Positions that the model was made for; 2048 where it does not say."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or 2048


def checkpoint_dtype(config: Any) -> torch.dtype | None:
    """The weights' type that the configuration names, if it does."""
    for source in (config.get_text_config(), config):
        named = getattr(source, "dtype", None)
        dtype = getattr(torch, named, None) if isinstance(named, str) else named
        if isinstance(dtype, torch.dtype):
            return dtype
    return None


def eos_token_ids(model: Any) -> tuple[int, ...]:
    """Token ids that end an answer, by the generation configuration, else the model's."""
    for source in (getattr(model, "generation_config", None), model.config):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return (ids,) if isinstance(ids, int) else tuple(ids)
    return ()


def identity(folder: Path, load_format: str = "safetensors") -> str:
    """Name of a model: its type and a digest over its configuration and weights.

    Of each tensor the name, shape and the first and last kilobyte count: enough to tell any
    two trainings apart without reading gigabytes.
    """
    digest = hashlib.sha256()
    config = (folder / "config.json").read_bytes()
    digest.update(config)
    if load_format == "dummy":
        digest.update(b"dummy")
    for path in sorted(folder.glob("*.safetensors")) if load_format != "dummy" else ():
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = file.read(size)
            digest.update(header)
            for tensor in json.loads(header).values():
                if "data_offsets" not in tensor:
                    continue
                start, stop = tensor["data_offsets"]
                for at in (start, max(start, stop - 1024)):
                    file.seek(8 + size + at)
                    digest.update(file.read(min(1024, stop - start)))
    return f"{json.loads(config).get('model_type', 'model')}-{digest.hexdigest()[:16]}"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' advice and progress bars out of our logs."""
    logger = logging.getLogger("transformers")
    level = logger.level
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _rope_types(rope: Any) -> Iterator[str]:
    if isinstance(rope, dict):
        for key, value in rope.items():
            if key in ("rope_type", "type") and isinstance(value, str):
                yield value
            else:
                yield from _rope_types(value)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
