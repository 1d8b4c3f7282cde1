"""Log-probabilities in OpenAI's two shapes; tokens are bytes, and only some are text."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from gateway.http.shapes import ChatLogprobs, TextLogprobs, TokenLogprob, TopLogprob
from nightjar.v1 import generation_pb2 as pb

LEAST = -9999.0  # stands for no probability at all, which JSON cannot write


def chat_logprobs(entries: Iterable[pb.TokenLogprobs]) -> ChatLogprobs:
    """Entries of a chat answer, in order."""
    return {"content": [_entry(entry) for entry in entries], "refusal": None}


def _entry(entry: pb.TokenLogprobs) -> TokenLogprob:
    return {**_token(entry.chosen), "top_logprobs": [_token(token) for token in entry.top]}


def _token(token: pb.TokenLogprob) -> TopLogprob:
    raw = token.token_bytes
    # Bytes that are no whole character are spelled out, as OpenAI spells them.
    name = raw.decode(errors="backslashreplace")
    return {"token": name, "logprob": max(token.logprob, LEAST), "bytes": list(raw)}


class TextOffsets:
    """Where tokens begin in a text, in characters; bytes that are none count as U+FFFD."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_characters = 0

    def next(self, token: bytes) -> int:
        """Where this token begins; one that goes on with a character, where that does."""
        # Only its first byte tells whether it does, or leaves bytes before it that are no text.
        self._num_characters += len(self._decoder.decode(token[:1]))
        unfinished = not token or self._decoder.getstate()[0]
        start = self._num_characters if unfinished else self._num_characters - 1
        self._num_characters += len(self._decoder.decode(token[1:]))
        return start


def text_logprobs(
    entries: Sequence[pb.TokenLogprobs],
    offsets: TextOffsets,
    first: bytes | None = None,
    *,
    shown: bool = True,
) -> TextLogprobs:
    """Entries of a completion, in order; those of a prompt begin with a token without any.

    Args:
        entries: One a token.
        offsets: Goes on from piece to piece of one text.
        first: The bytes of a token before the entries, of which nothing is known.
        shown: Whether it is part of the text.
    """
    logprobs: TextLogprobs = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    if first is not None:
        _add(logprobs, first, None, None, offsets if shown else TextOffsets())
    for entry in entries:
        top: dict[str, float] = {}
        # Two tokens may look alike: the likelier one counts. The one taken is always there.
        for token in (*entry.top, entry.chosen):
            top.setdefault(_name(token.token_bytes), max(token.logprob, LEAST))
        _add(logprobs, entry.chosen.token_bytes, max(entry.chosen.logprob, LEAST), top, offsets)
    return logprobs


def _add(
    logprobs: TextLogprobs,
    token: bytes,
    logprob: float | None,
    top: dict[str, float] | None,
    offsets: TextOffsets,
) -> None:
    logprobs["tokens"].append(_name(token))
    logprobs["token_logprobs"].append(logprob)
    logprobs["top_logprobs"].append(top)
    logprobs["text_offset"].append(offsets.next(token))


def _name(token: bytes) -> str:
    """The token's text; of bytes that are no text, OpenAI's spelling of them."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)
