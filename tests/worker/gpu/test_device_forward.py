"""The device's forward beside the CPU's; without a GPU its kernels run in the interpreter."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from model_driver import Driver, Part, random_sequences
from tiny import TinyModels

from nightjar.errors import EngineFailure, ModelRefused
from worker.config import WorkerConfig
from worker.gpu import paged
from worker.gpu.forward import DeviceDraftForward, DeviceForward, lay_out
from worker.model import build
from worker.model.build import Models, build_models
from worker.model.device import Placement
from worker.model.loading import identity, read_config
from worker.model.self_check import check_architecture

KERNELS = Placement(torch.device("cuda" if torch.cuda.is_available() else "cpu"), kernels=True)
NUM_BLOCKS = 24
CONFIG = WorkerConfig(
    device="cpu",
    dtype="float32",
    build="eager",
    arithmetic="free",
    num_threads=1,
    num_blocks=NUM_BLOCKS,
    max_num_seqs=4,
    max_num_batched_tokens=32,
    max_model_len=96,
)
TOLERANCE = 1e-4  # of the largest logit
# Tokens of nobody multiply whatever their memory holds.
pytestmark = pytest.mark.filterwarnings(
    "ignore:(invalid value|overflow) encountered:RuntimeWarning"
)


def silent(stage: str, detail: str) -> None:
    """Progress that nobody reads."""


@pytest.fixture(scope="module")
def reference(tiny: TinyModels) -> Iterator[Models]:
    """The target on the CPU's own path."""
    models = build_models(CONFIG, tiny.target, None, silent)
    yield models
    models.close()


@pytest.fixture(scope="module")
def models(tiny: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    """The target as its own draft, by kernels in a fixed order; bits are a GPU's to prove."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "prove_exact", lambda *args, **kwargs: None)
        patch.setattr(  # that it passes by kernels is a test of its own
            build,
            "check_architecture",
            lambda folder, config, *_: check_architecture(folder, config)._replace(fuse=True),
        )
        cache = str(tmp_path_factory.mktemp("cache"))
        config = dataclasses.replace(CONFIG, arithmetic="exact", cache_dir=cache)
        made = build_models(config, tiny.target, tiny.target, silent, KERNELS)
    yield made
    made.close()


STEPS: list[list[Part]] = [
    [(0, 0, 25)],  # a prefill chunk
    [(0, 25, 1), (1, 0, 30)],  # beside a decode; more than one forward takes
    [(0, 26, 6), (1, 30, 9), (2, 0, 11)],  # verification
    [(0, 32, 1), (1, 39, 1), (2, 11, 1)],  # decode
    [(2, 12, 1)],
]


@pytest.mark.parametrize("role", ["target", "draft"])
def test_logits_are_those_of_the_cpu(reference: Models, models: Models, role: str) -> None:
    """Chunks, decode and verification in any mixture give the CPU forward's logits."""
    forward = models.target if role == "target" else models.draft
    assert isinstance(forward, DeviceForward if role == "target" else DeviceDraftForward)
    sequences = random_sequences(forward.vocab_size, [40, 45, 20])
    drivers = [Driver(f, sequences, NUM_BLOCKS, seed=3) for f in (reference.target, forward)]
    for driver in drivers:
        driver.fill_with_nan()
    for parts in STEPS[: 1 if role == "draft" else None]:
        own, mine = (torch.cat(driver.run(parts)) for driver in drivers)
        assert (mine.dtype, mine.device.type) == (torch.float32, "cpu")
        assert (own - mine).abs().max() <= TOLERANCE * own.abs().max()
    assert forward.last_layers == {0, 1}


def test_only_wanted_logits_come_back(models: Models) -> None:
    """Wanted rows come back in order, none when none is wanted."""
    driver = Driver(models.target, random_sequences(models.target.vocab_size, [14]), NUM_BLOCKS)
    batch = driver.batch([(0, 0, 14)])
    whole = models.target.run(batch)
    for wanted in ([], [13], [0, 5]):
        some = models.target.run(dataclasses.replace(batch, logit_tokens=wanted))
        torch.testing.assert_close(some, whole[wanted], rtol=1e-5, atol=1e-5)


def test_static_inputs_are_padded_to_a_bucket(models: Models) -> None:
    """A batch is laid out at the same addresses whatever its size, padding being nobody's."""
    target, buckets = models.target, models.buckets
    assert isinstance(target, DeviceForward)
    assert buckets is not None
    sequences = random_sequences(target.vocab_size, [20, 5])
    driver = Driver(target, sequences, NUM_BLOCKS)
    large = lay_out(driver.batch([(0, 0, 18), (1, 0, 3)]), target.buffers, buckets, 16)
    small = lay_out(driver.batch([(0, 18, 1), (1, 3, 2)]), target.buffers, buckets, 16)
    assert (large.num_tokens, small.num_tokens, small.num_kept) == (32, 4, 4)
    assert small.input_ids.data_ptr() == large.input_ids.data_ptr()
    assert small.input_ids.tolist() == [sequences[0][18], *sequences[1][3:5], 0]
    assert small.positions.tolist() == [18, 3, 4, 0]
    assert small.keep.tolist() == [0, 1, 2, 0]
    assert small.attention.slots.tolist()[3] == -1
    (tiles,) = small.attention.lists
    assert tiles.height == 2
    assert tiles.num_queries.tolist() == [1, 2, 0, 0]
    assert tiles.first_positions.tolist()[:2] == [18, 3]
    assert tiles.first_tokens.tolist()[:2] == [0, 1]


def test_logits_read_bound_inputs(models: Models) -> None:
    """What a graph would capture reads the inputs that were laid out, and nothing else."""
    target, buckets = models.target, models.buckets
    assert isinstance(target, DeviceForward)
    assert buckets is not None
    driver = Driver(target, random_sequences(target.vocab_size, [12]), NUM_BLOCKS)
    batch = driver.batch([(0, 0, 12)])
    expected = target.run(batch)
    inputs = lay_out(batch, target.buffers, buckets, 16)
    logits = target.logits(inputs)
    assert logits.shape == (inputs.num_kept, target.vocab_size)
    assert torch.equal(logits[:12].float().cpu(), expected)


def test_dropped_draft_needs_its_bytes_alone(models: Models) -> None:
    """A dropped draft refuses to run; restored, it runs on its weights where they lie."""
    draft = models.draft
    assert isinstance(draft, DeviceDraftForward)
    driver = Driver(draft, random_sequences(draft.vocab_size, [9]), NUM_BLOCKS)
    before = driver.run([(0, 0, 9)])[0]
    draft.drop()
    with pytest.raises(EngineFailure, match="given away"):
        driver.run([(0, 0, 9)])
    draft.restore()
    assert torch.equal(driver.run([(0, 0, 9)])[0], before)


def test_draft_weights_lie_in_the_arena(models: Models) -> None:
    """The draft's parameters are views of the arena's tail; nothing is shared with an agent."""
    assert models.draft is not None
    assert models.pool is None
    start = models.arena.memory.data_ptr() + models.layout.image_offset
    for parameter in models.draft.model.parameters():
        assert start <= parameter.data_ptr() < start + models.layout.image_bytes


def test_the_check_passes_by_kernels(tiny: TinyModels) -> None:
    """The paged forward by kernels agrees with the model's own, merged and fused."""
    finding = check_architecture(tiny.target, read_config(tiny.target), KERNELS)
    assert (finding.num_layers, finding.num_kv_heads) == (2, 2)
    assert (finding.merge, finding.fuse) == (True, True)


def test_the_check_runs_the_kernels(tiny: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails where the device's attention gives something else."""
    for name in ("attend", "paged_attention"):
        monkeypatch.setattr(paged, name, lambda query, *_, **__: query.transpose(1, 2).contiguous())
    with pytest.raises(ModelRefused, match=r"llama.*differs from its own"):
        check_architecture(tiny.target, read_config(tiny.target), KERNELS)


def test_fingerprint_tells_devices_apart(reference: Models, models: Models) -> None:
    """Kernels' bits are never taken for the CPU path's, whose arithmetic is another."""
    assert models.fingerprint != reference.fingerprint
    assert (models.arithmetic, models.arithmetic_reason) == ("exact", "proved at start")


def test_dummy_weights_need_no_checkpoint(tiny: TinyModels, tmp_path: Path) -> None:
    """A folder with a configuration alone runs on seeded weights, under an identity of its own."""
    (tmp_path / "config.json").write_bytes((tiny.target / "config.json").read_bytes())
    config = dataclasses.replace(CONFIG, load_format="dummy")
    with pytest.raises(ModelRefused):
        build_models(CONFIG, tmp_path, None, silent)
    logits, identities = [], []
    for _ in range(2):
        made = build_models(config, tmp_path, None, silent)
        driver = Driver(made.target, random_sequences(made.target.vocab_size, [9]), NUM_BLOCKS)
        logits.append(driver.run([(0, 0, 9)])[0])
        identities.append(made.target_identity)
        made.close()
    assert torch.equal(logits[0], logits[1])
    assert not logits[0].isnan().any()
    assert identities[0] == identities[1] != identity(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(
    KERNELS.device.type == "cpu" and shutil.which("g++") is None, reason="needs a C++ compiler"
)
def test_compiled_forward_serves_every_size(
    tiny: TinyModels, reference: Models, tmp_path: Path
) -> None:
    """One compiled graph over the kernels gives the CPU's logits at every size, uncompiled anew."""
    config = dataclasses.replace(CONFIG, build="auto", cache_dir=str(tmp_path))
    made = build_models(config, tiny.target, None, silent, KERNELS)
    assert made.build == "compiled"
    sequences = random_sequences(made.target.vocab_size, [40, 45, 20])
    drivers = [Driver(f, sequences, NUM_BLOCKS) for f in (reference.target, made.target)]
    for parts in STEPS:
        own, mine = (torch.cat(driver.run(parts)) for driver in drivers)
        assert (own - mine).abs().max() <= TOLERANCE * own.abs().max()
    made.close()
