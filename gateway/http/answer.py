"""What arrived of an answer so far, over all of its prompts and choices."""

from __future__ import annotations

import time
import uuid

from gateway.attempts import Notes
from gateway.http.shapes import Finish, Usage
from gateway.http.translate import Parsed
from gateway.http.usage import counts_json, total
from nightjar.errors import EngineFailure, Unavailable
from nightjar.v1 import generation_pb2 as pb

_FINISH: dict[int, Finish] = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}
_ID = {"chat": "chatcmpl-", "completion": "cmpl-"}


class Answer:
    """The facts of one answer so far; texts are kept by whoever needs them.

    Choice i of prompt p has the number p * n + i, here and in the messages taken.
    """

    def __init__(self, parsed: Parsed) -> None:
        self._parsed = parsed
        self.notes = [Notes() for _ in parsed.requests]  # filled in by the dispatcher
        self.id = _ID[parsed.route] + uuid.uuid4().hex
        self.created = int(time.time())
        self.fingerprint: str | None = None
        self.num_prompt_tokens = 0
        self.num_completion_tokens = 0
        # Nobody has judged this number yet, so nothing is made in advance.
        self.num_choices = len(parsed.requests) * parsed.num_choices
        self.finishes: dict[int, Finish] = {}  # of the choices that ended
        self._usages: list[pb.Usage] = []

    @property
    def model(self) -> str:
        """The model that answers; known once anything arrived."""
        return self._parsed.requests[0].model

    @property
    def outcome(self) -> str:
        """How the choices ended, for the log."""
        return ",".join(sorted(set(self.finishes.values())))

    @property
    def num_open(self) -> int:
        """Choices that go on."""
        return self.num_choices - len(self.finishes)

    def take(self, response: pb.GenerateResponse) -> None:
        """Take over the facts of one message.

        Raises:
            Unavailable: The worker gave the request up.
            EngineFailure: The message belongs to no choice, or ends one again.
        """
        self.num_completion_tokens += len(response.token_ids)
        if response.HasField("start"):
            self._begin(response.start)
        if response.finish_reason:
            self._end(response)
        if response.HasField("usage"):
            self._usages.append(response.usage)

    def ended(self) -> pb.Usage:
        """The usage of an answer that is complete.

        Raises:
            EngineFailure: The stream ended, but the answer did not.
        """
        if self.num_open or len(self._usages) < len(self._parsed.requests):
            raise EngineFailure("the worker ended the stream before the answer was complete")
        return self._usages[0] if len(self._usages) == 1 else total(self._usages)

    def usage_so_far(self) -> Usage:
        """Token counts in the middle of a stream."""
        return counts_json(self.num_prompt_tokens, self.num_completion_tokens)

    def _begin(self, start: pb.GenerationStart) -> None:
        self.num_prompt_tokens += start.num_prompt_tokens
        if self.fingerprint is None:
            self.fingerprint = start.arithmetic_fingerprint
        elif self.fingerprint != start.arithmetic_fingerprint:
            self.fingerprint = ""  # prompts went to workers that differ

    def _end(self, response: pb.GenerateResponse) -> None:
        if response.finish_reason == pb.FINISH_REASON_ABORT:
            raise Unavailable("the worker stopped the request before its end")
        if not 0 <= response.index < self.num_choices or response.index in self.finishes:
            raise EngineFailure("the worker ended a choice that was not open")
        self.finishes[response.index] = _FINISH[response.finish_reason]
