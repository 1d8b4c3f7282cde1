"""Logits, bit for bit, however a sequence is chunked, batched and verified."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from model_driver import Driver, count_differences, random_sequences
from tiny import TinyModels, tiny_folder

from memory_agent.checksum import image_digest
from nightjar.errors import EngineFailure, ModelRefused
from worker.config import WorkerConfig
from worker.model import build, linear
from worker.model.batch import Batch
from worker.model.build import Models, build_models
from worker.model.device import has_native_bfloat16
from worker.model.forward import PADDED, padded
from worker.model.proof import MAX_WIDTH, prove_exact
from worker.model.runtime import Weight

DTYPES = [
    "float32",
    pytest.param(
        "bfloat16",
        marks=pytest.mark.skipif(not has_native_bfloat16(), reason="no bfloat16 instructions"),
    ),
]
NUM_BLOCKS = 96
CONFIG = WorkerConfig(num_blocks=NUM_BLOCKS, build="eager", num_threads=1)


def silent(stage: str, detail: str) -> None:
    """Progress that nobody reads."""


def made(config: WorkerConfig, target: Path, draft: Path | None = None) -> Iterator[Models]:
    """Models that are closed afterwards."""
    models = build_models(config, target, draft, silent)
    yield models
    models.close()


@pytest.fixture(params=DTYPES)
def models(request: pytest.FixtureRequest, tiny: TinyModels, tmp_path: Path) -> Iterator[Models]:
    """Tiny models, the target its own draft."""
    config = dataclasses.replace(CONFIG, dtype=request.param, shm_dir=str(tmp_path))
    yield from made(config, tiny.target, tiny.target)


# Where bfloat16 is native, and so the default, float32 takes its time in the long sweeps.
@pytest.fixture(
    scope="module",
    params=[
        pytest.param("float32", marks=pytest.mark.slow if has_native_bfloat16() else ()),
        DTYPES[1],
    ],
)
def real(request: pytest.FixtureRequest, smollm2: Path) -> Iterator[Models]:
    """The default model, as large as the driver needs."""
    yield from made(
        dataclasses.replace(CONFIG, dtype=request.param, max_num_seqs=8, num_threads=0), smollm2
    )


def test_tiny_logits_do_not_depend_on_batch(models: Models) -> None:
    """Target and draft give a position the same bits in every chunking, batch and width."""
    assert models.arithmetic == "exact"
    for forward in (models.target, models.draft):
        assert forward is not None
        sequences = random_sequences(forward.vocab_size, [90, 75, 33, 140, 61, 20])
        different, compared = count_differences(
            Driver(forward, sequences, NUM_BLOCKS), prefill=12, trials=4
        )
        assert (different, compared > 1000) == (0, True)


def test_real_logits_do_not_depend_on_batch(real: Models) -> None:
    """The real model gives a position the same bits in every chunking, batch and width."""
    assert real.arithmetic == "exact"
    sequences = random_sequences(real.target.vocab_size, [165, 100, 90])
    driver = Driver(real.target, sequences, NUM_BLOCKS)
    assert count_differences(driver, prefill=75, trials=4) == (0, 4 * (90 + 25 + 15))


def test_free_arithmetic_is_told_from_exact(real: Models) -> None:
    """The same comparison, and the proof, fail under free arithmetic; the operation is named."""
    real.target.runtime.exact = False
    try:
        sequences = random_sequences(real.target.vocab_size, [95, 90])
        different, _ = count_differences(
            Driver(real.target, sequences, NUM_BLOCKS), prefill=75, trials=1
        )
        problem = prove_exact(real.target, max_num_seqs=4, budget_s=0)
    finally:
        real.target.runtime.exact = True
    assert different > 0
    assert problem is not None
    assert "gives other bits" in problem


def test_every_size_of_a_step_is_proved(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that forwards are padded to are all run, with and without prompts, in their limits."""
    target = models.target
    monkeypatch.setattr(target, "max_batch_tokens", 70)
    monkeypatch.setattr(target, "decode_sizes", (2, 6, 27, 36))
    monkeypatch.setattr(target, "prompt_sizes", (16, 33, 64, 70))
    compute = target.compute
    seen: list[list[int]] = []

    def recorded(batch: Batch) -> torch.Tensor:
        seen.append([b - a for a, b in itertools.pairwise(batch.query_starts)])
        return compute(batch)

    monkeypatch.setattr(target, "compute", recorded)
    for max_num_seqs in (1, 4):
        seen.clear()
        assert prove_exact(target, max_num_seqs=max_num_seqs, budget_s=0) is None
        assert all(len(counts) <= max_num_seqs for counts in seen)
        plain = {sum(counts) for counts in seen if max(counts) <= MAX_WIDTH}
        assert {2, 6} <= plain
        assert max_num_seqs == 1 or {27, 36} <= plain
        assert {16, 33, 64, 70} <= {sum(counts) for counts in seen if max(counts) > MAX_WIDTH}


@pytest.mark.parametrize(("size", "place"), [(27, "in a batch"), (64, "tokens with prompts")])
def test_a_size_that_adds_otherwise_is_found(
    models: Models, monkeypatch: pytest.MonkeyPatch, size: int, place: str
) -> None:
    """One unit in the last place, at one size of step alone, fails the proof."""
    target = models.target
    monkeypatch.setattr(target, "max_batch_tokens", 70)
    monkeypatch.setattr(target, "decode_sizes", (2, 27))
    monkeypatch.setattr(target, "prompt_sizes", (16, 64))
    compute = target.compute

    def wrong(batch: Batch) -> torch.Tensor:
        logits = compute(batch)
        if len(batch.input_ids) == size:
            logits = torch.nextafter(logits, torch.full_like(logits, torch.inf))
        return logits

    monkeypatch.setattr(target, "compute", wrong)
    problem = prove_exact(target, max_num_seqs=4, budget_s=0)
    assert problem is not None
    assert "gives other bits" in problem
    assert place in problem


def test_window_and_softcap_stay_exact(tmp_path: Path) -> None:
    """Sliding windows and capped scores keep a position's bits independent of the batch."""
    from model_families import family_folder

    folder = family_folder(tmp_path, "gemma2")
    for models in made(dataclasses.replace(CONFIG, dtype="float32"), folder):
        sequences = random_sequences(models.target.vocab_size, [90, 75, 33])
        driver = Driver(models.target, sequences, NUM_BLOCKS)
        assert count_differences(driver, prefill=12, trials=3)[0] == 0


def test_products_are_of_few_sizes(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is run, rows of products are those that are padded to, which lie close above."""
    seen: set[int] = set()
    product = linear._product

    def recorded(x: torch.Tensor, weight: Weight) -> torch.Tensor:
        seen.add(x.numel() // x.shape[-1])
        return product(x, weight)

    monkeypatch.setattr(linear, "_product", recorded)
    sequences = random_sequences(models.target.vocab_size, [300])
    driver = Driver(models.target, sequences, NUM_BLOCKS)
    for count in (1, 2, 3, 17, 30, 33, 67, 129, 241, 256, 300):
        driver.run([(0, 0, count)])
    assert {2, 3, 18, 30, 36, 72, 144, 256} <= seen <= {*PADDED}
    assert all(padded(count, 2) <= max(2, count * 9 / 8) for count in range(1, 257))
    assert padded(1, 1) == 1


def test_more_tokens_than_one_forward_takes(models: Models) -> None:
    """A batch above 256 tokens runs in parts and gives the bits of one token at a time."""
    sequences = random_sequences(models.target.vocab_size, [150, 130, 40])
    driver = Driver(models.target, sequences, NUM_BLOCKS)
    expected = [driver.one_by_one(n, 100) for n in range(2)]
    driver.fill_with_nan()
    logits = driver.run([(0, 0, 150), (1, 0, 130), (2, 0, 40)])
    assert torch.equal(logits[0][100:], expected[0])
    assert torch.equal(logits[1][100:], expected[1])


def test_only_wanted_logits_come_back(models: Models) -> None:
    """Wanted rows are returned in order, none when none is wanted, in float32."""
    driver = Driver(models.target, random_sequences(models.target.vocab_size, [20, 9]), NUM_BLOCKS)
    batch = driver.batch([(0, 0, 20), (1, 0, 9)])
    whole = models.target.run(batch)
    for wanted in ([], [19], [3, 19, 28]):
        some = models.target.run(dataclasses.replace(batch, logit_tokens=wanted))
        assert some.shape == (len(wanted), models.target.vocab_size)
        assert some.dtype == torch.float32
        assert torch.equal(some, whole[wanted])


def test_dropped_draft_refuses_to_run_until_its_bytes_are_back(models: Models) -> None:
    """A draft whose tail was overwritten runs again, to the bit, once the image is copied back."""
    draft, pool, layout = models.draft, models.pool, models.layout
    assert draft is not None
    assert pool is not None
    driver = Driver(draft, random_sequences(draft.vocab_size, [30]), NUM_BLOCKS)
    before = driver.one_by_one(0, 10)
    draft.drop()
    models.arena.memory[layout.tail_offset :] = 255
    with pytest.raises(EngineFailure, match="given away"):
        driver.run([(0, 0, 5)])
    image = Path(pool.image_path).read_bytes()
    assert image_digest(memoryview(image)) == pool.image_sha256
    start = pool.image_offset
    with Path(pool.arena_path).open("r+b") as arena:  # as another process would
        arena.seek(start)
        arena.write(image)
    draft.restore()
    assert torch.equal(driver.one_by_one(0, 10), before)


def test_expanded_tail_serves_the_target(models: Models) -> None:
    """The tail's blocks hold the target's KV like any others while the draft is away."""
    assert models.draft is not None
    models.draft.drop()
    layout, forward = models.layout, models.target
    driver = Driver(forward, random_sequences(forward.vocab_size, [30]), NUM_BLOCKS)
    expected = driver.one_by_one(0, 10)
    assert layout.num_extra_blocks >= 2
    driver.tables = [[layout.num_base_blocks + 1, layout.num_base_blocks]]
    models.arena.memory[layout.tail_offset :] = 255  # NaN
    assert torch.equal(driver.one_by_one(0, 10), expected)


def test_fingerprint_tells_arithmetic_apart(tiny: TinyModels, tmp_path: Path) -> None:
    """Equal workers share a fingerprint; another dtype, arithmetic or model has its own."""
    other = tiny_folder(tmp_path, "random", seed=5)
    prints = []
    for change, folder in (
        ({}, tiny.target),
        ({}, tiny.target),
        ({"arithmetic": "free"}, tiny.target),
        ({"dtype": "bfloat16"}, tiny.target),
        ({}, other),
    ):
        config = dataclasses.replace(CONFIG, **{"dtype": "float32", "num_blocks": 8, **change})
        prints += [models.fingerprint for models in made(config, folder)]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 4


def test_failed_proof_refuses_exact_and_frees_auto(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Explicit exact refuses to start, naming the operation; the default starts free."""
    monkeypatch.setattr(
        build, "prove_exact", lambda *args, **kwargs: "PackedLinear lm_head differs"
    )
    config = dataclasses.replace(CONFIG, dtype="float32", num_blocks=8)
    with pytest.raises(ModelRefused, match="PackedLinear lm_head differs"):
        build_models(dataclasses.replace(config, arithmetic="exact"), tiny.target, None, silent)
    for models in made(config, tiny.target):
        assert models.arithmetic == "free"
        assert "PackedLinear lm_head differs" in models.arithmetic_reason
