"""Bringing the draft back: fill the tail from the worker's image, then verify the tail's bytes."""

from __future__ import annotations

from collections.abc import Callable

from memory_agent import failpoint
from memory_agent.checksum import piece_digest, pieces, verify
from memory_agent.layout import ArenaLayout
from memory_agent.remap import Aborted


def load_image(
    arena: memoryview,
    layout: ArenaLayout,
    image: memoryview,
    checksum: bytes,
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
    digests = []
    try:
        for index, span in enumerate(pieces(layout.image_bytes)):
            if aborted():
                raise Aborted
            target[span] = image[span]
            if index == 0:
                failpoint.reached("agent.mid_load")
        failpoint.reached("agent.before_verify")
        for span in pieces(layout.image_bytes):
            if aborted():
                raise Aborted
            digests.append(piece_digest(target[span]))
    finally:
        target.release()
    verify(digests, checksum)
    return layout.image_bytes
