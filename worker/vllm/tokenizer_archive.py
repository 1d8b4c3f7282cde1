"""A model's tokenizer as one archive, for a gateway that reads prompts and writes text itself."""

from __future__ import annotations

import hashlib
import io
import zipfile
from dataclasses import dataclass
from pathlib import Path

NAMES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
_THEN = (1980, 1, 1, 0, 0, 0)  # the same bytes on every worker, whenever it fetched the files


@dataclass(frozen=True, kw_only=True)
class TokenizerArchive:
    """The bytes of a zip archive, and their SHA-256 in hexadecimal."""

    data: bytes
    sha256: str

    @classmethod
    def of(cls, folder: Path) -> TokenizerArchive:
        """Pack what a tokenizer is read from: never the weights, nor anything else."""
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in (folder / name for name in NAMES):
                if path.is_file():
                    entry = zipfile.ZipInfo(path.name, _THEN)
                    entry.compress_type = zipfile.ZIP_DEFLATED
                    archive.writestr(entry, path.read_bytes())
        data = buffer.getvalue()
        return cls(data=data, sha256=hashlib.sha256(data).hexdigest())
