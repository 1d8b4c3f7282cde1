"""Configuration of a worker; flags and variables derive from the fields."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from pathlib import Path
from typing import Any, Literal, TypeVar

from nightjar.config import at_least, option
from nightjar.errors import ConfigError

# What 0 stands for. On a GPU the pool is a share of its memory, which only the engine can see.
_CPU_SIZES = {
    "max_num_seqs": 16,
    "max_num_batched_tokens": 256,
    "max_catchup_tokens": 256,
    "kv_mb": 256,
}
_GPU_SIZES = {"max_num_seqs": 256, "max_num_batched_tokens": 2048, "max_catchup_tokens": 1024}
ConfigT = TypeVar("ConfigT", bound="WorkerConfig")


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """Everything a worker can be told."""

    listen: str = option("127.0.0.1:0", "address to serve on; port 0 takes a free one")
    model: str = option("smollm2-135m", "alias, local folder or Hub id of the target model")
    served_model_name: str = option("", "name that requests may use; empty takes the model's")
    proposer: Literal["draft_model", "ngram", "none"] = option("draft_model", "what drafts tokens")
    draft: str = option(
        "", "folder or Hub id of the draft; empty takes the one shipped for the alias"
    )
    device: Literal["auto", "cpu", "cuda"] = option(
        "auto", "where models run; auto is the first GPU that is visible, else the CPU"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto",
        "weights' type; auto is the checkpoint's on a GPU, on a CPU bfloat16 where the processor "
        "has its instructions, else float32; float16 runs on a GPU only",
    )
    load_format: Literal["safetensors", "dummy"] = option(
        "safetensors", "the checkpoint's weights, or random ones by its config.json for benchmarks"
    )
    arithmetic: Literal["auto", "exact", "free"] = option(
        "auto", "exact answers to the bit, or free; auto is exact where it can be proved"
    )
    build: Literal["auto", "eager", "compiled"] = option(
        "auto",
        "forward to run; auto compiles on a GPU, and on a CPU takes a cached build if there is one",
    )
    num_threads: int = option(
        0,
        "threads of the engine; 0 takes the cores it may use",
        check=lambda n: 0 <= n <= 1024,
        limit="0 to 1024",
    )
    max_model_len: int = option(
        0,
        "tokens of prompt and answer; 0 takes min(model's, 2048, the pool's)",
        check=lambda n: n == 0 or n >= 2,
        limit="at least 2, or 0",
    )
    max_num_seqs: int = at_least(0, 0, "most requests in a batch; 0 takes 16, on a GPU 256")
    max_num_batched_tokens: int = option(
        0,
        "most tokens in a step; 0 takes 256, on a GPU 2048",
        check=lambda n: n == 0 or n >= 2,
        limit="at least 2, or 0",
    )
    block_size: int = option(
        16, "tokens of a KV block", check=lambda n: n in (16, 32, 64), limit="16, 32 or 64"
    )
    num_blocks: int = at_least(0, 0, "KV blocks of the pool's head; 0 derives them from kv_mb")
    kv_mb: int = at_least(
        0, 0, "megabytes of target KV where num_blocks is 0; 0 takes 256, on a GPU its share"
    )
    gpu_memory_share: float = option(
        0.85,
        "part of the memory that is free once weights are loaded which a GPU's pool may take, "
        "where num_blocks and kv_mb are 0",
        check=lambda share: 0 < share <= 1,
        limit="above 0, at most 1",
    )
    max_gamma: int = option(
        5, "largest gamma of a step", check=lambda n: 0 <= n <= 8, limit="0 to 8"
    )
    max_catchup_tokens: int = at_least(
        0, 0, "most tokens that the draft catches up in a step; 0 takes 256, on a GPU 1024"
    )
    max_waiting: int = at_least(
        1, 256, "requests that may wait, each of n answers one; more are refused"
    )
    max_waiting_tokens: int = at_least(
        1, 1_048_576, "tokens that the prompts which wait may have together; more are refused"
    )
    stream_interval_ms: int = at_least(0, 20, "join stream messages for this long under load")
    planner: str = option("", "address of the planner; empty runs without speculation adapting")
    memory_agent: str = option("", "address of the memory agent; empty keeps the draft resident")
    gamma: int | None = option(None, "fixed gamma while no planner is configured (default 0)")
    prefix_cache: bool = option(True, "reuse KV blocks of equal prefixes")
    cache_dir: str = option("", "folder for models and builds; empty is ~/.cache/nightjar")
    shm_dir: str = option("/dev/shm", "folder of the shared-memory pool")  # noqa: S108
    tls_cert: str = option("", "PEM file of the certificate chain; empty speaks without TLS")
    tls_key: str = option("", "PEM file of its private key, without a password")
    tls_client_ca: str = option(
        "", "PEM file of the authorities whose certificates clients must show (mTLS)"
    )
    drain_timeout_s: float = at_least(0, 30, "seconds that admitted requests get at SIGTERM")
    progress_timeout_s: float = at_least(
        0.5, 10, "seconds without a sign of the engine after which the worker is not ready"
    )


def check_shm_dir(path: str) -> None:
    """Refuse a folder that is none, in the memory agent's words.

    Raises:
        ConfigError: It is not there, or something else.
    """
    if not os.path.isdir(path):
        raise ConfigError(f"--shm-dir={path!r}: is not a folder")


def resolved(config: ConfigT) -> ConfigT:
    """The same configuration with device and sizes in place of "auto" and 0; twice does no harm.

    On a GPU kv_mb stays 0, where it was: the engine derives the pool from the card's memory.
    """
    device = find_device() if config.device == "auto" else config.device
    sizes = _GPU_SIZES if device == "cuda" else _CPU_SIZES
    changes: dict[str, Any] = {
        name: size for name, size in sizes.items() if getattr(config, name) == 0
    }
    return dataclasses.replace(config, device=device, **changes)


def find_device() -> Literal["cpu", "cuda"]:
    """Say "cuda" where a GPU is visible and the installed torch was built for it.

    Torch itself is not loaded: the front never does.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return "cpu"
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        return "cpu"
    spec = importlib.util.find_spec("torch")
    folders = (spec.submodule_search_locations or []) if spec is not None else []
    built = any((Path(folder) / "lib" / "libtorch_cuda.so").is_file() for folder in folders)
    return "cuda" if built else "cpu"
