"""A worker's own copies of KV blocks: whole, exact, and nothing beside them."""

from __future__ import annotations

import random

import pytest
import torch

from worker.model.block_copy import copy_blocks, warm_copy

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("block_bytes", [16, 4112, 1 << 16])
def test_blocks_arrive_whole_and_others_stay(block_bytes: int) -> None:
    """Any number of moves, with bytes behind the last whole block."""
    generator = torch.Generator().manual_seed(block_bytes)
    before = torch.randint(0, 256, (20 * block_bytes + 5,), generator=generator, dtype=torch.uint8)
    for num_moves in (0, 1, 7, 10):
        ids = random.Random(num_moves).sample(range(20), 2 * num_moves)
        moves = dict(zip(ids[:num_moves], ids[num_moves:], strict=True))
        memory = before.to(DEVICE)
        copy_blocks(memory, block_bytes, moves)
        expected = before.clone()
        for source, destination in moves.items():
            block = before[source * block_bytes : (source + 1) * block_bytes]
            expected[destination * block_bytes : (destination + 1) * block_bytes] = block
        assert torch.equal(memory.cpu(), expected)


def test_warming_needs_two_blocks() -> None:
    """A pool too small to move anything in is left alone."""
    memory = torch.arange(48, dtype=torch.uint8, device=DEVICE)
    warm_copy(memory, 32)
    assert torch.equal(memory.cpu(), torch.arange(48, dtype=torch.uint8))
    warm_copy(memory, 16)
    assert torch.equal(memory[16:32], memory[:16])
