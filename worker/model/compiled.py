"""The compiled forward: one inductor graph with a dynamic number of tokens, cached on disk.

All sizes run the same graph, so bits cannot depend on size; attention and linears stay our
operators inside it. A CPU's worker compiles nothing by itself: `nightjar compile` fills the cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shutil
import types
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import torch
import transformers

import nightjar
from nightjar import log
from nightjar.errors import EngineFailure, ModelRefused
from worker.model import native
from worker.model.batch import Batch
from worker.model.device import CPU, Placement, device_kind
from worker.model.forward import ModelForward, Step
from worker.model.loading import quiet

_MARKER = "complete.json"
# Tokens and kept tokens of the traced call: unequal, so that both are free.
_TRACED = (7, 3)
_TRACED_BY_KERNELS = (8, 4)
# Padding of products is timed, too, which what is untimed forbids; those of weights are ours.
_UNTIMED = {"deterministic": True, "shape_padding": False}


def build_key(folder: Path, *, dtype: str, placement: Placement = CPU) -> str:
    """Name of the build of a model: whatever its graph or its code could depend on.

    Exact and free arithmetic share a build: they differ inside our operators alone.
    """
    parts = {
        "config": json.loads((folder / "config.json").read_text()),
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "device": device_kind(placement),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "nightjar": nightjar.__version__,
        "attention": hashlib.sha256(native.SOURCE.read_bytes()).hexdigest(),
    }
    if placement.kernels:
        parts["triton"] = _triton_version()
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


def _triton_version() -> str:
    import triton  # only here: a CPU's worker does without

    return str(triton.__version__)


def build_folder(cache_dir: Path, key: str) -> Path:
    """Where a build lives."""
    return cache_dir / "builds" / key


def is_built(cache_dir: Path, key: str) -> bool:
    """True if `nightjar compile` finished this build, and it is as it was then.

    A damaged library would end the process that loads it, without a word.
    """
    folder = build_folder(cache_dir, key)
    try:
        marker = json.loads((folder / _MARKER).read_text())
        if "files" not in marker:  # of a version that kept none
            return False
        damaged = [n for n, kept in marker["files"].items() if _digest(folder / n) != kept]
    except FileNotFoundError as error:
        damaged = [str(error.filename)]
        if not (folder / _MARKER).exists():
            return False
    except (ValueError, TypeError, KeyError, AttributeError, OSError):
        damaged = [_MARKER]
    if damaged:
        log.get().warning(
            "a compiled build is damaged; `nightjar compile` makes it anew",
            folder=str(folder),
            files=damaged[:3],
        )
    return not damaged


def mark_built(cache_dir: Path, key: str, note: str, *, watched: bool) -> None:
    """Say that the build is complete; written last, in one move.

    Args:
        cache_dir: Of all builds.
        key: Of this one.
        note: For who looks at the file.
        watched: Whether `is_built` compares all files with what they are now; on a GPU the
            compiler repairs and adds files by itself.
    """
    folder = build_folder(cache_dir, key)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()] if watched else []
    kept = {str(p.relative_to(folder)): _digest(p) for p in files if not p.match(f"{_MARKER}*")}
    part = folder / f"{_MARKER}.{os.getpid()}"
    part.write_text(json.dumps({"note": note, "files": kept}))
    part.replace(folder / _MARKER)


def discard_damaged(cache_dir: Path, key: str) -> None:
    """Remove a build that was complete and is not any more, before it is made anew."""
    folder = build_folder(cache_dir, key)
    if (folder / _MARKER).exists() and not is_built(cache_dir, key):
        shutil.rmtree(folder)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def compile_forward(forward: ModelForward, cache_dir: Path, key: str, *, fill: bool) -> None:
    """Compile `forward.step`, from the cache unless it is being filled.

    Raises:
        ModelRefused: The model's forward does not compile to one graph.
    """
    runtime, folder = forward.runtime, build_folder(cache_dir, key)
    assert runtime.cache is not None
    if not runtime.kernels and native.supports(runtime.cache.geometry):
        if fill:
            native.compile_library(folder)
        runtime.native = native.NativeAttention(folder, runtime.cache.geometry)
    forward.pad_always = True
    step = torch.compile(_own_code(forward), fullgraph=True)
    floats_stay = torch._dynamo.config.patch(specialize_float=True)  # else all is traced twice
    # A GPU's reductions are cut by a rule: timed, two starts might cut, and add, differently.
    untimed = torch._inductor.config.patch(_UNTIMED if runtime.kernels else {})
    with _inductor_cache(folder), floats_stay, untimed, quiet():
        try:
            if runtime.kernels and runtime.exact:
                _trace(forward, forward.eager_step)  # names what a graph would leave to libraries
            _trace(forward, _marked(step))
        except Exception as error:
            line = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ModelRefused(f"the forward does not compile: {line}") from error

    def run(ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        with torch.compiler.set_stance("fail_on_recompile"):
            try:
                return step(ids, positions, keep)
            except RuntimeError as error:
                raise EngineFailure(f"the compiled forward does not fit: {error}") from error

    forward.step = run
    forward.compiled = True


def _own_code(forward: ModelForward) -> Step:
    """The eager step as a function with a code object of its own, by which dynamo caches."""

    def step(ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        return forward.eager_step(ids, positions, keep)

    own = types.FunctionType(step.__code__.replace(), step.__globals__, closure=step.__closure__)
    return cast(Step, own)


def _marked(step: Step) -> Step:
    """Tell dynamo which sizes vary."""

    def marked(ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        torch._dynamo.mark_dynamic(ids, 1)
        torch._dynamo.mark_dynamic(positions, 1)
        torch._dynamo.mark_dynamic(keep, 0)
        return step(ids, positions, keep)

    return marked


def _trace(forward: ModelForward, step: Step) -> None:
    runtime = forward.runtime
    assert runtime.cache is not None
    forward.step = step
    if runtime.kernels:
        from worker.gpu.forward import DeviceForward  # only here: it loads triton

        assert isinstance(forward, DeviceForward)
        forward.run_padding(*_TRACED_BY_KERNELS)
        return
    tokens, kept = _TRACED
    size = runtime.cache.geometry.block_size
    batch = Batch(
        input_ids=[0] * tokens,
        positions=list(range(tokens)),
        slots=list(range(tokens)),
        query_starts=[0, tokens],
        block_tables=[[0] * (-(-tokens // size))],
        logit_tokens=list(range(kept)),
    )
    forward.run(batch)


@contextlib.contextmanager
def _inductor_cache(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    names = {"TORCHINDUCTOR_CACHE_DIR": str(folder), "TORCHINDUCTOR_FX_GRAPH_CACHE": "1"}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
