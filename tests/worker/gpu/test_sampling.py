"""Sampling on the device against worker.sampling, in Triton's interpreter where no GPU is there."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from chi_square import p_value
from sample_calls import (
    DEVICE,
    GRID,
    POISON,
    bits_and_noise,
    cuts,
    draw,
    gumbel_and_log,
    inputs_of,
    params,
    random_logits,
    reference_bits,
)

from worker.kernels.noise import REACH, reference_noise
from worker.kernels.sampling import SampleScratch, reference_sample, sample_rows
from worker.kernels.sampling_cut import CAPACITY
from worker.sampling import noise, sampler


@pytest.mark.parametrize(
    ("seed", "position"),
    [(0, 0), (1, 2**31 - 1), (2**64 - 1, 8191), (-3, 12), (2**63, 77), (0x9E3779B97F4A7C15, 1)],
)
def test_noise_is_the_same(seed: int, position: int) -> None:
    """Hash bits equal the CPU's for 64-bit and negative seeds; the noise is within 1e-6."""
    tokens = np.concatenate([np.arange(4998), [151_935, 2**18 - 1]])
    bits, values = bits_and_noise(seed, position, tokens)
    assert bits.tolist() == reference_bits(seed, position, tokens).tolist()
    want = reference_noise(seed, position, tokens)
    np.testing.assert_allclose(values.cpu().numpy(), want, rtol=1e-6, atol=5e-7)


def check_gumbel(bits: np.ndarray) -> None:
    """The noise of bits, and the logarithm of the magnitudes they give, against float64."""
    magnitudes = np.exp2(bits / 2.0**31 * 250 - 125).astype(np.float32)
    values, logs = gumbel_and_log(
        torch.tensor(bits.astype(np.int32), device=DEVICE), torch.tensor(magnitudes, device=DEVICE)
    )
    v = (bits.astype(np.float32) * np.float32(2.0**-31)).clip(noise._LEAST, noise._MOST)
    want = -np.log(-np.log1p(-v.astype(np.float64)))
    np.testing.assert_allclose(values.cpu().numpy(), want, rtol=1e-7, atol=3e-7)
    want = np.log(magnitudes.astype(np.float64))
    np.testing.assert_allclose(logs.cpu().numpy(), want, rtol=1e-7, atol=2e-7)


def test_noise_is_exact_at_its_ends() -> None:
    """Near 0, near 1, at every power of two and in between, noise is within 3e-7 or 1e-7 of it."""
    powers = np.array([2**i for i in range(31)])
    low = np.concatenate([np.arange(3000), *(powers + d for d in (-1, 0, 1, 2))])
    middle = np.random.default_rng(1).integers(0, 2**31, 40_000)
    near_one = np.linspace(2**31 * 0.9, 2**31 - 1, 5000).astype(np.int64)
    bits = np.concatenate([low, 2**31 - 1 - low, middle, near_one])
    check_gumbel(np.unique(bits.clip(0, 2**31 - 1)))


def test_reach_covers_the_noise() -> None:
    """No two values of the noise lie as far apart as REACH."""
    ends = [-math.log(-math.log1p(-float(v))) for v in (noise._LEAST, noise._MOST)]
    assert ends[0] - ends[1] < REACH - 0.05


def check_against_the_cpu(vocab_size: int, scale: float, repeats: int) -> None:
    """All processors in one call, `repeats` times: the CPU sampler's ids."""
    rows = [params(seed=i * 2**60 - i, **case) for i in range(repeats) for case in GRID]
    logits = random_logits(len(rows), vocab_size, seed=vocab_size, scale=scale)
    positions = [7 * i for i in range(len(rows))]
    inputs = inputs_of(rows, list(range(len(rows))), positions, torch.device("cpu"))
    want = reference_sample(logits, inputs, vocab_size=vocab_size).tolist()
    assert draw(logits, rows, positions) == want
    assert sampler.sample(logits.float().cpu(), rows, positions) == want


@pytest.mark.parametrize(("vocab_size", "scale"), [(320, 0.02), (1001, 2.0)])
def test_equals_the_cpu(vocab_size: int, scale: float) -> None:
    """All processors, mixed in one call, on logits with many ties: the CPU sampler's ids."""
    check_against_the_cpu(vocab_size, scale, 1)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.02, 1.0, 3.0, 12.0])
def test_equals_the_cpu_in_hundreds_of_rows(scale: float) -> None:
    """The same for hundreds of rows."""
    check_against_the_cpu(320, scale, 6)
    check_against_the_cpu(1001, scale, 6)


def test_equals_the_cpu_over_many_chunks() -> None:
    """The same for several chunks, the last not full, and for float32 and float16 logits."""
    rows = [params(seed=i, **GRID[i]) for i in (0, 3, 6, 9, 12)]
    positions = list(range(len(rows)))
    exact = torch.randn(len(rows), 5003, generator=torch.Generator().manual_seed(4)) * 2
    for values, few in ((exact, rows[:2]), (exact.half(), rows[:2]), (exact.bfloat16(), rows)):
        some, at = values[: len(few)], positions[: len(few)]
        assert draw(some.to(DEVICE), few, at) == sampler.sample(some.float(), few, at)


def test_cut_is_the_same_in_three_ways() -> None:
    """Ranks, a search among keys and one among logits cut at the same key, that of the CPU."""
    for seed, (top_k, top_p) in enumerate([(0, 0.9), (5, 1.0), (40, 0.7), (300, 0.999999)]):
        logits = random_logits(1, 200, seed=seed, scale=2.0)[0]
        p = params(top_k=top_k, top_p=top_p)
        got = cuts(logits, p)
        z = (logits.float() - logits.float().max()).cpu().numpy()
        kept = sampler._kept(z, p)
        assert kept is not None
        assert got == [int(np.abs(z[kept]).max().view(np.int32))] * 3


def test_more_tokens_at_the_cut_than_the_list_holds() -> None:
    """Thousands that tie at the cut overflow the list: ids are the CPU's, nothing else is hit."""
    rows = [params(seed=i, **case) for i, case in enumerate([{"top_k": 2}, {"top_p": 0.9}])]
    logits = torch.full((len(rows), CAPACITY + 900), -3.0, device=DEVICE)
    logits[:, [7, 4500]] = torch.tensor([0.0, -3.5], device=DEVICE)
    positions = [5, 6]
    assert draw(logits, rows, positions) == sampler.sample(logits.cpu(), rows, positions)


def test_greedy_takes_the_lowest_of_equals() -> None:
    """Of equal largest logits the lowest id wins, within a chunk and across chunks."""
    logits = torch.full((3, 4500), -2.5, device=DEVICE)
    logits[1, [17, 200, 2100]] = 40.0
    logits[2, [2050, 4499]] = 40.0
    rows = [params(temperature=0.0), params(top_k=1), params(temperature=1e-4)]
    assert draw(logits, rows, [3, 4, 5]) == [0, 17, 2050]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_unusable_rows(value: float) -> None:
    """NaN or +inf anywhere, or nothing but -inf, gives -1; the rows beside it are unharmed."""
    cases = [{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5}]
    rows = [params(seed=i, **case) for i, case in enumerate(cases) for _ in range(2)]
    logits = random_logits(len(rows), 320, seed=8, scale=1.0)
    positions = list(range(len(rows)))
    want = draw(logits, rows, positions)
    if value == -math.inf:
        logits[::2] = value
    else:
        logits[::2, 319] = value
    want[::2] = [-1] * len(cases)
    assert draw(logits, rows, positions) == want


def test_masked_tokens_are_never_drawn() -> None:
    """Tokens at -inf are never chosen, even where top_k asks for more than are left."""
    rows = [params(seed=i, **case) for i, case in enumerate(GRID[::2])]
    logits = torch.full((len(rows), 320), -math.inf, device=DEVICE)
    logits[:, 7], logits[:, 300] = 1.0, 0.5
    positions = list(range(len(rows)))
    got = draw(logits, rows, positions)
    assert got == sampler.sample(logits.cpu(), rows, positions)
    assert set(got) == {7, 300}


def test_huge_logits_do_not_overflow() -> None:
    """Logits at float32's ends give the CPU's ids."""
    ends = [[3e38, -3e38, 3e38, 0.0], [-3e38, -3e38, -3e38, -3.4e38]]
    cases = [GRID[i] for i in (0, 1, 2, 5, 9, 14)]
    rows = [params(seed=3, **case) for case in cases for _ in ends]
    logits = torch.tensor(ends * len(cases), device=DEVICE)
    positions = [1, 2] * len(cases)
    with np.errstate(over="ignore"):  # the interpreter's; -inf is what is meant
        got = draw(logits, rows, positions)
    assert got == sampler.sample(logits.cpu(), rows, positions)


def test_padding_of_the_vocabulary_and_of_rows() -> None:
    """Logits past the vocabulary are never read, padding rows never written, strides any."""
    rows = [params(seed=i, **case) for i, case in enumerate(GRID[1::2])]
    n = len(rows)
    logits = random_logits(n, 320, seed=9, scale=2.0)
    want = draw(logits, rows, list(range(n)))
    wide = torch.full((n, 400), 1e30, dtype=logits.dtype, device=DEVICE)
    wide[:, 350:] = math.nan
    wide[:, :320] = logits
    row_of = [i if i % 3 else -1 for i in range(n)]
    got = draw(wide[:, :390], rows, list(range(n)), vocab_size=320, row_of=row_of)
    assert got == [POISON if i % 3 == 0 else want[i] for i in range(n)]


def test_rows_stand_alone() -> None:
    """Alone, in a batch, shuffled, or twice with one row's parameters: the same id."""
    rows = [params(seed=i, **GRID[i]) for i in (0, 1, 9, 14)]
    n = len(rows)
    positions = [11 * i for i in range(n)]
    logits = random_logits(n, 2100, seed=10, scale=2.0)
    together = draw(logits, rows, positions)
    for i in range(n):
        assert draw(logits[i : i + 1], [rows[i]], [positions[i]]) == [together[i]]
    order = [3, 1, 0, 2]
    moved = draw(logits[order], rows, [positions[i] for i in order], row_of=order)
    assert moved == [together[i] for i in order]
    assert draw(logits[[1, 1]], rows, [11, 11], row_of=[1, 1]) == [together[1]] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "draws"), [({}, 300), ({"temperature": 1.3, "top_k": 9, "top_p": 0.8}, 200)], ids=str
)
def test_distribution(case: dict[str, float], draws: int) -> None:
    """Over positions, samples follow the softmax after processors: chi-square."""
    vocab_size = 16
    logits = random_logits(1, vocab_size, seed=11, scale=1.5)
    row = params(seed=77, **case)
    got = draw(logits.expand(draws, -1), [row], list(range(draws)), row_of=[0] * draws)
    weights = np.exp(logits[0].float().cpu().numpy().astype(np.float64) / row.temperature)
    if row.top_k:
        weights[weights < np.sort(weights)[-row.top_k]] = 0
    falling = np.sort(weights)[::-1]
    held = np.cumsum(falling)
    least = falling[min(np.searchsorted(held, row.top_p * held[-1]), vocab_size - 1)]
    weights[weights < least] = 0
    expected = weights / weights.sum() * draws
    assert p_value(np.bincount(got, minlength=vocab_size), expected) > 1e-4


def test_wrong_arguments_are_refused() -> None:
    """Strides, dtypes and sizes that the kernels do not serve raise before anything is launched."""
    rows = [params(), params()]
    logits = random_logits(2, 320, seed=1, scale=1.0)
    inputs = inputs_of(rows, [0, 1], [0, 0], DEVICE)
    scratch = SampleScratch.allocate(2, 320, DEVICE)
    out = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    for bad, vocab_size in (
        (logits.t().contiguous().t(), 320),
        (logits.double(), 320),
        (logits, 321),
        (logits.expand(2, 320)[[0, 1, 0]], 320),
        (random_logits(2, 2**18 + 1, seed=1, scale=1.0), 2**18 + 1),
        (random_logits(2, 4096, seed=1, scale=1.0), 4096),
    ):
        with pytest.raises(ValueError, match=r"logits|vocabulary"):
            sample_rows(bad, inputs, scratch, out, vocab_size=vocab_size)
