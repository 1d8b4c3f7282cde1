"""What the front says to the engine."""

from __future__ import annotations

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Validated sampling parameters of one request, all defaults filled in."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    seed: int  # 64 bits; drawn by the front where the client gave none
    max_tokens: int
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    max_gamma: int | None = None  # None: the worker's own
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added), ids ascending
    num_logprobs: int = -1  # alternatives reported per new token; -1: no logprobs
    num_prompt_logprobs: int = -1  # the same for the prompt's tokens from the second on


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag="submit"):
    """A new request; `request_id` is the front's own and unique per process."""

    request_id: int
    prompt_token_ids: list[int]
    sampling: SamplingParams
    prior_token_ids: list[int] = []  # of the answer, generated elsewhere: it goes on after them


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    """The client is gone; unknown ids are ignored (it may just have finished)."""

    request_id: int


class Decision(msgspec.Struct, frozen=True, kw_only=True, tag="decision"):
    """The fields of `nightjar.v1.Decision`; the table as bucket -> (gamma, exploit_gamma)."""

    decision_id: str
    policy_version: str
    batch_size_edges: tuple[int, ...]
    kv_token_edges: tuple[int, ...]
    table: dict[int, tuple[int, int]]
    bucket: int
    hold_steps: int
    explored: bool
    session: bytes
    num_extra_drafts: int = 0


class PlannerLink(msgspec.Struct, frozen=True, kw_only=True, tag="planner_link"):
    """The planner stream opened or was lost."""

    connected: bool


class AgentLink(msgspec.Struct, frozen=True, kw_only=True, tag="agent_link"):
    """The agent stream opened or was lost; losing it ends every grant after a second."""

    connected: bool
    stream: int = 0  # number of the stream; grants carry it, so that none travels on a later one


class TransitionRequest(msgspec.Struct, frozen=True, kw_only=True, tag="transition"):
    """The agent asks to "expand" or "contract"."""

    request_id: int
    kind: str


class PoolMapRequest(msgspec.Struct, frozen=True, kw_only=True, tag="map_request"):
    """The agent asks who owns which block."""


class GrantAnswer(msgspec.Struct, frozen=True, kw_only=True, tag="grant_answer"):
    """The agent has done, or failed, what a grant allowed; it ends the grant."""

    grant_id: int
    ok: bool
    error: str = ""


class Shutdown(msgspec.Struct, frozen=True, kw_only=True, tag="shutdown"):
    """Stop after the current step; unfinished requests end as aborted."""


ToEngine = (
    Submit
    | Abort
    | Decision
    | PlannerLink
    | AgentLink
    | TransitionRequest
    | PoolMapRequest
    | GrantAnswer
    | Shutdown
)
