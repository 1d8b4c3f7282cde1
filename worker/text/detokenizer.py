"""Token ids to text as they come: whole characters only, and no part of a stop string."""

from __future__ import annotations

import codecs

from worker.text.tokenizer import Tokenizer


class Detokenizer:
    """One answer's text. Text that has been returned is never taken back.

    Held back are bytes of an unfinished character, and the longest end of the text that a stop
    string begins with. The stop that is completed first wins; of several completed by the same
    character, the longest. One that is complete before the answer has `min_tokens` tokens is text
    like any other. Each token costs time proportional to its own text.

    The engine ends answers by an instance of its own, given the same tokens: both agree.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: tuple[str, ...] = (), min_tokens: int = 0
    ) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stops = [_Matcher(text) for text in stop]
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._held = ""
        self.first = True  # no token has added text yet
        self.stopped = False  # a stop string is complete; nothing more is returned
        self.stop_string = ""  # which one

    def push(self, token_id: int) -> str:
        """The text that is safe to show after one more token."""
        self._num_tokens += 1
        if self.stopped or not self._tokenizer.adds_text(token_id):
            return ""
        data = self._tokenizer.token_bytes(token_id, first=self.first)
        self.first = False
        return self._take(self._utf8.decode(data))

    def flush(self) -> str:
        """What is still held, at the end of an answer; a cut character becomes U+FFFD."""
        if self.stopped:
            return ""
        text = self._take(self._utf8.decode(b"", final=True))
        held, self._held = self._held, ""
        return text + held

    def _take(self, text: str) -> str:
        if not self._stops:
            return text
        pending = self._held + text
        for i, character in enumerate(text, start=len(self._held) + 1):
            # After this loop step each matcher's `length` is the longest end of pending[:i]
            # that its stop string begins with.
            done = ""
            for matcher in self._stops:
                if matcher.advance(character):
                    done = max(done, matcher.text, key=len)
                    if self._num_tokens < self._min_tokens:
                        matcher.go_on()
            if done and self._num_tokens >= self._min_tokens:
                self.stopped, self.stop_string = True, done
                self._held = ""
                return pending[: i - len(done)]
        keep = max(matcher.length for matcher in self._stops)
        safe = len(pending) - keep
        self._held = pending[safe:]
        return pending[:safe]


class _Matcher:
    """Knuth, Morris and Pratt's automaton for one stop string."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.length = 0
        self._borders = [0]  # [i]: longest proper border of text[:i + 1]
        border = 0
        for character in text[1:]:
            while border and text[border] != character:
                border = self._borders[border - 1]
            border += text[border] == character
            self._borders.append(border)

    def advance(self, character: str) -> bool:
        """Read one character; whether the stop string is now complete."""
        while self.length and self.text[self.length] != character:
            self.length = self._borders[self.length - 1]
        self.length += self.text[self.length] == character
        return self.length == len(self.text)

    def go_on(self) -> None:
        """Look for the next occurrence, which may begin within the one that is complete."""
        self.length = self._borders[-1]
