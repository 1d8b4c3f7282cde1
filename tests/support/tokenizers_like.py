"""Tokenizers of the families that models use, small enough to make in a test."""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

WORDS = ["a", "b", "ab", "▁a", "▁the", "▁", "é", "日本", "▁<", "c▁d", "0", "▁▁", "."]


def byte_fallback() -> tokenizers.Tokenizer:
    """Llama 2's kind: pieces with ▁ for a space, and 256 byte tokens for the rest."""
    tokenizer = _pieces()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def metaspace() -> tokenizers.Tokenizer:
    """T5's kind: pieces with ▁ for a space, the first of which is dropped."""
    tokenizer = _pieces()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def word_piece() -> tokenizers.Tokenizer:
    """BERT's kind: words, and ## before what continues one."""
    words = ["[UNK]", "hello", "world", "##ing", "##s", "it", "'", "s", ".", ",", "n", "##t", "日"]
    vocab = {word: i for i, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([AddedToken("[SEP]", special=True)])
    return tokenizer


def _pieces() -> tokenizers.Tokenizer:
    vocab = {"<unk>": 0}
    for word in [*(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]:
        vocab[word] = len(vocab)
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    return tokenizer
