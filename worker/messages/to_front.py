"""What the engine says to the front.

Times are microseconds unless named otherwise. Token ids of many rows travel as columns
(little-endian int32 bytes and counts), because building Python lists of small lists is
what such a message costs.
"""

from __future__ import annotations

import msgspec


class Context(msgspec.Struct, frozen=True, kw_only=True):
    """State of a batch; the fields of `nightjar.v1.Context`."""

    batch_size: int
    num_kv_tokens: int
    num_prefill_tokens: int
    num_waiting: int
    num_free_blocks: int
    max_stale_tokens: int
    sum_stale_tokens: int
    draft_resident: bool
    cpu_utilization: float
    feasible_max_gamma: int


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """What a long start is doing."""

    stage: str
    detail: str = ""


class StartFailed(msgspec.Struct, frozen=True, kw_only=True, tag="start_failed"):
    """The engine cannot serve; `kind` names the class in `nightjar.errors`."""

    kind: str
    message: str


class PoolInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent needs to map the pool; the fields of `nightjar.v1.PoolHandshake`."""

    arena_path: str
    arena_bytes: int
    block_bytes: int
    num_base_blocks: int
    num_extra_blocks: int
    image_path: str
    image_offset: int
    image_bytes: int
    image_sha256: bytes
    cuda_ipc_handle: bytes = b""
    cuda_device_uuid: bytes = b""


class ProductChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of `nightjar.v1.ProductChoice`."""

    num_outputs: int
    num_inputs: int
    num_rows: int
    kernel: str
    us: float = 0.0
    ratio: float = 0.0


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The engine serves."""

    engine_pid: int
    vocab_size: int
    max_model_len: int
    dtype: str
    device: str
    max_gamma: int
    max_batch_size: int
    proposer: str
    target_identity: str  # digest-based names for the planner's profile
    draft_identity: str
    arithmetic: str  # "exact" or "free"
    arithmetic_reason: str
    fingerprint: str
    build: str  # "eager" or "compiled"
    pool: PoolInfo | None  # None without a draft model: nothing to give back
    products: tuple[ProductChoice, ...] = ()
    device_name: str = "cpu"


class RowUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What one request cost; the fields of `nightjar.v1.Usage`."""

    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_steps: int
    gamma_histogram: tuple[int, ...]
    policy_version: str
    num_preemptions: int
    speculation_limit: str = ""


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """A request ended: "stop", "length" or "abort"; or "error", with the sentence."""

    request_id: int
    reason: str
    usage: RowUsage
    error: str = ""


class Logprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities of a row's next m tokens in columns, little-endian; k alternatives each."""

    request_id: int
    num_top: int  # k
    chosen: bytes  # float32 [m]: of the tokens themselves
    top_ids: bytes  # int32 [m, k]: the likeliest, best first; of equals the lowest id first
    top: bytes  # float32 [m, k]


class StepOutput(msgspec.Struct, frozen=True, kw_only=True, tag="step_output"):
    """Tokens of one step, in columns, and the requests that ended with it."""

    request_ids: list[int]
    num_tokens: list[int]  # per row; sums to len(token_ids) / 4
    token_ids: bytes  # int32, little-endian
    finished: list[Finished]
    logprobs: list[Logprobs] = []  # of rows that ask: one entry per token of theirs in token_ids
    prompt_logprobs: list[Logprobs] = []  # of prompts' tokens, chunk by chunk, before any new one


SumsKey = tuple[str, int, int, int, int, bool]


def sums_key(decision_id: str, gamma: int, grid: int, bucket: int, context: Context) -> SumsKey:
    """Steps with equal keys may be added up.

    They share decision, gamma and bucket of one grid; and batch size and whether drafts were
    feasible, since the planner learns by these, and of all contexts it sees the last one's.
    """
    feasible = context.feasible_max_gamma > 0
    return (decision_id, gamma, grid, bucket, context.batch_size, feasible)


class StepSums(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of `nightjar.v1.StepReport`, and the bucket that the steps were decided by."""

    grid: int  # number of the bucket's grid, which may have changed since
    bucket: int
    context: Context
    gamma: int
    decision_id: str
    num_steps: int
    num_timed_steps: int
    step_us: int
    num_timed_emitted: int
    num_timed_rows: int
    num_emitted: int
    num_prefill_tokens: int
    catch_up_us: int
    num_catch_up_tokens: int
    num_catch_up_steps: int
    mixed_step_us: int
    draft_prefill_us: int
    reached: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def key(self) -> SumsKey:
        """What steps must have in common to be added up."""
        return sums_key(self.decision_id, self.gamma, self.grid, self.bucket, self.context)


class Reports(msgspec.Struct, frozen=True, kw_only=True, tag="reports"):
    """Sums for the planner; `ask` requests a decision for that context."""

    reports: list[StepSums]
    ask: Context | None
    session: bytes


class Pressure(msgspec.Struct, frozen=True, kw_only=True, tag="pressure"):
    """The fields of `nightjar.v1.PressureReport`; residency by its short name in lower case."""

    sequence: int
    num_free_blocks: int
    num_total_blocks: int
    num_waiting: int
    num_running: int
    exploit_gamma: int
    residency: str


class Grant(msgspec.Struct, frozen=True, kw_only=True, tag="grant"):
    """Permission to copy blocks one to one or, with both lists empty, to load the image."""

    grant_id: int
    kind: str  # "copy" or "load"
    source_ids: list[int] = []
    destination_ids: list[int] = []
    stream: int = 0  # the agent stream that it was made for


class RequestRefused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """The engine declines a transition."""

    request_id: int
    reason: str


class TransitionDone(msgspec.Struct, frozen=True, kw_only=True, tag="transition_done"):
    """The engine finished its part of a transition."""

    request_id: int
    residency: str


class PoolMap(msgspec.Struct, frozen=True, kw_only=True, tag="pool_map"):
    """Owners of all blocks, as (first block, blocks, owner) in order."""

    ranges: list[tuple[int, int, str]]
    num_base_blocks: int
    num_extra_blocks: int


class Status(msgspec.Struct, frozen=True, kw_only=True, tag="status"):
    """State of the engine: after steps, at most every 50 ms, and every 200 ms when idle.

    The front stamps its arrival: readiness is the age of the last one.
    """

    num_waiting: int
    num_running: int
    num_free_blocks: int
    num_total_blocks: int
    gamma: int
    policy_version: str
    num_steps: int
    num_generated_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_preemptions: int
    residency: str  # "none", "resident", "offloading", "offloaded", "reloading"
    draft_epoch: int
    expanded: bool
    num_expansions: int
    num_contractions: int
    num_granted_blocks: int
    rss_bytes: int


ToFront = (
    Progress
    | StartFailed
    | Ready
    | StepOutput
    | Reports
    | Pressure
    | Grant
    | RequestRefused
    | TransitionDone
    | PoolMap
    | Status
)
