"""The checksum of the draft's image: SHA-256 over the SHA-256s of its pieces.

One SHA-256 takes a core a second or two for a gigabyte; of pieces, several cores share the work.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

PIECE_BYTES = 4 << 20


class ChecksumMismatch(Exception):
    """What lies in the tail is not the image that the worker announced."""


def pieces(num_bytes: int) -> list[slice]:
    """Where each piece of an image lies; the last may be shorter."""
    return [
        slice(start, min(start + PIECE_BYTES, num_bytes))
        for start in range(0, num_bytes, PIECE_BYTES)
    ]


def piece_digest(piece: memoryview) -> bytes:
    """SHA-256 of one piece; other threads run meanwhile."""
    return hashlib.sha256(piece).digest()


def joined(digests: Iterable[bytes]) -> bytes:
    """The checksum of an image, from its pieces' digests in order."""
    return hashlib.sha256(b"".join(digests)).digest()


def image_digest(image: memoryview) -> bytes:
    """The checksum of a whole image."""
    return joined(piece_digest(image[span]) for span in pieces(len(image)))


def verify(digests: Iterable[bytes], announced: bytes) -> None:
    """Compare.

    Raises:
        ChecksumMismatch: The tail must not be used as a draft.
    """
    found = joined(digests)
    if found != announced:
        raise ChecksumMismatch(
            f"the image in the tail has SHA-256 {found.hex()[:16]}…, "
            f"announced was {announced.hex()[:16]}…"
        )
