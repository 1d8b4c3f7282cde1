"""An answer as server-sent events: what never changes is written once, text is put between."""

from __future__ import annotations

import json
from collections import defaultdict
from json.encoder import encode_basestring as quote

from gateway.http.answer import Answer
from gateway.http.logprobs import TextOffsets, chat_logprobs, text_logprobs
from gateway.http.translate import Parsed
from gateway.http.usage import speculation_json, usage_json
from nightjar.v1 import generation_pb2 as pb

_OBJECT = {"chat": "chat.completion.chunk", "completion": "text_completion"}
# Around a text, from its choice's number to its log-probabilities.
_AROUND = {
    "chat": (',"delta":{"content":', '},"logprobs":'),
    "completion": (',"text":', ',"logprobs":'),
}
_NOTHING_NEW = {"chat": ',"delta":{}', "completion": ',"text":""'}
_DONE = "data: [DONE]\n\n"


class Events:
    """The events of one streamed answer, as bytes.

    Every chunk names its choice. A chat's choices begin with a chunk that names the role; every
    choice ends with a chunk of its finish reason. The last such chunk waits for the usage, and
    carries what speculation did; the usage itself has a chunk of its own, if it was asked for.
    """

    def __init__(self, parsed: Parsed, answer: Answer) -> None:
        self._parsed, self._answer = parsed, answer
        self._before, self._after = _AROUND[parsed.route]
        self._no_usage = ',"usage":null' if parsed.include_usage else ""
        self._wants_logprobs = parsed.logprobs
        self._head = ""  # of every chunk, up to its choices; written when the first one is
        self._last = 0  # the choice that ended last
        self._offsets: defaultdict[int, TextOffsets] = defaultdict(TextOffsets)  # by choice

    def of(self, response: pb.GenerateResponse) -> bytes:
        """Events of one message; none where it says nothing new. Raises what `Answer.take` does."""
        answer, index = self._answer, response.index
        answer.take(response)
        events = "" if self._head else self._begin()
        logprobs = "null"
        if self._wants_logprobs and response.logprobs:
            logprobs = self._logprobs(response)
        if response.text or logprobs != "null":
            events += (
                f'{self._head}"choices":[{{"index":{index}{self._before}{quote(response.text)}'
                f'{self._after}{logprobs},"finish_reason":null}}]{self._usage()}}}\n\n'
            )
        if response.finish_reason:
            if answer.num_open:
                events += self._finish(index)
            else:
                self._last = index
        return events.encode()

    def end(self) -> bytes:
        """The last events.

        Raises:
            EngineFailure: The answer is not complete.
        """
        usage = self._answer.ended()
        events = self._finish(
            self._last, f',"nightjar":{_dumps(speculation_json(usage, self._answer.notes))}'
        )
        if self._parsed.include_usage:
            events += f'{self._head}"choices":[],"usage":{_dumps(usage_json(usage))}}}\n\n'
        return (events + _DONE).encode()

    def _begin(self) -> str:
        answer, route = self._answer, self._parsed.route
        fingerprint = quote(answer.fingerprint) if answer.fingerprint else "null"
        self._head = (
            f'data: {{"id":"{answer.id}","object":"{_OBJECT[route]}","created":{answer.created},'
            f'"model":{quote(answer.model)},"system_fingerprint":{fingerprint},'
        )
        if route != "chat":
            return ""
        delta = '"delta":{"role":"assistant","content":"","refusal":null},"logprobs":null'
        return "".join(
            f'{self._head}"choices":[{{"index":{index},{delta},"finish_reason":null}}]'
            f"{self._usage()}}}\n\n"
            for index in range(answer.num_choices)
        )

    def _finish(self, index: int, more: str = "") -> str:
        reason = self._answer.finishes[index]
        return (
            f'{self._head}"choices":[{{"index":{index}{_NOTHING_NEW[self._parsed.route]}'
            f',"logprobs":null,"finish_reason":"{reason}"}}]{self._usage()}{more}}}\n\n'
        )

    def _usage(self) -> str:
        if self._parsed.continuous_usage:
            return f',"usage":{_dumps(self._answer.usage_so_far())}'
        return self._no_usage

    def _logprobs(self, response: pb.GenerateResponse) -> str:
        if self._parsed.route == "chat":
            return _dumps(chat_logprobs(response.logprobs))
        return _dumps(text_logprobs(response.logprobs, self._offsets[response.index]))


def error_event(body: object) -> bytes:
    """The event that ends a stream that broke off."""
    return f"data: {_dumps(body)}\n\n".encode()


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
