"""What a request to an endpoint looks like from outside, whichever protocol it speaks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from planner_service.load.workload import Ask


class RequestFailed(Exception):
    """The endpoint refused a request or broke it off; the sentence is its own."""


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What all requests of a run have in common."""

    temperature: float = 0.0
    ignore_eos: bool = True
    max_gamma: int | None = None


@dataclass(slots=True, kw_only=True)
class Answer:
    """What came back, as it comes; times are of `time.perf_counter`."""

    piece_times: list[float] = field(default_factory=list)  # of pieces that carry something
    num_tokens: int = 0  # delivered, as the endpoint counts them; known at the end
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_drafts: int | None = None  # draft tokens verified; None: the endpoint does not tell
    num_accepted: int | None = None
    gamma_histogram: tuple[int, ...] = ()  # steps by gamma; empty: the endpoint does not tell
    policy_version: str = ""


class Endpoint(Protocol):
    """A server of text."""

    async def open(self) -> str:
        """Connect; the name of the model, empty where the endpoint needs none.

        Raises:
            ConfigError: Nobody answers there, or not as this protocol's server would.
        """
        ...

    async def ask(self, ask: Ask, wish: Wish, answer: Answer) -> None:
        """Send a request and fill in its answer until it has ended.

        Raises:
            RequestFailed: It was refused or broken off.
        """
        ...

    async def close(self) -> None:
        """Disconnect."""
        ...
