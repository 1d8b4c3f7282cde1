"""Configuration of a worker; flags and variables derive from the fields."""

from __future__ import annotations

import dataclasses
from typing import Literal

from nightjar.config import at_least, option


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
    device: Literal["cpu"] = option("cpu", "device of this build; GPUs are not served yet")
    dtype: Literal["auto", "float32", "bfloat16"] = option(
        "auto", "weights' type; auto is bfloat16 where the processor has its instructions"
    )
    arithmetic: Literal["auto", "exact", "free"] = option(
        "auto", "exact answers to the bit, or free; auto is exact where it can be proved"
    )
    build: Literal["auto", "eager", "compiled"] = option(
        "auto", "forward to run; auto takes a cached compiled build if there is one"
    )
    num_threads: int = at_least(0, 0, "threads of the engine; 0 takes the cores it may use")
    max_model_len: int = at_least(0, 0, "tokens of prompt and answer; 0 takes min(model's, 2048)")
    max_num_seqs: int = at_least(1, 16, "most requests in a batch")
    max_num_batched_tokens: int = at_least(2, 256, "most tokens in a step")
    block_size: int = option(
        16, "tokens of a KV block", check=lambda n: n in (16, 32, 64), limit="16, 32 or 64"
    )
    num_blocks: int = at_least(0, 0, "KV blocks of the pool's head; 0 derives them from kv_mb")
    kv_mb: int = at_least(1, 256, "megabytes of target KV where num_blocks is 0")
    max_gamma: int = option(
        5, "largest gamma of a step", check=lambda n: 0 <= n <= 8, limit="0 to 8"
    )
    max_catchup_tokens: int = at_least(1, 256, "most tokens that the draft catches up in a step")
    max_waiting: int = at_least(1, 256, "requests that may wait; more are refused")
    stream_interval_ms: int = at_least(0, 20, "join stream messages for this long under load")
    planner: str = option("", "address of the planner; empty runs without speculation adapting")
    memory_agent: str = option("", "address of the memory agent; empty keeps the draft resident")
    gamma: int | None = option(None, "fixed gamma while no planner is configured (default 0)")
    prefix_cache: bool = option(True, "reuse KV blocks of equal prefixes")
    cache_dir: str = option("", "folder for models and builds; empty is ~/.cache/nightjar")
    shm_dir: str = option("/dev/shm", "folder of the shared-memory pool")  # noqa: S108
    drain_timeout_s: float = at_least(0, 30, "seconds that admitted requests get at SIGTERM")
    progress_timeout_s: float = at_least(
        0.5, 10, "seconds without a sign of the engine after which the worker is not ready"
    )
