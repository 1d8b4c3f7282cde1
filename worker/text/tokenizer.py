"""Text to token ids and back, from a model folder's own files and without torch."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from nightjar.errors import ConfigError, InvalidRequest
from worker.text.chat_template import Chat, ChatTemplate

# Decoders whose text of a token depends on nothing but the token and on being the first one.
_DECODERS = {"Metaspace", "WordPiece", "Replace", "ByteFallback", "Fuse", "Strip"}
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class Tokenizer:
    """A folder's tokenizer, its chat template and the ids that end an answer.

    Attributes:
        vocab_size: One more than the largest id; logits from there on are padding.
        eos_token_ids: From generation_config.json, config.json and the tokenizer, ascending.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        template: ChatTemplate | None = None,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        self._backend = backend
        self._template = template
        self._vocabulary = {i: t for t, i in backend.get_vocab(with_added_tokens=True).items()}
        self.vocab_size = max(self._vocabulary) + 1
        self.eos_token_ids = tuple(sorted(set(eos_token_ids)))
        added = backend.get_added_tokens_decoder()
        self._special = {i for i, token in added.items() if token.special}
        parts = _decoder_parts(backend)
        kinds = {part["type"] for part in parts}
        if "ByteLevel" in kinds and all(_leaves_bytes_alone(p, self._vocabulary) for p in parts):
            self._byte_level: dict[str, int] | None = _byte_alphabet()
        elif kinds - _DECODERS:
            steps = ", ".join(part["type"] for part in parts)
            raise ConfigError(f"tokenizer.json: a decoder of {steps} is not supported")
        else:
            self._byte_level = None
        self._byte_fallback = "ByteFallback" in kinds
        self._bytes: dict[int, bytes] = {}  # of a token after another one
        self._anchor = 0 if self._byte_level else _ordinary_token(backend, self._vocabulary)

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read tokenizer.json and, where they exist, the folder's other settings.

        Raises:
            ConfigError: A file is missing or broken, or its decoder is not supported.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"{path} is missing")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare exceptions
            raise ConfigError(f"{path}: {error}") from error
        backend.no_truncation()
        backend.no_padding()
        settings = _settings(folder / "tokenizer_config.json")
        special = _special_tokens(settings)
        eos: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            value = _settings(folder / name).get("eos_token_id")
            values = value if isinstance(value, list) else [value]
            eos.update(v for v in values if isinstance(v, int))
        own = backend.token_to_id(special["eos_token"]) if "eos_token" in special else None
        eos.update([] if own is None else [own])
        template = ChatTemplate.load(folder, settings, special)
        return cls(backend, template=template, eos_token_ids=tuple(eos))

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode_chat` can work."""
        return self._template is not None

    def vocabulary(self) -> dict[int, str]:
        """Every id with its token as the tokenizer writes it."""
        return dict(self._vocabulary)

    def encode(self, text: str) -> list[int]:
        """Ids of a text prompt; the tokenizer's own post-processor decides about BOS.

        Raises:
            InvalidRequest: The text is not valid Unicode (a lone surrogate).
        """
        _check_unicode("text", text)
        return list(self._backend.encode(text).ids)

    def encode_chat(self, chat: Chat, max_characters: int | None = None) -> list[int]:
        """Ids of a chat, rendered by the model's own template, the assistant's answer next.

        Raises:
            InvalidRequest: No template, the template refuses the chat, its text is longer than
                `max_characters`, or a lone surrogate.
        """
        for i, message in enumerate(chat.messages):
            _check_unicode(f"chat.messages[{i}].role", message.role)
            _check_unicode(f"chat.messages[{i}].content", message.content)
        if self._template is None:
            raise InvalidRequest("chat", "this model has no chat template; send text or tokens")
        # The template writes BOS and the like itself.
        text = self._template.render(chat)
        if max_characters is not None and len(text) > max_characters:
            raise InvalidRequest("chat", f"{len(text)} characters can never fit the context")
        _check_unicode("chat", text)  # JSON can spell surrogates that proto's strings cannot hold
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def token_bytes(self, token_id: int, *, first: bool = False) -> bytes:
        """What a token adds to the text: bytes, for it may hold only part of a character.

        Special tokens and unknown ids add nothing. `first` is for the first token that adds
        something; some tokenizers drop its leading space.
        """
        if token_id in self._special or token_id not in self._vocabulary:
            return b""
        if first and self._byte_level is None:
            return self._as_bytes(token_id, first=True)
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._as_bytes(token_id, first=False)
        return known

    def own_bytes(self, token_id: int, *, first: bool = False) -> bytes:
        """A token's bytes as `token_bytes`, but those of special tokens as they are written."""
        if token_id in self._special:
            return self._vocabulary[token_id].encode()
        return self.token_bytes(token_id, first=first)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of an answer, special tokens left out, invalid bytes as U+FFFD."""
        pieces: list[bytes] = []
        for token_id in token_ids:
            skipped = token_id in self._special or token_id not in self._vocabulary
            if not skipped:
                pieces.append(self.token_bytes(token_id, first=not pieces))
        return b"".join(pieces).decode("utf-8", errors="replace")

    def adds_text(self, token_id: int) -> bool:
        """Whether a token counts as text: it is known and not special."""
        return token_id in self._vocabulary and token_id not in self._special

    def _as_bytes(self, token_id: int, *, first: bool) -> bytes:
        token = self._vocabulary[token_id]
        if self._byte_level is not None:
            if all(character in self._byte_level for character in token):
                return bytes(self._byte_level[character] for character in token)
            return token.encode()  # an added token, written as it is
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            value = int(match[1], 16)
            if value >= 0x80 or not first:
                return bytes([value])
        if first:
            return str(self._backend.decode([token_id], skip_special_tokens=False)).encode()
        before = self._backend.decode([self._anchor], skip_special_tokens=False)
        both = self._backend.decode([self._anchor, token_id], skip_special_tokens=False)
        return str(both[len(before) :]).encode()


def _check_unicode(field: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            field, f"is not valid Unicode: a lone surrogate at character {error.start}"
        ) from None


def _decoder_parts(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    decoder = json.loads(backend.to_str())["decoder"]
    if decoder is None:
        raise ConfigError("tokenizer.json: it has no decoder")
    return list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]


def _leaves_bytes_alone(part: dict[str, Any], vocabulary: dict[int, str]) -> bool:
    """Whether a part of a decoder changes nothing that byte-level decoding does by itself.

    Converters put parts for other kinds of vocabulary before it, which no token here answers to.
    """
    match part:
        case {"type": "ByteLevel" | "Fuse"}:
            return True
        case {"type": "ByteFallback"}:
            return not any(_BYTE_TOKEN.fullmatch(token) for token in vocabulary.values())
        case {"type": "Replace", "pattern": {"String": str(pattern)}}:
            return not any(pattern in token for token in vocabulary.values())
        case _:
            return False


def _ordinary_token(backend: tokenizers.Tokenizer, vocabulary: dict[int, str]) -> int:
    for token_id in sorted(vocabulary):
        if backend.decode([token_id]).isalnum():
            return token_id
    raise ConfigError("tokenizer.json: it has no token of letters")


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's printable stand-ins for bytes.

    A byte that Latin-1 prints stands for itself; the others take U+0100 and on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    for i, byte in enumerate(b for b in range(256) if b not in printable):
        alphabet[chr(0x100 + i)] = byte
    return alphabet


def _settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: must hold an object")
    return value


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """Named special tokens ("bos_token", ...) of tokenizer_config.json, as strings."""
    named = {}
    for key, value in settings.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            named[key] = text
    return named
