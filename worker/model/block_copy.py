"""Copies of KV blocks within the pool by its owner, where asking the agent would take longer."""

from __future__ import annotations

import torch


def copy_blocks(memory: torch.Tensor, block_bytes: int, moves: dict[int, int]) -> None:
    """Copy whole blocks, sources to destinations; returns once they are there.

    Args:
        memory: uint8, the arena; blocks lie one after another from its start.
        block_bytes: Of a block, a multiple of 16.
        moves: No destination is a source.
    """
    assert not moves.keys() & set(moves.values())
    if memory.device.type == "cpu":
        blocks = memory[: len(memory) // block_bytes * block_bytes].view(-1, block_bytes)
        blocks[list(moves.values())] = blocks[list(moves)]
        return
    from memory_agent.remap_kernel import move_blocks  # only here: a CPU's worker has no triton

    move_blocks(
        memory, torch.tensor(list(moves.items()), dtype=torch.int32).to(memory.device), block_bytes
    )
    torch.cuda.synchronize(memory.device)


def warm_copy(memory: torch.Tensor, block_bytes: int) -> None:
    """Compile what `copy_blocks` runs, on a pool that holds nothing yet: no step waits for it."""
    if len(memory) >= 2 * block_bytes:
        copy_blocks(memory, block_bytes, {0: 1})
