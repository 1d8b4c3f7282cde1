"""The kernel that moves KV blocks within the arena: all moves of a grant in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LANE_BYTES = 16  # of one access: blocks are whole numbers of it
_WORDS = LANE_BYTES // 8  # of an access, which the kernel counts in int64
CHUNK_WORDS = 8192  # 64 KiB that one program moves: with 16 warps, 8 accesses a thread in flight
NUM_WARPS = 16


@triton.jit
def _move_kernel(  # type: ignore[no-untyped-def]
    arena,
    moves,
    BLOCK_WORDS: tl.constexpr,
    CHUNK_WORDS: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
):
    # One program: one chunk of one move. Neighbouring programs walk along a block, so a few
    # moves fill a device as well as many. What is moved is not read again: it need not stay in L2.
    program = tl.program_id(0)
    move, chunk = program // NUM_CHUNKS, program % NUM_CHUNKS
    words = chunk * CHUNK_WORDS + tl.arange(0, CHUNK_WORDS)
    live = words < BLOCK_WORDS
    source = tl.load(moves + 2 * move).to(tl.int64) * BLOCK_WORDS
    destination = tl.load(moves + 2 * move + 1).to(tl.int64) * BLOCK_WORDS
    values = tl.load(arena + source + words, mask=live, eviction_policy="evict_first")
    tl.store(arena + destination + words, values, mask=live, eviction_policy="evict_first")


def check_block_bytes(block_bytes: int) -> None:
    """Refuse blocks that accesses of 16 bytes do not cover exactly.

    Raises:
        ValueError: They do not.
    """
    if block_bytes <= 0 or block_bytes % LANE_BYTES:
        raise ValueError(f"blocks of {block_bytes} bytes are no multiple of {LANE_BYTES}")


def move_blocks(
    arena: torch.Tensor,
    moves: torch.Tensor,
    block_bytes: int,
    *,
    chunk_words: int = CHUNK_WORDS,
    num_warps: int = NUM_WARPS,
) -> None:
    """Copy whole blocks; launches on the current stream, and returns at once.

    Args:
        arena: uint8 [at least one block for each id], on a boundary of 16 bytes.
        moves: int32 [n, 2], source and destination of each; destinations differ from each other
            and from all sources, so that the order of moves does not matter.
        block_bytes: Of one block, a multiple of 16.
        chunk_words: Words of 8 bytes that a program moves, a power of two.
        num_warps: Of a program, at most.

    Raises:
        ValueError: Blocks of that size cannot be moved.
    """
    check_block_bytes(block_bytes)
    assert arena.dtype == torch.uint8
    assert arena.data_ptr() % LANE_BYTES == 0
    assert moves.dtype == torch.int32
    assert moves.is_contiguous()
    if len(moves) == 0:
        return
    num_words = block_bytes // 8
    chunk_words = min(chunk_words, max(_WORDS, triton.next_power_of_2(num_words)))
    num_chunks = triton.cdiv(num_words, chunk_words)
    whole = arena[: len(arena) // 8 * 8].view(torch.int64)
    _move_kernel[(len(moves) * num_chunks,)](
        whole,
        moves,
        BLOCK_WORDS=num_words,
        CHUNK_WORDS=chunk_words,
        NUM_CHUNKS=num_chunks,
        num_warps=max(1, min(num_warps, chunk_words // (32 * _WORDS))),  # none with less to do
    )


def reference_move_blocks(arena: torch.Tensor, moves: torch.Tensor, block_bytes: int) -> None:
    """`move_blocks` in torch."""
    blocks = arena[: len(arena) // block_bytes * block_bytes].view(-1, block_bytes)
    blocks[moves[:, 1].long()] = blocks[moves[:, 0].long()]
