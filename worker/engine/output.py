"""What a step gave its requests, gathered into the one message that the front gets."""

from __future__ import annotations

from array import array

from worker.engine.plan import TokenLogprobs
from worker.messages import Finished, Logprobs, StepOutput


class Columns:
    """Collects a `StepOutput`."""

    def __init__(self) -> None:
        self._request_ids: list[int] = []
        self._num_tokens: list[int] = []
        self._token_ids = array("i")
        self._logprobs: list[Logprobs] = []
        self._prompt_logprobs: list[Logprobs] = []
        self.finished: list[Finished] = []

    def add(
        self, request_id: int, token_ids: list[int], logprobs: TokenLogprobs | None = None
    ) -> None:
        """Add a row's new tokens; of the log-probabilities only theirs."""
        self._request_ids.append(request_id)
        self._num_tokens.append(len(token_ids))
        self._token_ids.extend(token_ids)
        if logprobs is not None:
            self._logprobs.append(logprobs.message(request_id, len(token_ids)))

    def add_prompt_logprobs(self, request_id: int, logprobs: TokenLogprobs) -> None:
        """Add those of the next part of a row's prompt."""
        self._prompt_logprobs.append(logprobs.message(request_id, len(logprobs.chosen)))

    def message(self) -> StepOutput:
        """All of it."""
        return StepOutput(
            request_ids=self._request_ids,
            num_tokens=self._num_tokens,
            token_ids=self._token_ids.tobytes(),
            finished=self.finished,
            logprobs=self._logprobs,
            prompt_logprobs=self._prompt_logprobs,
        )
