"""Filling the tail from the image, and the checksum over what the tail holds."""

from __future__ import annotations

import hashlib
import random

import pytest

from memory_agent.checksum import PIECE_BYTES, ChecksumMismatch, image_digest
from memory_agent.layout import ArenaLayout
from memory_agent.reload import load_image
from memory_agent.remap import Aborted

IMAGE = random.Random(3).randbytes(PIECE_BYTES + 12_345)
LAYOUT = ArenaLayout(
    block_bytes=65_536, draft_block_bytes=1000, image_bytes=len(IMAGE), num_base_blocks=4
)


def load(arena: bytearray, sha256: bytes, num_pieces: int = 100) -> int:
    """Load `IMAGE`, called off after `num_pieces` pieces."""
    pieces = iter(range(num_pieces))
    with memoryview(arena) as view, memoryview(IMAGE) as image:
        return load_image(view, LAYOUT, image, sha256, lambda: next(pieces, None) is None)


def test_only_the_image_region_is_written() -> None:
    """The image lies at its offset, and every byte around it is as before."""
    arena = bytearray(b"\x5a" * LAYOUT.num_bytes)
    assert load(arena, image_digest(memoryview(IMAGE))) == len(IMAGE)
    start, end = LAYOUT.image_offset, LAYOUT.image_offset + len(IMAGE)
    assert arena[start:end] == IMAGE
    assert set(arena[:start]) == set(arena[end:]) == {0x5A}


def test_another_image_is_not_verified() -> None:
    """Bytes that do not have the announced checksum are refused."""
    sha256 = image_digest(memoryview(IMAGE[:-1] + bytes([IMAGE[-1] ^ 1])))
    with pytest.raises(ChecksumMismatch, match="SHA-256"):
        load(bytearray(LAYOUT.num_bytes), sha256)


@pytest.mark.parametrize("num_pieces", [0, 1, 3])
def test_aborts_between_pieces(num_pieces: int) -> None:
    """Called off while copying or while hashing, a load does not count as verified."""
    with pytest.raises(Aborted):
        load(bytearray(LAYOUT.num_bytes), image_digest(memoryview(IMAGE)), num_pieces)


def test_the_checksum_is_of_the_pieces() -> None:
    """It is the SHA-256 of the joined SHA-256s of pieces of 4 MiB, as the protocol says."""
    parts = [hashlib.sha256(IMAGE[at : at + 4 * 2**20]).digest() for at in (0, 4 * 2**20)]
    assert image_digest(memoryview(IMAGE)) == hashlib.sha256(b"".join(parts)).digest()
