"""What only hardware tells of sampling: integers, logarithms, bits, graphs and time at 152,064."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
import torch
from chi_square import p_value
from sample_calls import (
    GRID,
    POISON,
    bits_and_noise,
    draw,
    gumbel_and_log,
    inputs_of,
    params,
    reference_bits,
)

from worker.kernels.sampling import SampleInputs, SampleScratch, reference_sample, sample_rows
from worker.messages import SamplingParams
from worker.sampling import noise, sampler

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
VOCAB_SIZE = 152_064
CLOSE = 2e-5  # of scores; the device's exp, log and sums are not the CPU's
SHARE = 4e-6  # relative, of top_p and min_p, for the same reason
SEARCHED = {"temperature": 0.8, "top_k": 50, "top_p": 0.95}


def text_logits(num_rows: int, *, seed: int) -> torch.Tensor:
    """Bfloat16 logits of a sharp, a usual or a flat row in turn, many of them equal."""
    generator = torch.Generator(CUDA).manual_seed(seed)
    logits = torch.randn(num_rows, VOCAB_SIZE, generator=generator, device=CUDA)
    logits *= torch.tensor([2.5, 1.5, 0.2], device=CUDA).repeat(num_rows)[:num_rows, None]
    logits[::3, 1000:1010] += 12.0
    return logits.to(torch.bfloat16)


def is_near_tie(logits: np.ndarray, p: SamplingParams, position: int, token_id: int) -> bool:
    """Whether rounding explains an id: the best but for CLOSE, cuts moved by up to SHARE."""
    z = (logits - logits.max()) * np.float32(1 / p.temperature)
    scores = z + noise.row(p.seed, position, len(z))
    for factor in (1, 1 - SHARE, 1 + SHARE):
        top_p = min(p.top_p * factor, 1.0) if p.top_p < 1 else p.top_p
        moved = msgspec.structs.replace(p, top_p=top_p, min_p=p.min_p * factor)
        kept = sampler._kept(z, moved)
        kept = np.arange(len(z)) if kept is None else kept
        if token_id in kept and scores[token_id] >= scores[kept].max() - CLOSE:
            return True
    return False


@pytest.mark.parametrize(
    ("seed", "position"),
    [(0, 0), (1, 2**31 - 1), (2**64 - 1, 8191), (-3, 12), (2**63, 77), (0x9E3779B97F4A7C15, 1)],
)
def test_integers_are_the_same(seed: int, position: int) -> None:
    """Every token's hash bits equal the CPU's; its noise is within 1e-6."""
    tokens = np.arange(2**18)
    bits, values = bits_and_noise(seed, position, tokens)
    np.testing.assert_array_equal(bits.cpu().numpy(), reference_bits(seed, position, tokens))
    want = noise.row(seed, position, len(tokens))
    np.testing.assert_allclose(values.cpu().numpy(), want, rtol=1e-6, atol=5e-7)


def test_noise_of_all_bits() -> None:
    """All 2**31 values are within 3e-7 or 1e-7 of themselves of the float64 ones."""
    step = 2**25
    worst = torch.zeros((), dtype=torch.float64, device=CUDA)
    magnitudes = torch.ones(step, device=CUDA)
    for start in range(0, 2**31, step):
        bits = torch.arange(start, start + step, dtype=torch.int64, device=CUDA).int()
        got, _ = gumbel_and_log(bits, magnitudes)
        v = (bits.float() * 2.0**-31).clamp(float(noise._LEAST), float(noise._MOST)).double()
        want = -torch.log(-torch.log1p(-v))
        excess = (got.double() - want).abs() - 1e-7 * want.abs()
        assert bool(torch.isfinite(got).all())
        worst = torch.maximum(worst, excess.max())
    assert worst.item() < 3e-7


@pytest.mark.parametrize("num_rows", [1, 64, 300])
def test_equals_the_cpu(num_rows: int) -> None:
    """Ids are the CPU sampler's, but for near-ties, which are few."""
    rows = [params(seed=i * 2**58 - i, **GRID[i % len(GRID)]) for i in range(num_rows)]
    positions = [7 * i for i in range(num_rows)]
    logits = text_logits(num_rows, seed=num_rows)
    inputs = inputs_of(rows, list(range(num_rows)), positions, CUDA)
    want = reference_sample(logits, inputs, vocab_size=VOCAB_SIZE).tolist()
    got = draw(logits, rows, positions)
    differing = [i for i in range(num_rows) if got[i] != want[i]]
    for i in differing:
        values = logits[i].float().cpu().numpy()
        assert is_near_tie(values, rows[i], positions[i], got[i]), (i, rows[i], got[i], want[i])
    assert len(differing) <= num_rows // 50


def test_bits_do_not_depend_on_the_number_of_rows() -> None:
    """Ids, maxima and cuts of a row have the same bits alone, among 64, among 300, shuffled."""
    n = 300
    rows = [params(seed=i, **GRID[i % len(GRID)]) for i in range(n)]
    logits = text_logits(n, seed=5)

    def run(order: list[int]) -> list[torch.Tensor]:
        scratch = SampleScratch.allocate(len(order), VOCAB_SIZE, CUDA)
        scratch.ceilings.fill_(-3)
        out = torch.full((len(order),), POISON, dtype=torch.int32, device=CUDA)
        inputs = inputs_of(rows, order, [13 * i for i in order], CUDA)
        sample_rows(logits[order], inputs, scratch, out, vocab_size=VOCAB_SIZE)
        return [out.cpu(), scratch.ceilings.cpu(), scratch.maxima.cpu()]

    together = run(list(range(n)))
    shuffled = np.random.default_rng(1).permutation(n).tolist()
    orders = [list(range(64)), shuffled, *([i] for i in range(2 * len(GRID)))]
    for order in orders:
        for got, want in zip(run(order), together, strict=True):
            assert torch.equal(got, want[order])
    assert all(torch.equal(a, b) for a, b in zip(run(list(range(n))), together, strict=True))


def test_distribution() -> None:
    """Samples of 40,000 positions follow the softmax after processors: chi-square."""
    draws = 40_000
    for case in ({}, {"temperature": 1.3, "top_k": 20, "top_p": 0.9}):
        row = params(seed=77, **case)
        generator = torch.Generator().manual_seed(11)
        logits = (torch.randn(60, generator=generator) * 1.5).to(torch.bfloat16)
        got = draw(logits.to(CUDA).expand(draws, -1), [row], list(range(draws)), row_of=[0] * draws)
        values = logits.float().numpy()
        z = (values - values.max()) / np.float32(row.temperature)
        weights = np.zeros(60)
        kept = sampler._kept(z, row)
        kept = np.arange(60) if kept is None else kept
        weights[kept] = np.exp(z[kept].astype(np.float64))
        expected = weights / weights.sum() * draws
        assert p_value(np.bincount(got, minlength=60), expected) > 1e-4


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_unusable_rows(value: float) -> None:
    """NaN or +inf anywhere, or nothing but -inf, gives -1; the rows beside it are unharmed."""
    rows = [params(seed=i, **GRID[i]) for i in range(len(GRID))]
    positions = list(range(len(rows)))
    logits = text_logits(len(rows), seed=8)
    want = draw(logits, rows, positions)
    if value == -math.inf:
        logits[::2] = value
    else:
        logits[::2, VOCAB_SIZE - 1] = value
    want[::2] = [-1] * len(want[::2])
    assert draw(logits, rows, positions) == want


def captured(
    logits: torch.Tensor,
    inputs: SampleInputs,
    scratch: SampleScratch,
    out: torch.Tensor,
    times: int,
) -> torch.cuda.CUDAGraph:
    """A graph of `times` calls, warmed up; it keeps nothing alive."""

    def call() -> None:
        sample_rows(logits, inputs, scratch, out, vocab_size=VOCAB_SIZE)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            call()
    return graph


def test_graph_replays_with_new_logits() -> None:
    """A captured call reads logits, parameters and positions anew: ids equal plain calls'."""
    n = len(GRID)
    rows = [params(seed=i, **case) for i, case in enumerate(GRID)]
    logits = text_logits(n, seed=1)
    inputs = inputs_of(rows, list(range(n)), [0] * n, CUDA)
    out = torch.full((n,), POISON, dtype=torch.int32, device=CUDA)
    scratch = SampleScratch.allocate(n, VOCAB_SIZE, CUDA)
    graph = captured(logits, inputs, scratch, out, 1)
    for turn in range(3):
        logits.copy_(text_logits(n, seed=20 + turn))
        inputs.processing.positions.fill_(turn)
        inputs.row_of.copy_(torch.tensor([*range(turn, n), *range(turn)]))
        graph.replay()
        order = [*range(turn, n), *range(turn)]
        assert out.tolist() == draw(logits, rows, [turn] * n, row_of=order)


def microseconds(replay: Callable[[], None], times: int) -> float:
    """Median device time of one of the `times` calls in a replay."""
    seen = []
    for _ in range(15):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        end.record()
        end.synchronize()
        seen.append(start.elapsed_time(end) * 1000 / times)
    return statistics.median(seen)


def flat_logits(num_rows: int) -> torch.Tensor:
    """Bfloat16 logits of which thousands share the nucleus."""
    generator = torch.Generator(CUDA).manual_seed(3)
    logits = torch.randn(num_rows, VOCAB_SIZE, generator=generator, device=CUDA) * 3
    return logits.to(torch.bfloat16)


@pytest.mark.parametrize(
    ("case", "is_flat", "limits"),
    [
        ({"temperature": 0.0}, False, {1: 12, 32: 12, 256: 40}),
        ({}, False, {1: 15, 32: 40, 256: 170}),
        (SEARCHED, False, {1: 25, 64: 60, 256: 150}),
        ({"temperature": 0.8, "top_p": 0.95}, False, {1: 25, 64: 150, 256: 460}),
        ({"top_p": 0.9}, True, {2: 100, 32: 120, 256: 460}),
    ],
    ids=str,
)
def test_time(case: dict[str, float], is_flat: bool, limits: dict[int, float]) -> None:
    """Sampling in a graph takes no more microseconds than each number of rows is given."""
    took = {}
    for num_rows in limits:
        rows = [params(seed=i, **case) for i in range(num_rows)]
        inputs = inputs_of(rows, list(range(num_rows)), [9] * num_rows, CUDA)
        out = torch.full((num_rows,), POISON, dtype=torch.int32, device=CUDA)
        logits = flat_logits(num_rows) if is_flat else text_logits(num_rows, seed=2)
        scratch = SampleScratch.allocate(num_rows, VOCAB_SIZE, CUDA)
        graph = captured(logits, inputs, scratch, out, 10)
        took[num_rows] = round(microseconds(graph.replay, 10), 1)
    print(f"sample_rows {case} us by rows: {took}, limits {limits}")
    assert all(took[num_rows] < limit for num_rows, limit in limits.items())
