"""The sampler against a plain one, the distributions it draws from, and its hard cases."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from chi_square import p_value

from worker.messages import SamplingParams
from worker.sampling import log_probabilities, noise, sample

ALPHA = 1e-4


def params(**values: object) -> SamplingParams:
    """Parameters with a seed and max_tokens filled in."""
    return SamplingParams(**{"seed": 1, "max_tokens": 1, **values})  # type: ignore[arg-type]


def plain_probabilities(logits: np.ndarray, p: SamplingParams) -> np.ndarray:
    """What the processors leave, in float64 and step by step; ties with the last kept stay."""
    z = (logits.astype(np.float64) - logits.max()) / p.temperature
    weights = np.exp(z)
    if 0 < p.top_k < len(z):
        weights[z < np.sort(z)[-p.top_k]] = 0
    if p.top_p < 1:
        held, least = 0.0, 0.0
        for weight in np.sort(weights)[::-1]:
            held, least = held + weight, weight
            if held >= p.top_p * weights.sum():
                break
        weights[weights < least] = 0
    weights[weights < p.min_p * weights.max()] = 0
    return weights / weights.sum()


def plain_sample(logits: np.ndarray, p: SamplingParams, position: int) -> tuple[int, float]:
    """The id, and by how much its score wins."""
    if p.temperature == 0:
        return int(np.flatnonzero(logits == logits.max())[0]), math.inf
    with np.errstate(divide="ignore"):
        scores = np.log(plain_probabilities(logits, p)) + noise.row(p.seed, position, len(logits))
    first, second = np.sort(scores)[[-1, -2]]
    return int(np.flatnonzero(scores == first)[0]), first - second


GRID = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.7},
    {"temperature": 2.0},
    {"temperature": 100.0},
    {"top_k": 1},
    {"top_k": 2},
    {"top_k": 50},
    {"top_k": 700},
    {"top_k": 2**31 - 1},
    {"top_k": -1},
    {"top_p": 0.9},
    {"top_p": 0.999999},
    {"top_p": 1e-9},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 1.5, "top_k": 900, "top_p": 0.7},
]


@pytest.mark.parametrize("vocab_size", [2, 320, 1001])
def test_matches_plain(vocab_size: int) -> None:
    """Every processor, alone and together, chooses as the plain implementation does."""
    rng = np.random.default_rng(3)
    close = 0
    for scale in (0.5, 3.0, 12.0):
        for case in GRID:
            for i in range(20):
                logits = (rng.standard_normal(vocab_size) * scale).astype(np.float32)
                p = params(seed=i, **case)
                want, margin = plain_sample(logits, p, i)
                got = sample(torch.from_numpy(logits)[None], [p], [i])
                close += margin < 1e-4
                assert got == [want] or margin < 1e-4
    assert close < 20


@pytest.mark.parametrize("vocab_size", [320, 49_152, 50_257])
def test_rows_do_not_depend_on_neighbours(vocab_size: int) -> None:
    """Alone, in any batch, and in a view with padding beside it, a row gets the same id."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(len(GRID), vocab_size, generator=generator) * 2
    rows = [params(seed=i, **case) for i, case in enumerate(GRID)]
    positions = [7 * i for i in range(len(GRID))]
    together = sample(logits, rows, positions)
    for i, one in enumerate(rows):
        assert sample(logits[i : i + 1].clone(), [one], [positions[i]]) == [together[i]]
    order = torch.randperm(len(GRID), generator=generator).tolist()
    shuffled = sample(logits[order], [rows[i] for i in order], [positions[i] for i in order])
    assert shuffled == [together[i] for i in order]
    padded = torch.cat([logits, torch.full((len(GRID), 128), 99.0)], dim=1)
    assert sample(padded[:, :vocab_size], rows, positions) == together


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.7},
        {"top_k": 7},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    ],
    ids=str,
)
@pytest.mark.parametrize("over", ["positions", "seeds"])
def test_distribution(case: dict[str, float], over: str) -> None:
    """Samples follow the softmax after processors: chi-square over positions or seeds."""
    rng = np.random.default_rng(11)
    logits = torch.from_numpy((rng.standard_normal(60) * 2).astype(np.float32))
    draws = 12_000
    counts = np.zeros(60)
    wide = logits.expand(1000, -1)
    for start in range(0, draws, 1000):
        steps = range(start, start + 1000)
        if over == "seeds":
            ids = sample(wide, [params(seed=i, **case) for i in steps], [5] * 1000)
        else:
            ids = sample(wide, [params(seed=77, **case)] * 1000, list(steps))
        np.add.at(counts, ids, 1)
    expected = plain_probabilities(logits.numpy(), params(**case)) * draws
    assert counts[expected == 0].sum() == 0
    assert p_value(counts, expected) > ALPHA


def test_seeds_are_independent() -> None:
    """Two requests that differ in their seed alone agree as often as chance says, no more."""
    logits = torch.zeros(1, 50).expand(4000, -1)
    first = sample(logits, [params(seed=1)] * 4000, list(range(4000)))
    second = sample(logits, [params(seed=2)] * 4000, list(range(4000)))
    again = sample(logits, [params(seed=1)] * 4000, list(range(4000)))
    agree = sum(a == b for a, b in zip(first, second, strict=True))
    assert first == again
    assert abs(agree - 80) < 4 * math.sqrt(80)


@pytest.mark.parametrize("temperature", [0.0, 1e-4, 1e-5, 1e-6, 1e-8, 5e-324])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    """Temperatures up to 1e-4 equal greedy, ties included, whatever the size of the logits."""
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(50, 320, generator=generator)
    logits[::2] = (logits[::2] * 4).round()  # many ties for the maximum
    logits[7] *= 1e37
    logits[8] *= 1e-37
    want = [int(torch.nonzero(row == row.max())[0]) for row in logits]
    rows = [params(seed=i, temperature=temperature) for i in range(50)]
    assert sample(logits, rows, list(range(50))) == want


@pytest.mark.parametrize("case", GRID, ids=str)
def test_ties_take_the_lowest_id(case: dict[str, float]) -> None:
    """Of tokens with equal scores the lowest id is chosen, whatever else is set."""
    logits = torch.full((1, 320), -2.5)
    got = sample(logits, [params(temperature=0.0)], [3])
    assert got == [0]
    logits[0, 17] = logits[0, 200] = 40.0
    greedy = {**case, "temperature": 0.0}
    assert sample(logits, [params(**greedy)], [3]) == [17]


@pytest.mark.parametrize("case", GRID, ids=str)
def test_unusable_rows(case: dict[str, float]) -> None:
    """NaN or +inf anywhere, or nothing but -inf, gives -1, and the rows beside it are unharmed."""
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(6, 320, generator=generator)
    rows, positions = [params(seed=i, **case) for i in range(6)], [4, 5, 6, 7, 8, 9]
    want = sample(logits, rows, positions)
    logits[0, 319] = math.nan
    logits[2, 5] = math.inf
    logits[3] = -math.inf
    logits[4, 100] = -math.inf if want[4] != 100 else logits[4, 100]
    assert sample(logits, rows, positions) == [-1, want[1], -1, -1, want[4], want[5]]
    logits[5] = math.nan
    assert sample(logits, rows, positions)[5] == -1


@pytest.mark.parametrize("case", GRID, ids=str)
def test_masked_tokens_are_never_drawn(case: dict[str, float]) -> None:
    """Tokens at -inf are never chosen, even where few others are left."""
    logits = torch.full((200, 320), -math.inf)
    logits[:, 7], logits[:, 300] = 1.0, 0.5
    rows = [params(seed=i, **case) for i in range(200)]
    assert set(sample(logits, rows, list(range(200)))) <= {7, 300}


def test_huge_logits_do_not_overflow() -> None:
    """Logits at float32's ends are handled without a warning or NaN."""
    logits = torch.tensor([[3e38, -3e38, 3e38, 0.0], [-3e38, -3e38, -3e38, -3.4e38]])
    for case in GRID:
        first, second = sample(logits, [params(seed=3, **case)] * 2, [1, 2])
        assert first in (0, 2)
        assert second in (0, 1, 2)


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.99, 0.9999, 1 - 1e-7])
@pytest.mark.parametrize("scale", [0.01, 1.0, 3.0, 8.0])
def test_short_cuts_keep_the_same_set(top_p: float, scale: float) -> None:
    """The nucleus and the k-th largest found among few candidates equal those of a full sort."""
    from worker.sampling import sampler

    rng = np.random.default_rng(4)
    z = (rng.standard_normal(49_152) * scale).astype(np.float32)
    z = np.round(z * 16) / 16 - np.float32(0) if scale == 3.0 else z  # ties, as in bfloat16
    z = (z - z.max()).astype(np.float32)
    weights = np.exp(z)
    falling = np.sort(weights)[::-1]
    held = np.cumsum(falling, dtype=np.float64)
    index = int(np.searchsorted(held, top_p * weights.sum(dtype=np.float64)))
    assert sampler._nucleus_floor(weights, top_p) == falling[index]
    for k in (2, 50, 1024, 30_000, 49_151):
        assert sampler._kth_largest(z, k) == np.sort(z)[-k]


def test_leaves_logits_alone() -> None:
    """The caller's logits are not written."""
    logits = torch.randn(len(GRID), 320, generator=torch.Generator().manual_seed(1))
    before = logits.clone()
    sample(logits, [params(**case) for case in GRID], list(range(len(GRID))))
    assert torch.equal(logits, before)


def test_refuses_misuse() -> None:
    """Another dtype, or fewer parameters than rows, is a programming error that is told."""
    with pytest.raises(ValueError, match="float32"):
        sample(torch.zeros(1, 5, dtype=torch.bfloat16), [params()], [0])
    with pytest.raises(ValueError, match="as many"):
        sample(torch.zeros(2, 5), [params()], [0])
    assert sample(torch.zeros(0, 5), [], []) == []


@pytest.mark.parametrize("fields", GRID)
def test_log_probabilities_are_those_of_the_softmax(fields: dict[str, float]) -> None:
    """The chosen token's log p at the row's temperature, at most 0; greedy rows', at 1."""
    rng = np.random.default_rng(3)
    logits = torch.from_numpy(rng.normal(0, 4, (40, 1000)).astype(np.float32))
    before = logits.clone()
    p = params(**fields)
    chosen = sample(logits, [p] * 40, range(40))
    found = log_probabilities(logits, [p] * 40, chosen)
    assert torch.equal(logits, before)
    plain = params(temperature=1.0 if p.temperature == 0 or p.top_k == 1 else p.temperature)
    for row, token_id, log_p in zip(logits.numpy(), chosen, found, strict=True):
        assert log_p <= 0
        assert log_p == pytest.approx(math.log(plain_probabilities(row, plain)[token_id]), abs=2e-5)


def test_rows_that_chose_nothing_are_as_unlikely_as_can_be() -> None:
    """Where logits are no numbers there is no token, and its log-probability is -inf."""
    logits = torch.tensor([[float("nan"), 1.0], [0.0, 0.0]])
    chosen = sample(logits, [params(temperature=0.0)] * 2, [0, 0])
    found = log_probabilities(logits, [params(temperature=0.0)] * 2, chosen)
    assert found == [-math.inf, pytest.approx(math.log(0.5))]
