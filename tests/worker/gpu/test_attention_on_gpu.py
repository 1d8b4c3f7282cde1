"""Paged attention on a real device: its error at a 7B model's sizes, and its bits."""

from __future__ import annotations

import math

import pytest
import torch
from attention_case import LAYER, Case, check, make_case, make_geometry, random_row

from worker.kernels.attention import LayerRule, paged_attention
from worker.kernels.attention_filling import programs_per_tile
from worker.kernels.attention_inputs import num_parts
from worker.model.pool import KVCache, KVGeometry

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
MAX_LENGTH = 2048
PLAIN = LayerRule(scaling=128**-0.5)
FIELDS = ("rows", "first_tokens", "num_queries", "first_positions")
JOINED, SPLIT = 0, 10_000  # multiprocessors that never split, and that always do
CROWDED = 8  # that split two tiles among more programs than they are


def bfloat16(num_heads: int, num_kv_heads: int, head_dim: int) -> KVGeometry:
    """Two layers of bfloat16 in blocks of 16."""
    return make_geometry(num_heads, num_kv_heads, head_dim, dtype=torch.bfloat16)


@pytest.mark.parametrize("num_sms", [JOINED, SPLIT], ids=["joined", "split"])
@pytest.mark.parametrize(
    ("height", "rule"),
    [
        (2, PLAIN),
        (4, PLAIN),
        (8, PLAIN),
        (16, PLAIN),
        (4, LayerRule(scaling=128**-0.5, window=300)),
        (4, LayerRule(scaling=128**-0.5, softcap=30.0)),
    ],
    ids=str,
)
def test_error_at_7b_sizes(height: int, rule: LayerRule, num_sms: int) -> None:
    """In bfloat16, decode, verify and prefill rows are within rounding of float64."""
    geometry = bfloat16(28, 4, 128)
    lengths = (16, 64, 65, 255, 257, 640, 1999)
    short = [random_row(geometry, length, height, length, DEVICE) for length in lengths]
    short.append(random_row(geometry, 1, 1, 1, DEVICE))
    long = [random_row(geometry, 777, 300, 2, DEVICE), random_row(geometry, 40, 40, 3, DEVICE)]
    case = make_case(geometry, short, long, height=height)
    check(case, rule, num_sms=num_sms, tolerance=1e-2)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "dtype", "tolerance"),
    [
        (9, 3, 64, torch.bfloat16, 1e-2),
        (32, 2, 128, torch.bfloat16, 1e-2),
        (4, 2, 256, torch.bfloat16, 1e-2),
        (4, 2, 80, torch.float16, 2e-3),
        (4, 2, 64, torch.float32, 1e-5),
    ],
)
def test_error_of_other_shapes(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, tolerance: float
) -> None:
    """Other groups, head sizes and dtypes fit the device and are within their rounding."""
    geometry = make_geometry(num_heads, num_kv_heads, head_dim, block_size=32, dtype=dtype)
    short = [random_row(geometry, length, 2, length, DEVICE) for length in (65, 300, 1999)]
    long = [random_row(geometry, 333, 100, 2, DEVICE)]
    case = make_case(geometry, short, long)
    for num_sms in (JOINED, SPLIT):
        check(case, LayerRule(scaling=head_dim**-0.5), num_sms=num_sms, tolerance=tolerance)


@pytest.mark.parametrize(
    ("geometry", "window"),
    [(bfloat16(28, 4, 128), 0), (bfloat16(9, 3, 64), 300)],
    ids=["7b", "small"],
)
def test_bits(geometry: KVGeometry, window: int) -> None:
    """A token's output has the same bits alone and split, in a large batch, in verify and prefill.

    Contexts lie on both sides of the borders of tiles and parts.
    """
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    row = random_row(geometry, MAX_LENGTH, 1, 7, DEVICE)
    others = [random_row(geometry, 50 * i + 1, 1, i, DEVICE) for i in range(1, 12)]
    rule = LayerRule(scaling=geometry.head_dim**-0.5, window=window)
    parts = num_parts(MAX_LENGTH // 16, 16)

    def programs(capacity: int) -> int:
        return programs_per_tile(
            capacity=capacity,
            num_kv_heads=geometry.num_kv_heads,
            num_parts=parts,
            num_sms=num_sms,
        )

    assert programs(2) > 1
    assert programs(300) == 1

    def bits(case: Case, index: int, sms: int) -> torch.Tensor:
        return case.run(rule, num_sms=sms)[0][0, index]

    differ = []
    for length in (1, 64, 65, 127, 128, 129, 256, 257, 700, 1999):
        decode = row.cut(length, 1)
        alone = bits(make_case(geometry, [decode], capacity=2, max_length=MAX_LENGTH), 0, num_sms)
        assert alone.isfinite().all()
        batch = make_case(geometry, [decode, *others], capacity=300, max_length=MAX_LENGTH)
        # Four programs of each multiprocessor are as many as there are: they all run at once.
        full = make_case(geometry, [decode, *others], capacity=112, max_length=MAX_LENGTH)
        got = {f"batch, {sms}": bits(batch, 0, sms) for sms in (num_sms, 1000, SPLIT)}
        got["full"] = bits(full, 0, 28 * geometry.num_kv_heads)
        for height in (4, 8, 16):
            # The token is followed by one or two that it must not see.
            end = length + height // 4
            count = min(end, height)
            case = make_case(geometry, [row.cut(end, count)], height=height, max_length=MAX_LENGTH)
            for sms in (JOINED, CROWDED, SPLIT):
                got[f"height {height}, {sms}"] = bits(case, count - 1 - (end - length), sms)
        end = length + 21
        count = min(end, 75)
        chunk = make_case(geometry, [], [row.cut(end, count)], max_length=MAX_LENGTH)
        for sms in (JOINED, SPLIT):
            got[f"chunk, {sms}"] = bits(chunk, count - 1 - 21, sms)
        differ += [f"{length}: {name}" for name, out in got.items() if not torch.equal(out, alone)]
    assert not differ


def test_captured() -> None:
    """A captured graph, split or not, replays with other lengths, tables and queries.

    Also many times over, and with fewer tiles and parts than before: each launch leaves the
    counters of arrived programs at zero.
    """
    geometry = bfloat16(28, 4, 128)

    def case_of(lengths: tuple[int, ...]) -> Case:
        rows = [random_row(geometry, length, 2, length, DEVICE) for length in lengths]
        return make_case(geometry, rows, capacity=6, max_length=MAX_LENGTH)

    def state(case: Case) -> list[torch.Tensor]:
        tensors = [case.memory, case.query, case.key, case.value]
        tensors += [case.inputs.slots, case.inputs.tables]
        return tensors + [getattr(case.inputs.lists[0], name) for name in FIELDS]

    for num_sms in (JOINED, 132, SPLIT):
        captured = case_of((640, 31, 300))
        others = [case_of(lengths) for lengths in ((33, 290, 624), (1999, 640, 129), (2, 128, 7))]
        wanted = [other.run(PLAIN, num_sms=num_sms)[0] for other in others]
        captured.run(PLAIN, num_sms=num_sms)  # compiles
        memory = max((other.memory for other in others), key=torch.numel).clone()
        num_blocks = memory.numel() // geometry.block_bytes
        strips = KVCache(memory, geometry, num_blocks).strips[LAYER]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = paged_attention(
                captured.query,
                captured.key,
                captured.value,
                strips,
                captured.inputs,
                PLAIN,
                geometry=geometry,
                num_sms=num_sms,
            )
        for other, result in zip(others, wanted, strict=True):
            memory[: other.memory.numel()].copy_(other.memory)
            for to, source in zip(state(captured)[1:], state(other)[1:], strict=True):
                to.copy_(source)
            for _ in range(50):
                out.fill_(math.nan)
                graph.replay()
                assert torch.equal(out[0, :6], result[0, :6])
                assert not captured.inputs.counters.any()
