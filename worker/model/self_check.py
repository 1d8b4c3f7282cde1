"""Does the paged forward give the model's own answers?

Checked at load in float32, on a few layers with the real weights, chunked and batched,
against transformers' own eager attention.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import random
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from nightjar.errors import ModelRefused
from worker.model.attention import ATTENTION
from worker.model.batch import Batch
from worker.model.device import CPU, Placement
from worker.model.forward import ModelForward
from worker.model.fused import fuse_attention
from worker.model.linear import pack, replace_linears
from worker.model.loading import attach, load_model, quiet
from worker.model.pool import KVCache, KVGeometry
from worker.model.runtime import Runtime, new_runtime, release_runtime

TOLERANCE = 1e-5  # of the largest logit
CHECK_WINDOW = 8  # windows are cut to it, so that short prompts reach beyond them
_LENGTHS = (29, 21, 2)  # tokens of the checked rows
_BLOCK_SIZE = 16
_FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError)


class Finding(NamedTuple):
    """What the check learned of an architecture."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    merge: bool  # whether merged linears may be used
    fuse: bool  # whether rotary embedding may be fused into attention, where it can be

    def geometry(self, block_size: int, dtype: torch.dtype) -> KVGeometry:
        """Shape of the model's KV."""
        return KVGeometry(
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=block_size,
            dtype=dtype,
        )


def check_architecture(
    folder: Path, config: Any, placement: Placement = CPU, load_format: str = "safetensors"
) -> Finding:
    """Compare the paged forward with the model's own, where it will run.

    Raises:
        ModelRefused: It differs, does not run, or some layers do not reach our attention.
    """
    small = _few_layers(config)
    model = load_model(
        folder, small, torch.float32, device=placement.device, load_format=load_format
    )
    try:
        rows = _rows(small)
        expected = _own_forward(model, rows)
        count = small.get_text_config().num_hidden_layers
        shape = Finding(count, *_head_shape(model, rows[0]), merge=True, fuse=placement.kernels)
        tries = (shape, shape._replace(fuse=False), shape._replace(merge=False, fuse=False))
        for finding in dict.fromkeys(tries):
            problem = _compare(copy.deepcopy(model), finding, rows, expected, placement)
            if problem is None:
                return finding._replace(num_layers=config.get_text_config().num_hidden_layers)
        raise ModelRefused(f"{config.model_type}: {problem}")
    finally:
        del model
        free_memory()


def free_memory() -> None:
    """Give freed pages back to the system."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def _few_layers(config: Any) -> Any:
    """A copy of `config` with the fewest first layers that show every kind of layer."""
    small = copy.deepcopy(config)
    text = small.get_text_config()
    for name in ("sliding_window", "attention_chunk_size"):
        if getattr(text, name, None):
            setattr(text, name, min(getattr(text, name), CHECK_WINDOW))
    if getattr(text, "num_kv_shared_layers", 0):
        return small  # the layers that share are the last ones
    with quiet(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(small)
    kinds: dict[Any, int] = {}
    for name, module in model.named_modules():
        layer = getattr(module, "layer_idx", None)
        if isinstance(layer, int):
            family = model.get_submodule(name.rpartition(".")[0])
            kinds.setdefault((_traits(module), _traits(family)), layer)
    count = min(max([1, *kinds.values()]) + 1, text.num_hidden_layers)
    text.num_hidden_layers = count
    if getattr(text, "layer_types", None):
        text.layer_types = list(text.layer_types)[:count]
    return small


def _traits(module: nn.Module) -> tuple[Any, ...]:
    """What tells kinds of layers apart: classes below, and plain attributes but the index."""
    simple = (int, float, str, bool, type(None))
    own = tuple(
        (name, value)
        for name, value in sorted(vars(module).items())
        if isinstance(value, simple) and name not in ("layer_idx", "layer_id", "training")
    )
    return type(module).__name__, own, tuple(type(c).__name__ for c in module.children())


def _rows(config: Any) -> list[list[int]]:
    rng = random.Random(0)
    size = config.get_text_config().vocab_size
    return [[rng.randrange(size) for _ in range(length)] for length in _LENGTHS]


def _own_forward(model: Any, rows: list[list[int]]) -> list[torch.Tensor]:
    """The model's own logits of each row alone, [len(row), vocab_size]."""
    with quiet(), torch.inference_mode():
        try:
            model.set_attn_implementation("eager")
            logits = [model(input_ids=_ids(model, row), use_cache=False).logits for row in rows]
            model.set_attn_implementation(ATTENTION)
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:
            raise ModelRefused(
                f"{model.config.model_type}: its own forward fails: {error}"
            ) from error
    return [row[0] for row in logits]


def _ids(model: Any, row: list[int]) -> torch.Tensor:
    return torch.tensor([row], device=model.device)


def _head_shape(model: Any, row: list[int]) -> tuple[int, int, int]:
    """(num_heads, num_kv_heads, head_dim) that reach our attention."""
    runtime = new_runtime("self-check", exact=True)
    attach(model, runtime.name)
    with quiet(), torch.inference_mode():
        try:
            model(input_ids=_ids(model, row), use_cache=False)
        except (*_FAILURES, ModelRefused) as error:
            raise ModelRefused(f"{model.config.model_type}: {error}") from error
        finally:
            release_runtime(runtime)
    if len(runtime.shapes) != 1:
        what = "differ in heads or head width" if runtime.shapes else "bypass the attention"
        raise ModelRefused(f"{model.config.model_type}: its layers {what}, which is not served")
    return next(iter(runtime.shapes))


def _compare(
    model: nn.Module,
    shape: Finding,
    rows: list[list[int]],
    expected: list[torch.Tensor],
    placement: Placement,
) -> str | None:
    """Run the rows chunked and batched; None if all is right, else what is not."""
    runtime = new_runtime("self-check", exact=True, kernels=placement.kernels)
    try:
        attach(model, runtime.name)
        replace_linears(model, runtime, merge=shape.merge)
        if shape.fuse:
            fuse_attention(model, runtime)
        pack(runtime, model, keep_plain=False)
        geometry = shape.geometry(_BLOCK_SIZE, torch.float32)
        per_row = -(-max(_LENGTHS) // _BLOCK_SIZE)
        num_blocks = len(rows) * per_row
        memory = torch.empty(
            num_blocks * geometry.block_bytes, dtype=torch.uint8, device=placement.device
        )
        memory.view(torch.float32).fill_(float("nan"))
        runtime.cache = KVCache(memory, geometry, num_blocks)
        size = expected[0].shape[1]
        forward = _forward(model, runtime, size, placement)
        tables = [list(range(i * per_row, (i + 1) * per_row)) for i in range(len(rows))]
        seen: list[list[torch.Tensor]] = [[] for _ in rows]
        layers = set(range(geometry.num_layers))
        for chunk in _schedule(rows, tables):
            with quiet():
                logits = forward.compute(chunk.batch)
            if reached := layers - forward.last_layers:
                return f"{len(reached)} of {len(layers)} layers bypass the paged attention"
            for row, part in zip(chunk.rows, torch.split(logits, chunk.counts), strict=True):
                seen[row].append(part)
        scale = max(logits.abs().max().item() for logits in expected)
        worst = max(
            (torch.cat(parts) - own).abs().max().item() / scale
            for parts, own in zip(seen, expected, strict=True)
        )
    except ModelRefused as error:
        return str(error)
    except _FAILURES as error:
        return f"its forward does not run over a paged cache ({type(error).__name__}: {error})"
    finally:
        release_runtime(runtime)
    if worst <= TOLERANCE:  # False for NaN too
        return None
    return f"the paged forward differs from its own by {worst:.1e} of the largest logit"


def _forward(
    model: nn.Module, runtime: Runtime, vocab_size: int, placement: Placement
) -> ModelForward:
    length = max(_LENGTHS)
    if not placement.kernels:
        return ModelForward(model, runtime, vocab_size=vocab_size, max_model_len=length)
    from worker.gpu.buckets import Buckets
    from worker.gpu.forward import DeviceForward
    from worker.gpu.gemm_table import default_table

    rows = len(_LENGTHS)
    forward = DeviceForward(model, runtime, vocab_size=vocab_size, max_model_len=length)
    buckets = Buckets.of(
        max_num_seqs=rows, max_gamma=8, max_num_batched_tokens=32, max_catchup_tokens=32
    )
    width = -(-length // _BLOCK_SIZE)
    forward.allocate(placement, buckets, max_rows=rows, table_width=width)
    runtime.gemms = default_table()
    return forward


class _Chunk:
    """One mixed step of the check."""

    def __init__(self, parts: list[tuple[int, list[int], int]], tables: list[list[int]]) -> None:
        self.rows = [row for row, _, _ in parts]
        self.counts = [len(ids) for _, ids, _ in parts]
        starts: list[int] = [0]
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for row, tokens, first in parts:
            ids += tokens
            at = range(first, first + len(tokens))
            positions += at
            slots += [tables[row][p // _BLOCK_SIZE] * _BLOCK_SIZE + p % _BLOCK_SIZE for p in at]
            starts.append(len(ids))
        self.batch = Batch(
            input_ids=ids,
            positions=positions,
            slots=slots,
            query_starts=starts,
            block_tables=[tables[row] for row in self.rows],
            logit_tokens=list(range(len(ids))),
        )


def _schedule(rows: list[list[int]], tables: list[list[int]]) -> list[_Chunk]:
    """Mixed steps: long and short chunks, single tokens, rows that start late."""
    done = [0] * len(rows)
    steps = []
    for counts in ((17, 0, 0), (1, 19, 0), (9, 1, 1), (1, 1, 1), (1, 0, 0)):
        parts = []
        for row, count in enumerate(counts):
            if count:
                parts.append((row, rows[row][done[row] : done[row] + count], done[row]))
                done[row] += count
        steps.append(_Chunk(parts, tables))
    assert done == [len(row) for row in rows]
    return steps
