"""What only hardware tells of early launches: a chain's bits are the same, and its gaps shorter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from worker.kernels import gemm
from worker.kernels.gemm import fixed_order_matmul, prepare_counters
from worker.kernels.gemm_tiles import Tile
from worker.kernels.launch import SWITCH, begin, launch_options, launches_early

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
WIDTH = 1536
TILE = Tile(16, 64, 64, 4, 5)
NUM_KERNELS = 200
REPLAYS = 50


@triton.jit
def _permute(  # type: ignore[no-untyped-def]
    source, out, calls, SPIN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Mixes what another program of the kernel before wrote; the odd ones write late."""
    begin(PDL)
    program, programs = tl.program_id(0), tl.num_programs(0)
    if program == programs - 1:
        tl.store(calls, tl.load(calls) + 1)
        return
    i = tl.arange(0, BLOCK)
    x = tl.load(source + (programs - 2 - program) * BLOCK + i)
    for _ in range(program % 2 * SPIN):
        x = x * 1664525 + 1013904223
    tl.store(out + program * BLOCK + i, x + program)


@triton.jit
def _squash(source, out, n, BLOCK: tl.constexpr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Keeps the values of a chain of products near 1."""
    begin(PDL)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(source + i, mask=i < n, other=0.0).to(tl.float32)
    tl.store(out + i, (2 * x / (1 + tl.abs(x))).to(out.dtype.element_ty), mask=i < n)


def squash(x: torch.Tensor) -> torch.Tensor:
    """One launch of `_squash`."""
    out = torch.empty_like(x)
    grid = (triton.cdiv(x.numel(), 256),)
    _squash[grid](x, out, x.numel(), BLOCK=256, num_warps=1, **launch_options(x.device))
    return out


@pytest.fixture
def switch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Turns early launches on or off."""

    def turn(on: bool) -> None:
        monkeypatch.setenv(SWITCH, "1" if on else "0")
        launches_early.cache_clear()
        assert launches_early(CUDA) is on

    if torch.cuda.get_device_capability(CUDA) < (9, 0):
        pytest.skip("early launches take compute capability 9.0")
    yield turn
    monkeypatch.undo()
    launches_early.cache_clear()


def captured(run: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph of `run`, which has run before, and the tensor that it returned."""
    stream = torch.cuda.Stream(CUDA)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = run()
    return graph, out


def permuted(num_programs: int, spin: int) -> torch.Tensor:
    """What a chain over two buffers leaves after each of many replays, and how often it ran."""
    block = 128
    generator = torch.Generator(CUDA).manual_seed(0)
    size = (2, num_programs * block)
    first = torch.randint(-(2**31), 2**31, size, generator=generator, device=CUDA)
    buffers, calls = first.to(torch.int32), torch.zeros(1, dtype=torch.int32, device=CUDA)
    options = launch_options(CUDA)
    assert options["PDL"] is launches_early(CUDA)

    def run() -> torch.Tensor:
        for turn in range(NUM_KERNELS):
            kernel = _permute[(num_programs + 1,)](
                buffers[turn % 2], buffers[1 - turn % 2], calls,
                SPIN=spin, BLOCK=block, num_warps=1, **options,
            )  # fmt: skip
            assert ("griddepcontrol.wait" in kernel.asm["ptx"]) is options["PDL"]
        return buffers

    graph, out = captured(run)
    seen = []
    for _ in range(REPLAYS):
        graph.replay()
        seen.append(torch.cat([out.flatten(), calls]))
    result = torch.stack(seen).cpu()
    assert int(calls) == NUM_KERNELS * (REPLAYS + 1)  # a capture runs nothing
    return result


@pytest.mark.parametrize(("num_programs", "spin"), [(1, 0), (3, 300), (40, 300), (3000, 30)])
def test_a_chain_over_two_buffers_leaves_the_same_integers(
    switch: Any, num_programs: int, spin: int
) -> None:
    """Each kernel reads what the last wrote, writes what it read, and counts without atomics."""
    switch(False)
    expected = permuted(num_programs, spin)
    switch(True)
    assert torch.equal(permuted(num_programs, spin), expected)


@pytest.mark.parametrize("join", ["reduce", "last", "serial"])
@pytest.mark.parametrize("num_rows", [1, 33])
def test_a_chain_of_products_has_the_same_bits(switch: Any, join: Any, num_rows: int) -> None:
    """Products in four splits, whose sums and counters pass from launch to launch."""
    generator = torch.Generator(CUDA).manual_seed(1)
    weights = torch.randn(3, 512, 512, generator=generator, device=CUDA).div_(16).bfloat16()
    x = torch.randn(num_rows, 512, generator=generator, device=CUDA).bfloat16()
    tile = Tile(16, 64, 64, 4, 3, join)
    prepare_counters(CUDA)

    def run() -> torch.Tensor:
        y = x
        for turn in range(NUM_KERNELS // 2):
            y = squash(fixed_order_matmul(y, weights[turn % 3], tile, 4))
            if turn % 10 == 9:
                y = y + 0  # a kernel that is launched as usual
        return y

    def results() -> torch.Tensor:
        graph, out = captured(run)
        seen = []
        for _ in range(REPLAYS):
            out.fill_(float("nan"))
            graph.replay()
            seen.append(out.clone())
        return torch.stack(seen).view(torch.int16).cpu()

    switch(False)
    expected = results()
    assert torch.equal(expected, expected[:1].expand_as(expected))
    switch(True)
    assert torch.equal(results(), expected)


def test_time_of_a_chain(switch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prints microseconds of a kernel in a chain of small products, their weights not in L2."""
    weights = torch.randn(40, WIDTH, WIDTH, device=CUDA).div_(28).bfloat16()
    x = torch.randn(1, WIDTH, device=CUDA).bfloat16()

    def run() -> torch.Tensor:
        y = x
        for turn in range(NUM_KERNELS // 2):
            y = squash(fixed_order_matmul(y, weights[turn % 40], TILE, 1))
        return y

    def us() -> float:
        graph, _ = captured(run)
        times = []
        for _ in range(20):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / NUM_KERNELS)
        return sorted(times)[len(times) // 2]

    found = {}
    for name, on, ahead in (
        ("one after another", False, 0),
        ("early", True, 0),
        *((f"early, {lines} lines ahead", True, lines) for lines in (2, 4, 8, 16)),
    ):
        switch(on)
        monkeypatch.setattr(gemm, "_AHEAD", ahead)
        found[name] = us()
        print(f"{name}: {found[name]:.2f} us a kernel")
    assert found["early"] < found["one after another"]
