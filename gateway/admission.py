"""How much the gateway takes on: answers open at once, and prompts that wait for their first token.

The workers queue; the gateway holds each request and what resuming it needs, so it bounds both
before it asks a worker.
"""

from __future__ import annotations

import time
from types import TracebackType

from nightjar.errors import InvalidRequest, Overloaded
from nightjar.v1 import generation_pb2 as pb

BYTES_PER_TOKEN = 4  # of text; prompts are counted before anything tokenizes them
_SMOOTHING = 0.2
_LEAST_RETRY_S, _MOST_RETRY_S = 0.1, 30.0


def num_prompt_tokens(request: pb.GenerateRequest) -> int:
    """Tokens of a prompt: exact for ids, else one for every four bytes of the request."""
    if request.WhichOneof("prompt") == "tokens":
        return len(request.tokens.token_ids)
    return max(1, request.ByteSize() // BYTES_PER_TOKEN)


class Admission:
    """Counts open answers, each choice as one, and the tokens of prompts that wait.

    Args:
        max_open_requests: Most answers open at once.
        max_queued_tokens: Most tokens of prompts without a first token; a prompt that finds none
            waiting is let in, however long.
    """

    def __init__(self, max_open_requests: int, max_queued_tokens: int) -> None:
        self.num_open = 0
        self.num_queued_tokens = 0
        self._max_open_requests = max_open_requests
        self._max_queued_tokens = max_queued_tokens
        self._mean_seconds = 1.0  # of a request, smoothed

    def enter(self, num_choices: int, num_tokens: int) -> Ticket:
        """Let a request in; its ticket is a context manager that gives the place back.

        Args:
            num_choices: Answers it asks for.
            num_tokens: Tokens of its prompt, which waits once for each of them.

        Raises:
            InvalidRequest: There will never be so many places.
            Overloaded: There are not so many now.
        """
        if num_choices > self._max_open_requests:
            most = f"this server has at most {self._max_open_requests} answers open"
            raise InvalidRequest("sampling.n", f"{num_choices}; {most}")
        if self.num_open + num_choices > self._max_open_requests:
            raise Overloaded(
                f"{self.num_open} answers are open; at most {self._max_open_requests} are",
                self.retry_after_s(),
            )
        num_tokens *= num_choices
        waiting = self.num_queued_tokens
        if waiting and waiting + num_tokens > self._max_queued_tokens:
            raise Overloaded(
                f"prompts of about {waiting} tokens are waiting; about {num_tokens} more would "
                f"exceed {self._max_queued_tokens}",
                self.retry_after_s(),
            )
        return Ticket(self, num_choices, num_tokens)

    def retry_after_s(self) -> float:
        """Expected time until a place is free: a request's mean time over those that are open."""
        expected = self._mean_seconds / max(1, self.num_open)
        return min(_MOST_RETRY_S, max(_LEAST_RETRY_S, expected))

    def ended(self, seconds: float) -> None:
        """A request that was answered took so long."""
        self._mean_seconds += _SMOOTHING * (seconds - self._mean_seconds)


class Ticket:
    """One request's places."""

    def __init__(self, admission: Admission, num_choices: int, num_tokens: int) -> None:
        self._admission = admission
        self._num_choices, self._num_queued_tokens = num_choices, num_tokens
        self._since = time.monotonic()
        admission.num_open += num_choices
        admission.num_queued_tokens += num_tokens

    def begun(self) -> None:
        """The answer has begun: its prompt waits no more. May be told again."""
        self._admission.num_queued_tokens -= self._num_queued_tokens
        self._num_queued_tokens = 0

    def __enter__(self) -> Ticket:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.begun()
        self._admission.num_open -= self._num_choices
        if kind is None:
            self._admission.ended(time.monotonic() - self._since)
