"""An agent's work on a GPU's arena, on CPU tensors: one launch for moves, a verified reload."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from memory_agent.checksum import PIECE_BYTES, ChecksumMismatch, image_digest
from memory_agent.device_pool import DeviceWork
from memory_agent.layout import ArenaLayout
from memory_agent.remap import Aborted, MoveRefused

IMAGE = random.Random(3).randbytes(3 * PIECE_BYTES + 12_344)
LAYOUT = ArenaLayout(
    block_bytes=1 << 20, draft_block_bytes=1024, image_bytes=len(IMAGE), num_base_blocks=6
)
CHECKSUM = image_digest(memoryview(IMAGE))
BASE, TOTAL = LAYOUT.num_base_blocks, LAYOUT.num_base_blocks + LAYOUT.num_extra_blocks


def never() -> bool:
    """Nobody calls the work off."""
    return False


def at_call(number: int) -> Callable[[], bool]:
    """Called off the `number`-th time that it is asked."""
    calls = iter(range(number))
    return lambda: next(calls, None) is None


@pytest.fixture
def arena() -> torch.Tensor:
    """An arena of which no two blocks are equal."""
    blocks = torch.arange(TOTAL, dtype=torch.uint8)[:, None]
    return blocks.expand(TOTAL, LAYOUT.block_bytes).reshape(-1).clone()


@pytest.fixture
def work(arena: torch.Tensor) -> DeviceWork:
    """Work on it, with an image to load."""
    image = torch.frombuffer(bytearray(IMAGE), dtype=torch.uint8)
    return DeviceWork(LAYOUT, arena, image, reload_share=0.5)


def test_moves_of_a_grant(arena: torch.Tensor, work: DeviceWork) -> None:
    """Destinations hold their sources' bytes, everything else is as before."""
    assert work.copy([BASE + 2, BASE], [4, 1], never) == 2 * LAYOUT.block_bytes
    blocks = arena.view(TOTAL, -1)
    expected = list(range(TOTAL))
    expected[4], expected[1] = BASE + 2, BASE
    assert blocks[:, 0].tolist() == blocks[:, -1].tolist() == expected
    assert work.copy([], [], never) == 0


def test_refused_and_aborted_moves_write_nothing(arena: torch.Tensor, work: DeviceWork) -> None:
    """What leads outside the grant's borders, or is called off, changes no byte."""
    before = arena.clone()
    for sources, destinations in [([0], [1]), ([BASE, BASE], [0, 1]), ([TOTAL], [0])]:
        with pytest.raises(MoveRefused):
            work.copy(sources, destinations, never)
    with pytest.raises(Aborted):
        work.copy([BASE], [0], at_call(0))
    assert torch.equal(arena, before)


def test_a_reload_fills_its_place_alone(arena: torch.Tensor, work: DeviceWork) -> None:
    """The image lies in the tail, every byte around it is as before, and it may be done again."""
    before = arena.clone()
    assert work.load(CHECKSUM, never) == len(IMAGE)
    start, end = LAYOUT.image_offset, LAYOUT.image_offset + len(IMAGE)
    assert arena[start:end].numpy().tobytes() == IMAGE
    assert torch.equal(arena[:start], before[:start])
    assert torch.equal(arena[end:], before[end:])
    assert work.load(CHECKSUM, never) == len(IMAGE)


@pytest.mark.parametrize("at", [0, PIECE_BYTES - 1, PIECE_BYTES, len(IMAGE) - 1])
def test_a_byte_that_differs_is_noticed(arena: torch.Tensor, work: DeviceWork, at: int) -> None:
    """Whatever the image or the copy got wrong, the tail is not called a draft."""
    work._image[at] ^= 0x10
    with pytest.raises(ChecksumMismatch, match="SHA-256"):
        work.load(CHECKSUM, never)
    work._image[at] ^= 0x10
    assert work.load(CHECKSUM, never) == len(IMAGE)


def test_what_is_hashed_is_read_back(
    arena: torch.Tensor, work: DeviceWork, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte of the tail that changes after it was written is noticed, too."""
    from memory_agent import failpoint

    def disturb(name: str) -> None:
        if name == "agent.before_verify":
            arena[LAYOUT.image_offset + 77] ^= 1

    monkeypatch.setattr(failpoint, "reached", disturb)
    with pytest.raises(ChecksumMismatch):
        work.load(CHECKSUM, never)


@pytest.mark.parametrize("number", [0, 2, 5, 7])
def test_a_reload_is_called_off_between_pieces(work: DeviceWork, number: int) -> None:
    """While filling as well as while verifying."""
    with pytest.raises(Aborted):
        work.load(CHECKSUM, at_call(number))


def test_blocks_of_odd_sizes_are_refused() -> None:
    """At once, before any grant."""
    layout = ArenaLayout(block_bytes=1000, draft_block_bytes=8, image_bytes=16, num_base_blocks=2)
    arena, image = torch.zeros(layout.num_bytes, dtype=torch.uint8), torch.zeros(16).byte()
    with pytest.raises(ValueError, match="1000 bytes"):
        DeviceWork(layout, arena, image, reload_share=1.0)
