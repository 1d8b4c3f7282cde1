"""How a matrix product may be cut for a GPU: tiles, none of which changes a bit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

Join = Literal["reduce", "last", "serial"]

_MAX_SHARED_BYTES = 227 * 1024  # of one program on compute capability 9.0
_JOINING_VALUES = 64  # accumulators of a thread above which a second set would spill


@dataclass(frozen=True)
class Tile:
    """How a product is cut and run.

    `join` says who adds the sums of the splits: a second kernel, the program of a tile that
    comes last, or each program by walking all splits itself. One split needs none.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    join: Join = "reduce"

    @property
    def name(self) -> str:
        """For people."""
        sizes = f"{self.block_m}x{self.block_n}x{self.block_k}"
        return f"{sizes} {self.num_warps} warps {self.num_stages} stages {self.join}"

    def shared_bytes(self, dtype: torch.dtype) -> int:
        """Most shared memory that the stages take."""
        return self.num_stages * (self.block_m + self.block_n) * self.block_k * dtype.itemsize

    def can_join(self) -> bool:
        """True where a program's registers hold a second sum."""
        return self.block_m * self.block_n <= _JOINING_VALUES * 32 * self.num_warps


# By the most rows that they are for; the first of each is what runs unmeasured.
_HALF = (
    (
        16,
        (
            Tile(16, 64, 64, 4, 3),
            Tile(16, 64, 64, 4, 5),
            Tile(16, 32, 128, 4, 5),
            Tile(16, 64, 128, 4, 5),
            Tile(16, 128, 64, 4, 4),
            Tile(16, 16, 128, 4, 5),
        ),
    ),
    (
        32,
        (
            Tile(32, 64, 64, 4, 3),
            Tile(32, 64, 64, 4, 5),
            Tile(32, 32, 128, 4, 4),
            Tile(32, 64, 128, 4, 4),
            Tile(32, 128, 64, 4, 4),
        ),
    ),
    (
        64,
        (
            Tile(64, 64, 64, 4, 4),
            Tile(64, 32, 128, 4, 4),
            Tile(64, 64, 128, 4, 4),
            Tile(64, 128, 64, 4, 4),
            Tile(64, 128, 128, 4, 3),
        ),
    ),
    (
        128,
        (
            Tile(128, 64, 64, 4, 4),
            Tile(64, 64, 128, 4, 4),
            Tile(64, 128, 64, 4, 4),
            Tile(128, 64, 128, 4, 3),
            Tile(128, 128, 64, 8, 4),
            Tile(128, 128, 128, 8, 3),
        ),
    ),
)
_HALF_LARGE = (
    Tile(128, 128, 64, 8, 4),
    Tile(128, 64, 64, 4, 4),
    Tile(64, 128, 64, 4, 4),
    Tile(128, 64, 128, 4, 3),
    Tile(128, 128, 128, 8, 3),
    Tile(128, 256, 64, 8, 3),
    Tile(64, 256, 64, 4, 4),
)
# Float32 is multiplied without tensor cores, which would round its inputs.
_SINGLE = ((16, (Tile(16, 64, 64, 4, 3), Tile(16, 32, 64, 4, 3))), (32, (Tile(32, 64, 32, 4, 3),)))
_SINGLE_LARGE = (Tile(64, 64, 32, 8, 3),)


def candidates(num_rows: int, splits: int, dtype: torch.dtype) -> tuple[Tile, ...]:
    """Tiles worth timing for a product of so many rows.

    The first joins by a second kernel: it is what runs where nothing was measured.
    """
    single = dtype is torch.float32
    classes, large = (_SINGLE, _SINGLE_LARGE) if single else (_HALF, _HALF_LARGE)
    tiles = next((tiles for most, tiles in classes if num_rows <= most), large)
    joins = [join for join, least, most in _JOINS if splits > 1 and least < num_rows <= most]
    joined = [replace(tile, join=join) for join in joins for tile in tiles if tile.can_join()]
    fitting = (tile for tile in (*tiles, *joined) if tile.shared_bytes(dtype) <= _MAX_SHARED_BYTES)
    return tuple(fitting)


# Few rows: a last comer saves a launch. Many: walking the splits saves their sums' way to
# memory and back.
_JOINS: tuple[tuple[Join, int, float], ...] = (("last", 0, 256), ("serial", 64, float("inf")))
