"""Bringing the draft back: fill the tail from the worker's image, then verify the tail's bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from memory_agent import failpoint
from memory_agent.layout import ArenaLayout
from memory_agent.remap import Aborted

PIECE_BYTES = 4 << 20


class ChecksumMismatch(Exception):
    """What lies in the tail is not the image that the worker announced."""


def load_image(
    arena: memoryview,
    layout: ArenaLayout,
    image: memoryview,
    sha256: bytes,
    aborted: Callable[[], bool],
) -> int:
    """Copy the image into the tail in pieces, then hash what the tail holds.

    The hash is taken over the arena, not the image, so that it covers the copy too.

    Returns:
        Bytes written.

    Raises:
        ChecksumMismatch: The tail must not be used as a draft.
        Aborted: `aborted()` became true; the tail is partly written.
    """
    target = arena[layout.image_offset : layout.image_offset + layout.image_bytes]
    digest = hashlib.sha256()
    try:
        for start in range(0, layout.image_bytes, PIECE_BYTES):
            if aborted():
                raise Aborted
            target[start : start + PIECE_BYTES] = image[start : start + PIECE_BYTES]
            if start == 0:
                failpoint.reached("agent.mid_load")
        for start in range(0, layout.image_bytes, PIECE_BYTES):
            if aborted():
                raise Aborted
            digest.update(target[start : start + PIECE_BYTES])
    finally:
        target.release()
    if digest.digest() != sha256:
        raise ChecksumMismatch(
            f"the image in the tail has SHA-256 {digest.hexdigest()[:16]}…, "
            f"announced was {sha256.hex()[:16]}…"
        )
    return layout.image_bytes
