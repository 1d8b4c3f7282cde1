"""Log-probabilities: of the softmax, tied ids in order, the same bits in any company."""

from __future__ import annotations

import numpy as np

from worker.sampling.logprobs import read


def test_are_those_of_the_softmax() -> None:
    """Against float64: the chosen ones and the likeliest, in falling order."""
    rng = np.random.default_rng(1)
    logits = (rng.standard_normal((5, 999)) * 6).astype(np.float32)
    wide = logits.astype(np.float64)
    exact = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    token_ids = rng.integers(0, 999, 5)
    chosen, top_ids, top = read(logits, token_ids.tolist(), 20)
    np.testing.assert_allclose(chosen, exact[range(5), token_ids], atol=1e-5)
    np.testing.assert_array_equal(top_ids, np.argsort(-exact, axis=1)[:, :20])
    np.testing.assert_allclose(top, np.take_along_axis(exact, top_ids, axis=1), atol=1e-5)


def test_equals_come_by_their_ids() -> None:
    """Of tied tokens the lowest ids are reported, where the last place is tied too."""
    logits = np.array([[1, 3, 2, 3, 2, 2, 0, 2]], np.float32)
    _, top_ids, top = read(logits, [0], 4)
    assert top_ids.tolist() == [[1, 3, 2, 4]]
    assert top[0, 2] == top[0, 3]
    assert read(logits, [0], 50)[1].tolist() == [[1, 3, 2, 4, 5, 7, 0, 6]]


def test_no_alternatives_are_asked_for() -> None:
    """With none, the chosen ones alone; masked tokens are as unlikely as can be."""
    chosen, top_ids, top = read(np.array([[0, -np.inf]], np.float32), [1], 0)
    assert chosen.tolist() == [-np.inf]
    assert top_ids.shape == top.shape == (1, 0)


def test_no_value_depends_on_its_neighbours() -> None:
    """Alone, among others, and as part of a wider row: equal to the bit."""
    rng = np.random.default_rng(2)
    wide = (rng.standard_normal((7, 49_280)) * 4).astype(np.float32)
    logits = wide[:, :49_152]
    token_ids = rng.integers(0, 49_152, 7).tolist()
    together = read(logits, token_ids, 5)
    for line in range(7):
        alone = read(logits[line : line + 1].copy(), token_ids[line : line + 1], 5)
        for one, all_of_them in zip(alone, together, strict=True):
            assert one[0].tobytes() == all_of_them[line].tobytes()
