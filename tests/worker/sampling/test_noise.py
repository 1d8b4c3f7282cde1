"""The shared noise: Gumbel, independent over seeds, positions and tokens, and the same for all."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from chi_square import p_value

from worker.sampling import noise

EULER = 0.5772156649
ALPHA = 1e-4  # of each chi-square test; seeds are fixed, so none is flaky


def reference(seed: int, position: int, vocab_size: int) -> np.ndarray:
    """The noise once more, in torch's wrapping int32 and float64 logarithms."""
    key_1, key_2 = (k - 2**32 if k >= 2**31 else k for k in noise.keys(seed, position))

    def wrap(value: int) -> int:
        return value - 2**32 if value >= 2**31 else value

    def logical_shift(x: torch.Tensor, by: int) -> torch.Tensor:
        return (x >> by) & ((1 << (32 - by)) - 1)

    x = torch.arange(vocab_size, dtype=torch.int32) * wrap(0x9E3779B1) + key_1
    for i, (shift, factor) in enumerate(((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB))):
        x = (x ^ logical_shift(x, shift)) * wrap(factor)
        x = x ^ key_2 if i == 0 else x
    x = logical_shift(x ^ logical_shift(x, 14), 1)
    v = (x.float() * 2.0**-31).clamp(2.0**-32, 1 - 2.0**-24).double()
    return -torch.log(-torch.log1p(-v)).numpy()


@pytest.mark.parametrize("vocab_size", [5, 320, 16_384, 16_385, 49_152, 50_257])
def test_matches_reference(vocab_size: int) -> None:
    """Numpy's unsigned integers and torch's wrapping ones give the same noise within 1e-6."""
    for seed, position in ((0, 0), (2**64 - 1, 8191), (-3, 12)):
        got = noise.row(seed, position, vocab_size)
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, reference(seed, position, vocab_size), atol=1e-6, rtol=0)


@pytest.mark.parametrize("vocab_size", [5, 319, 320, 49_152, 50_257])
def test_tokens_match_row(vocab_size: int) -> None:
    """A token's noise has the same bits in a row, alone, among some, and in a longer row."""
    rng = np.random.default_rng(1)
    row = noise.row(9, 4, vocab_size)
    longer = noise.row(9, 4, vocab_size + 37)
    np.testing.assert_array_equal(longer[:vocab_size], row)
    for size in (1, 2, 3, min(17, vocab_size), min(1001, vocab_size), vocab_size):
        ids = np.sort(rng.choice(vocab_size, size, replace=False))
        np.testing.assert_array_equal(noise.of_tokens(9, 4, ids), row[ids])


def test_extreme_values_are_finite() -> None:
    """The smallest and the largest integer give the ends of the documented range."""
    ends = [float(-np.log(-np.log1p(-v))) for v in (noise._LEAST, noise._MOST)]
    assert 22.18 < ends[0] < 22.19
    assert -2.82 < ends[1] < -2.81
    many = np.concatenate([noise.row(seed, 0, 49_152) for seed in range(100)])
    assert np.isfinite(many).all()
    assert many.min() >= ends[1]
    assert many.max() <= ends[0]


def test_tail_lets_rare_tokens_win() -> None:
    """Large noise is as frequent as it should be and finely resolved, so rare tokens get drawn."""
    many = np.concatenate([noise.row(seed, 3, 49_152) for seed in range(400)])
    for level in (8, 10, 12, 14):
        mean = len(many) * -np.expm1(-np.exp(-level))
        assert abs((many > level).sum() - mean) < 4 * np.sqrt(mean)
    high = many[many > 12]  # with uniforms of 23 bits only 51 values could occur
    assert len(np.unique(high)) > 0.9 * len(high) > 60


def test_is_gumbel() -> None:
    """Chi-square of 10 million values in 200 cells of equal probability; mean and variance."""
    cells = np.zeros(200)
    total = square = 0.0
    for seed in range(200):
        row = noise.row(seed, seed * 31, 49_152).astype(np.float64)
        cells += np.bincount((np.exp(-np.exp(-row)) * 200).astype(int).clip(0, 199), minlength=200)
        total, square = total + row.sum(), square + (row**2).sum()
    n = cells.sum()
    assert p_value(cells, np.full(200, n / 200)) > ALPHA
    assert total / n == pytest.approx(EULER, abs=2e-3)
    assert square / n - (total / n) ** 2 == pytest.approx(np.pi**2 / 6, abs=5e-3)


@pytest.mark.parametrize("vocab_size", [5, 50, 1000])
@pytest.mark.parametrize("over", ["positions", "seeds", "both"])
def test_argmax_is_uniform(over: str, vocab_size: int) -> None:
    """Of equal logits each token wins equally often, over positions, over seeds, over both."""
    counts = np.zeros(vocab_size)
    draws = 10_000
    for i in range(draws):
        seed = {"positions": 12345, "seeds": i, "both": i // 100}[over]
        position = {"positions": i, "seeds": 17, "both": i % 100}[over]
        counts[noise.row(seed, position, vocab_size).argmax()] += 1
    assert p_value(counts, np.full(vocab_size, draws / vocab_size)) > ALPHA


@pytest.mark.parametrize(
    "neighbour", ["position", "token", "seed", "far seed", "seed and position", "high bit"]
)
def test_neighbours_do_not_correlate(neighbour: str) -> None:
    """A neighbouring position, token or seed tells nothing: correlation below 4 sigma."""
    pairs = []
    for i in range(60):
        row = noise.row(i, 2 * i, 20_000)
        other = {
            "position": lambda i=i: noise.row(i, 2 * i + 1, 20_000),
            "token": lambda row=row: np.roll(row, 1),
            "seed": lambda i=i: noise.row(i + 1000, 2 * i, 20_000),
            "far seed": lambda i=i: noise.row(i + 2**32, 2 * i, 20_000),
            "seed and position": lambda i=i: noise.row(i + 1, 2 * i - 1, 20_000),
            "high bit": lambda i=i: noise.row(i + 2**63, 2 * i, 20_000),
        }[neighbour]()
        pairs.append(np.stack([row, other]))
    x, y = np.concatenate(pairs, axis=1).astype(np.float64)
    for f in (lambda v: v, lambda v: np.exp(-np.exp(-v)), lambda v: v**2):
        assert abs(np.corrcoef(f(x), f(y))[0, 1]) < 4 / np.sqrt(len(x))


def test_pairs_of_winners_are_independent() -> None:
    """Which token wins at a position says nothing about the next: chi-square of the pairs."""
    table = np.zeros((5, 5))
    for seed in range(200):
        winners = [int(noise.row(seed, position, 5).argmax()) for position in range(100)]
        np.add.at(table, (winners[:-1], winners[1:]), 1)
    assert p_value(table.ravel(), np.full(25, table.sum() / 25)) > ALPHA


def test_keys_differ() -> None:
    """No two of 160,000 (seed, position) share their keys."""
    seen = {noise.keys(seed, position) for seed in range(400) for position in range(400)}
    assert len(seen) == 160_000
