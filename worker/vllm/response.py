"""The pieces of an answer as messages of `vllm.grpc.engine`: chunks of what is new, and totals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from smg_grpc_proto import vllm_engine_pb2 as pb

from worker.front.pieces import Piece, PositionLogprobs


@dataclass(kw_only=True)
class _Choice:
    token_ids: list[int] = field(default_factory=list)
    logprobs: Any = None  # of all its tokens, where no chunk carries them
    complete: Any = None  # its last message


@dataclass(kw_only=True)
class Messages:
    """What a client is sent of one answer.

    A streamed answer is chunks, which hold what is new, and after a choice's last chunk a
    `GenerateComplete` with the choice's ids and counts once more; any other is the completes
    alone, together, at its end. The prompt's cached tokens and the drafts are known at the end:
    each stands in the last message, the drafts of all choices added up.
    """

    stream: bool
    num_choices: int
    ends: frozenset[int]  # stop ids of the request that are no end ids of the model
    first_token_id: int | None = None  # of the prompt, where log-probabilities of it are asked for
    _num_prompt_tokens: int = 0
    _choices: dict[int, _Choice] = field(default_factory=dict)
    _of_prompt: Any = None  # of its tokens so far

    def take(self, piece: Piece) -> list[Any]:
        """Messages that go out with a piece."""
        if piece.start is not None:
            self._num_prompt_tokens = piece.start.num_prompt_tokens
        self._add_prompt(piece.prompt_logprobs)
        choice = self._choices.setdefault(piece.index, _Choice())
        choice.token_ids += piece.token_ids
        messages = []
        if self.stream and piece.token_ids:
            messages.append(self._chunk(piece))
        elif piece.logprobs:
            choice.logprobs = _scored(piece.logprobs, choice.logprobs)
        if piece.finish_reason:
            choice.complete = self._complete(piece.index, piece.finish_reason)
            if piece.stop_string:
                choice.complete.matched_stop_str = piece.stop_string
            elif piece.finish_reason == "stop" and choice.token_ids[-1] in self.ends:
                choice.complete.matched_token_id = choice.token_ids[-1]
            if self.stream:
                messages.append(pb.GenerateResponse(complete=choice.complete))
        if piece.usage is not None:
            if not self.stream:
                messages = [pb.GenerateResponse(complete=one) for one in self._completes()]
            last = messages[-1].complete
            last.cached_tokens = piece.usage.num_cached_tokens
            last.spec_draft_tokens = piece.usage.num_draft_tokens
            last.spec_accepted_tokens = piece.usage.num_accepted_tokens
        return messages

    def aborted(self) -> list[Any]:
        """The last messages of an answer that was aborted: every choice has one."""
        told = {index for index, choice in self._choices.items() if choice.complete is not None}
        for index in range(self.num_choices):
            choice = self._choices.setdefault(index, _Choice())
            if choice.complete is None:
                choice.complete = self._complete(index, "abort")
        untold = [one for one in self._completes() if not (self.stream and one.index in told)]
        return [pb.GenerateResponse(complete=one) for one in untold]

    def _completes(self) -> list[Any]:
        return [self._choices[index].complete for index in sorted(self._choices)]

    def _chunk(self, piece: Piece) -> Any:
        chunk = pb.GenerateStreamChunk(
            token_ids=piece.token_ids,
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=len(piece.token_ids),
            index=piece.index,
        )
        if piece.logprobs:
            chunk.output_logprobs.CopyFrom(_scored(piece.logprobs))
        if self._of_prompt is not None and piece.index == 0:
            chunk.input_logprobs.CopyFrom(self._of_prompt)
            self._of_prompt = None  # in the first chunk only
        return pb.GenerateResponse(chunk=chunk)

    def _complete(self, index: int, reason: str) -> Any:
        choice = self._choices[index]
        complete = pb.GenerateComplete(
            output_ids=choice.token_ids,
            finish_reason=reason,
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=len(choice.token_ids),
            index=index,
        )
        if choice.logprobs is not None:
            complete.output_logprobs.CopyFrom(choice.logprobs)
        if self._of_prompt is not None and index == 0:
            complete.input_logprobs.CopyFrom(self._of_prompt)
        return complete

    def _add_prompt(self, positions: Sequence[PositionLogprobs]) -> None:
        if not positions:
            return
        if self._of_prompt is None:
            assert self.first_token_id is not None
            # Nothing stands before the first token, so it has no probability.
            self._of_prompt = pb.InputLogProbs(token_ids=[self.first_token_id])
            self._of_prompt.token_logprobs.add()
            if positions[0].top:
                self._of_prompt.top_logprobs.add()
        for position in positions:
            self._of_prompt.token_ids.append(position.chosen.token_id)
            self._of_prompt.token_logprobs.add(value=position.chosen.logprob)
            _add_top(self._of_prompt, position)


def _scored(positions: Sequence[PositionLogprobs], so_far: Any = None) -> Any:
    scored = pb.OutputLogProbs() if so_far is None else so_far
    for position in positions:
        scored.token_ids.append(position.chosen.token_id)
        scored.token_logprobs.append(position.chosen.logprob)
        _add_top(scored, position)
    return scored


def _add_top(scored: Any, position: PositionLogprobs) -> None:
    """The likeliest tokens, best first; no list at all where none were asked for."""
    if position.top:
        scored.top_logprobs.add(
            token_ids=[one.token_id for one in position.top],
            values=[one.logprob for one in position.top],
        )
