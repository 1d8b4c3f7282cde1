"""What of an answer the client has, and the calls that fetch the rest of it from other workers.

Pure: messages in, messages out; no clock, no I/O. Seed, fingerprint, token ids and the number of
text bytes are all that the rest depends on, so nothing else is kept of what went by.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from nightjar.seeds import choice_seed
from nightjar.v1 import generation_pb2 as pb
from nightjar.validation import MAX_ATTEMPTS


class NotTheSame(Exception):
    """A worker goes on with another answer than the one that the client has begun to read."""


@dataclass(slots=True)
class _Choice:
    token_ids: array[int]  # that the client has, and those of an answer it wants continued
    num_text_bytes: int = 0
    finished: bool = False


@dataclass(slots=True)
class Call:
    """A call to one worker: for the whole answer, or for what one choice still lacks."""

    request: pb.GenerateRequest
    choice: int | None = None  # None: all choices
    num_repeated: int = 0  # log-probabilities of the prompt that are still to come again


class Answer:
    """One request's answer, as far as it was handed on.

    Args:
        request: A validated request.
    """

    def __init__(self, request: pb.GenerateRequest) -> None:
        self._request = request
        self._choices = [_Choice(array("i")) for _ in range(max(1, request.sampling.n))]
        self._start = pb.GenerationStart()  # empty until a worker told it
        self._room = 0  # most tokens of an answer whose request does not say
        self._num_prompt_logprobs = 0
        self._usages: list[pb.Usage] = []  # of calls for single choices
        self._begun_attempt = request.continuation.attempt
        self.begun = False  # the client has the first message
        self.complete = False  # the client has the usage, and so everything
        if request.HasField("continuation"):
            begun = request.continuation
            self._choices[0] = _Choice(array("i", begun.token_ids), begun.num_text_bytes_delivered)

    @property
    def num_choices(self) -> int:
        """Answers to the prompt that were asked for."""
        return len(self._choices)

    @property
    def fingerprint(self) -> str:
        """Of the arithmetic that every further token must come from; empty while any will do."""
        if self.begun:
            return self._start.arithmetic_fingerprint
        return self._request.continuation.arithmetic_fingerprint

    @property
    def resumable(self) -> bool:
        """Whether the first worker told what a resumption needs."""
        return bool(self._start.arithmetic_fingerprint)

    def num_tokens(self, choice: int) -> int:
        """Tokens of a choice that the client has."""
        return len(self._choices[choice].token_ids)

    def unfinished(self, choice: int | None) -> list[int]:
        """The choices without a finish reason, of all or of the one given."""
        indices = range(len(self._choices)) if choice is None else (choice,)
        return [i for i in indices if not self._choices[i].finished]

    def whole(self, max_model_len: int) -> Call:
        """The call that begins the answer, at a worker with that context."""
        self._start.Clear()
        self._room = max_model_len
        return Call(self._request)

    def rest(self, choice: int, attempt: int) -> Call:
        """The call for what a choice lacks; a request of its own, with n = 1.

        Args:
            choice: Its index.
            attempt: Number of the resumption, from 1.
        """
        known = self._choices[choice]
        request = pb.GenerateRequest()
        request.CopyFrom(self._request)
        sampling = request.sampling
        sampling.ClearField("n")
        sampling.seed = choice_seed(self._start.seed, choice)
        if not sampling.HasField("max_tokens"):
            # As much as the first worker's context held, whatever the next one's holds.
            sampling.max_tokens = self._room - self._start.num_prompt_tokens
        num_repeated = 0
        if choice == 0 and not known.token_ids:
            # The prompt's come before the first token, in any number of messages.
            num_repeated = self._num_prompt_logprobs
        if choice or known.token_ids or num_repeated >= self._start.num_prompt_tokens - 1:
            sampling.ClearField("prompt_logprobs")
            num_repeated = 0
        request.continuation.CopyFrom(
            pb.Continuation(
                token_ids=known.token_ids,
                seed=sampling.seed,
                num_text_bytes_delivered=known.num_text_bytes,
                attempt=min(MAX_ATTEMPTS, self._begun_attempt + attempt),
                arithmetic_fingerprint=self._start.arithmetic_fingerprint,
            )
        )
        return Call(request, choice, num_repeated)

    def take(self, call: Call, response: pb.GenerateResponse) -> pb.GenerateResponse | None:
        """Note a message of a call; returns it as the client gets it, None if it gets nothing.

        Facts of admission wait for the first content: they bind nobody before.

        Raises:
            NotTheSame: The call was for the rest of an answer, and this is of another one.
        """
        if response.HasField("start"):
            if call.choice is None:
                self._start.CopyFrom(response.start)
            else:
                self._check(call, response.start)
                response.ClearField("start")
        if call.choice is not None:
            self._fit(call, call.choice, response)
        if not _has_content(response):
            return None
        if not self.begun:
            self.begun = True
            if not response.HasField("start"):
                response.start.CopyFrom(self._start)
        self._note(response)
        return response

    def usage(self) -> pb.Usage:
        """What the answer cost, of an answer that several workers gave.

        Tokens are counted as delivered; of drafts and steps, those of lost calls are not known.
        """
        total = pb.Usage(num_prompt_tokens=self._start.num_prompt_tokens)
        total.num_completion_tokens = sum(len(choice.token_ids) for choice in self._choices)
        for usage in self._usages:
            total.num_cached_tokens = max(total.num_cached_tokens, usage.num_cached_tokens)
            total.num_draft_tokens += usage.num_draft_tokens
            total.num_accepted_tokens += usage.num_accepted_tokens
            total.num_steps += usage.num_steps
            total.num_preemptions += usage.num_preemptions
            total.policy_version = usage.policy_version or total.policy_version
            total.speculation_limit = usage.speculation_limit or total.speculation_limit
        # A resumption may find the answer's own tokens in the cache, too.
        total.num_cached_tokens = min(total.num_cached_tokens, total.num_prompt_tokens)
        total.gamma_histogram.extend(summed_histogram(self._usages))
        return total

    def _check(self, call: Call, start: pb.GenerationStart) -> None:
        begun = self._start
        if (start.arithmetic_fingerprint, start.num_prompt_tokens, start.seed) != (
            begun.arithmetic_fingerprint,
            begun.num_prompt_tokens,
            call.request.sampling.seed,
        ):
            raise NotTheSame("the worker goes on with other arithmetic, prompt or seed")

    def _fit(self, call: Call, choice: int, response: pb.GenerateResponse) -> None:
        """Make a message of a single choice's call one of the answer."""
        response.index = choice
        if response.HasField("usage"):
            usage = pb.Usage()
            usage.CopyFrom(response.usage)
            self._usages.append(usage)
            response.ClearField("usage")
        num_repeated = min(call.num_repeated, len(response.prompt_logprobs))
        del response.prompt_logprobs[:num_repeated]
        call.num_repeated -= num_repeated

    def _note(self, response: pb.GenerateResponse) -> None:
        choice = self._choices[response.index]
        choice.token_ids.extend(response.token_ids)
        text = response.text
        choice.num_text_bytes += len(text) if text.isascii() else len(text.encode())
        self._num_prompt_logprobs += len(response.prompt_logprobs)
        if response.finish_reason:
            choice.finished = True
        if response.HasField("usage"):
            self.complete = True


def summed_histogram(usages: Iterable[pb.Usage]) -> list[int]:
    """Steps by gamma of all of them; entry g counts those with g draft tokens."""
    histograms = (usage.gamma_histogram for usage in usages)
    return [sum(counts) for counts in itertools.zip_longest(*histograms, fillvalue=0)]


def _has_content(response: pb.GenerateResponse) -> bool:
    return bool(
        response.token_ids
        or response.text
        or response.finish_reason
        or response.prompt_logprobs
        or response.logprobs
        or response.HasField("usage")
    )
