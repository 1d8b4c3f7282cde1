"""An answer that is sent at once, with the prompt before it where that is wanted."""

from __future__ import annotations

from collections import defaultdict

from gateway.http.answer import Answer
from gateway.http.logprobs import TextOffsets, chat_logprobs, text_logprobs
from gateway.http.shapes import (
    ChatChoice,
    ChatCompletion,
    Completion,
    Finish,
    TextChoice,
    TextLogprobs,
)
from gateway.http.translate import Parsed
from gateway.http.usage import speculation_json, usage_json
from nightjar.v1 import generation_pb2 as pb


class WholeAnswer:
    """Collects an answer that is sent at once."""

    def __init__(self, parsed: Parsed, answer: Answer) -> None:
        self._parsed, self._answer = parsed, answer
        # By choice; by prompt.
        self._texts: defaultdict[int, list[str]] = defaultdict(list)
        self._entries: defaultdict[int, list[pb.TokenLogprobs]] = defaultdict(list)
        self._prompt_entries: defaultdict[int, list[pb.TokenLogprobs]] = defaultdict(list)
        self._first_tokens: defaultdict[int, bytes] = defaultdict(bytes)

    def take(self, response: pb.GenerateResponse) -> None:
        """Take over one message; raises what `Answer.take` raises."""
        self._answer.take(response)
        if response.text:
            self._texts[response.index].append(response.text)
        if response.logprobs:
            self._entries[response.index].extend(response.logprobs)
        if self._parsed.echo:
            prompt = response.index // self._parsed.num_choices
            self._prompt_entries[prompt].extend(response.prompt_logprobs)
            if response.HasField("start"):
                self._first_tokens[prompt] = response.start.first_prompt_token

    def json(self) -> ChatCompletion | Completion:
        """The answer.

        Raises:
            EngineFailure: It is not complete.
        """
        answer = self._answer
        spent = answer.ended()
        usage, speculation = (
            usage_json(spent, self._parsed.num_hidden * answer.num_choices),
            speculation_json(spent, answer.notes),
        )
        if self._parsed.route == "chat":
            return {
                "id": answer.id,
                "object": "chat.completion",
                "created": answer.created,
                "model": answer.model,
                "system_fingerprint": answer.fingerprint or None,
                "choices": [self._chat_choice(i) for i in range(answer.num_choices)],
                "usage": usage,
                "nightjar": speculation,
            }
        return {
            "id": answer.id,
            "object": "text_completion",
            "created": answer.created,
            "model": answer.model,
            "system_fingerprint": answer.fingerprint or None,
            "choices": [self._text_choice(i) for i in range(answer.num_choices)],
            "usage": usage,
            "nightjar": speculation,
        }

    def _finish(self, index: int) -> Finish:
        return self._answer.finishes[index]

    def _chat_choice(self, index: int) -> ChatChoice:
        text = "".join(self._texts[index])
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": chat_logprobs(self._entries[index]) if self._parsed.logprobs else None,
            "finish_reason": self._finish(index),
        }

    def _text_choice(self, index: int) -> TextChoice:
        parsed = self._parsed
        text = "" if parsed.num_hidden else "".join(self._texts[index])
        finish = "length" if parsed.num_hidden else self._finish(index)
        return {
            "index": index,
            "text": self._prompt(index // parsed.num_choices) + text if parsed.echo else text,
            "logprobs": self._text_logprobs(index) if parsed.logprobs else None,
            "finish_reason": finish,
        }

    def _prompt(self, prompt: int) -> str:
        request = self._parsed.requests[prompt]
        if request.WhichOneof("prompt") == "text":
            return request.text
        rest = [entry.chosen.token_bytes for entry in self._prompt_entries[prompt]]
        return b"".join([self._first_tokens[prompt], *rest]).decode(errors="replace")

    def _text_logprobs(self, index: int) -> TextLogprobs:
        parsed = self._parsed
        own = [] if parsed.num_hidden else self._entries[index]
        if not parsed.echo:
            return text_logprobs(own, TextOffsets())
        prompt = index // parsed.num_choices
        entries = [*self._prompt_entries[prompt], *own]
        first, given = self._first_tokens[prompt], parsed.requests[prompt].text
        # A token that the tokenizer put before a text is no part of it.
        shown = not given or given.encode().startswith(first)
        return text_logprobs(entries, TextOffsets(), first, shown=shown)
