"""How attention's programs are cut and how many share a tile; none of it changes a bit."""

from __future__ import annotations

from typing import Literal, NamedTuple

import triton

from worker.kernels.attention_inputs import LONG_HEIGHT, PART, TILE

_QUERY_BYTES = 128 * 128 * 2  # of one program, so that its sums fit its registers

_SHARED_BYTES = 228 * 1024  # of a multiprocessor
_SHARED_RESERVED = 1024  # of each program
_SCRATCH_BYTES = 2048  # of a program's reductions
_REGISTERS = 1 << 16  # of a multiprocessor


class Filling(NamedTuple):
    """How a device is filled with programs, chosen for an H200."""

    resident: tuple[tuple[int, int], ...] = ((16, 3), (32, 2))  # of a multiprocessor, by rows
    full: tuple[int, int] = (3, 4)  # so many instead, where all programs then run at once
    most_rows: int = 128  # of one program
    few_warps: int = 16  # most rows that take 4 warps rather than 8
    sparse: float = 0.25  # tiles and KV heads for each multiprocessor, below which all take 8
    most_stages: int = 4
    aim: float = 1.0  # programs that splitting makes, of those that the device holds


FILLING = Filling()


class Shape(NamedTuple):
    """How a list's programs are cut."""

    heads: int  # of a KV head's group in one program, a power of two
    rows: int  # of a program's products, height * heads or 16
    resident: int  # programs that a multiprocessor holds
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, int]:
        """What the kernel is launched with."""
        options = {"num_warps": self.warps, "num_stages": self.stages}
        if self.resident > 1:
            registers = _REGISTERS // (self.resident * self.warps * 32)
            options["maxnreg"] = min(255, registers // 8 * 8)
        return options


Load = Literal["sparse", "usual", "full"]


def load_of(*, capacity: int, columns: int, num_sms: int, height: int, shape: Shape) -> Load:
    """How a list loads the device: a rule of the bucket, never of its data.

    A sparse list is so short that a program's own time counts. One that is full needs a second
    turn at the usual programs of a multiprocessor, and none with one more there.

    Args:
        capacity: Of the list.
        columns: Programs of each tile.
        num_sms: Multiprocessors of the device.
        height: Of the list's tiles.
        shape: That lists of the usual load are cut in.
    """
    if capacity * columns <= FILLING.sparse * num_sms:
        return "sparse"
    programs = _num_tiles(capacity, height) * columns
    usual, more = FILLING.full
    is_full = shape.resident == usual and usual * num_sms < programs <= more * num_sms
    return "full" if is_full else "usual"


def _num_tiles(capacity: int, height: int) -> int:
    """Tiles of a list. Those of 4 and 8 are taken to be full.

    Their lists have room for one a token, and programs of no tile end at once.
    """
    return -(-capacity // height) if 2 < height < LONG_HEIGHT else capacity


def programs_per_tile(
    *,
    capacity: int,
    num_kv_heads: int,
    num_parts: int,
    num_sms: int,
    height: int = 2,
    resident: int = 3,
) -> int:
    """Programs that share the parts of one tile and KV head; 1 does not split.

    A rule of the bucket, never of its data: lists are split while the device still holds all
    programs at once.

    Args:
        capacity: Of the list.
        num_kv_heads: Of the model.
        num_parts: Of the longest context.
        num_sms: Multiprocessors of the device.
        height: Of the list's tiles.
        resident: Programs that a multiprocessor holds.
    """
    held = int(FILLING.aim * resident * num_sms)
    return max(1, min(num_parts, held // (_num_tiles(capacity, height) * num_kv_heads)))


def shape_of(
    *, height: int, group: int, head_dim: int, itemsize: int, load: Load = "usual"
) -> Shape:
    """Choose a list's cut: few enough rows, and tiles ahead as shared memory holds them.

    Args:
        height: Of the list's tiles.
        group: Heads of a KV head.
        head_dim: Of the model.
        itemsize: Bytes of a value; products of 4-byte values take no tensor cores.
        load: Of the list on the device.
    """
    dim_pad: int = triton.next_power_of_2(max(16, head_dim))
    most_rows = min(FILLING.most_rows, _QUERY_BYTES // (dim_pad * itemsize))
    if itemsize == 4:
        most_rows = 16
    heads = min(triton.next_power_of_2(group), max(1, most_rows // height))
    rows = max(16, triton.next_power_of_2(height) * heads)
    tile_bytes = 2 * TILE * dim_pad * itemsize
    own_bytes = rows * (dim_pad + TILE) * itemsize + _SCRATCH_BYTES + _SHARED_RESERVED

    def buffers(programs: int) -> int:
        return int((_SHARED_BYTES // programs - own_bytes) // tile_bytes)

    resident = 1 if itemsize == 4 else dict(FILLING.resident).get(rows, 1)
    if load == "full":
        resident = FILLING.full[1]
    if load == "sparse":
        resident = min(resident, 2)
    while resident > 1 and buffers(resident) < (1 if load == "full" else 2):
        resident -= 1
    warps = 8 if load == "sparse" or rows > FILLING.few_warps or dim_pad >= 256 else 4
    # Products of 64 rows or more read shared memory while the next tile arrives, in one more.
    stages = buffers(resident) + (rows < 64 and itemsize < 4)
    most = (
        PART // TILE + 1 if load == "sparse" else FILLING.most_stages
    )  # a part's tiles, all on their way at once
    return Shape(heads, rows, resident, warps, max(1, min(most, stages)))
