"""The kernel that moves blocks, interpreted or on a GPU, against its torch reference."""

from __future__ import annotations

import pytest
import torch

from memory_agent.remap_kernel import (
    CHUNK_WORDS,
    check_block_bytes,
    move_blocks,
    reference_move_blocks,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WHOLE = CHUNK_WORDS * 8


def case(
    num_blocks: int, num_moves: int, block_bytes: int, seed: int, padding: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random bytes, and moves from the upper half to the lower in no order."""
    generator = torch.Generator().manual_seed(seed)
    size = num_blocks * block_bytes + padding
    arena = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    half = num_blocks // 2
    sources = half + torch.randperm(num_blocks - half, generator=generator)[:num_moves]
    destinations = torch.randperm(half, generator=generator)[:num_moves]
    moves = torch.stack([sources, destinations], 1).to(torch.int32)
    return arena.to(DEVICE), moves.to(DEVICE)


@pytest.mark.parametrize(
    ("num_blocks", "num_moves", "block_bytes"),
    [
        (2, 1, 16),
        (9, 3, 48),
        (8, 4, 1008),
        (40, 20, 2048),
        (6, 3, WHOLE),
        (6, 2, WHOLE + 16),
        (4, 2, 2 * WHOLE - 16),
        (4, 2, 917_504),
    ],
)
def test_moves_as_the_reference_does(num_blocks: int, num_moves: int, block_bytes: int) -> None:
    """Every byte of the arena is what the reference makes it, those of no move included."""
    arena, moves = case(num_blocks, num_moves, block_bytes, seed=num_blocks, padding=5)
    expected = arena.clone()
    reference_move_blocks(expected, moves, block_bytes)
    before = arena.clone()
    move_blocks(arena, moves, block_bytes)
    assert torch.equal(arena, expected)
    assert not torch.equal(arena, before)
    sources = moves[:, 0].long()
    blocks = before[: num_blocks * block_bytes].view(-1, block_bytes)
    assert torch.equal(arena[: num_blocks * block_bytes].view(-1, block_bytes)[sources],
                       blocks[sources])  # fmt: skip


def test_nan_moves_as_bytes() -> None:
    """What a block holds is not looked at: NaNs of any kind arrive bit by bit."""
    arena, moves = case(4, 2, 512, seed=1)
    floats = arena.view(torch.float32)
    floats.fill_(float("nan"))
    floats.view(torch.int32)[::3] = 0x7FA00001  # a signalling one
    expected = arena.clone()
    reference_move_blocks(expected, moves, 512)
    move_blocks(arena, moves, 512)
    assert torch.equal(arena, expected)


@pytest.mark.parametrize(("chunk_words", "num_warps"), [(64, 1), (512, 4), (16_384, 8)])
def test_any_cut_gives_the_same(chunk_words: int, num_warps: int) -> None:
    """Chunk and warps are a matter of speed alone."""
    arena, moves = case(6, 3, 8 * 600, seed=3)
    expected = arena.clone()
    reference_move_blocks(expected, moves, 8 * 600)
    move_blocks(arena, moves, 8 * 600, chunk_words=chunk_words, num_warps=num_warps)
    assert torch.equal(arena, expected)


def test_no_moves_launch_nothing() -> None:
    """An empty list is done already."""
    arena, moves = case(4, 0, 64, seed=4)
    before = arena.clone()
    move_blocks(arena, moves, 64)
    assert torch.equal(arena, before)


@pytest.mark.parametrize("block_bytes", [0, -16, 8, 24, 1000])
def test_blocks_that_accesses_do_not_cover_are_refused(block_bytes: int) -> None:
    """A block is a whole number of 16-byte accesses, or the sentence says so."""
    with pytest.raises(ValueError, match="no multiple of 16"):
        check_block_bytes(block_bytes)


@pytest.mark.gpu
def test_offsets_beyond_two_gigabytes() -> None:
    """Blocks far up in a large arena arrive, so addresses are counted in 64 bits."""
    block_bytes, num_blocks = 917_504, 7_000
    arena = torch.zeros(num_blocks * block_bytes, dtype=torch.uint8, device="cuda")
    blocks = arena.view(-1, block_bytes)
    sources = torch.arange(6_000, 6_600, dtype=torch.int32)
    blocks[6_000:6_600] = torch.randint(
        0, 256, (600, block_bytes), dtype=torch.uint8, device="cuda"
    )
    moves = torch.stack([sources, sources - 2_900], 1).cuda()
    move_blocks(arena, moves, block_bytes)
    assert torch.equal(blocks[3_100:3_700], blocks[6_000:6_600])
    assert blocks[:3_100].count_nonzero() == 0
    assert blocks[3_700:6_000].count_nonzero() == 0
