"""The same promises on real forwards over a real pool that was full of NaN."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_rig import Rig, params, prompt

from worker.messages import SamplingParams
from worker.model.build import Models
from worker.text.tokenizer import Tokenizer

DRAFTS = ["target", "noisy", "random"]
VOCAB_SIZE = 320
Requests = dict[int, tuple[list[int], SamplingParams]]


@pytest.fixture
def folders(tiny: object) -> Callable[[str], Path]:
    """Folder of the target or of a draft, by name."""
    return lambda name: getattr(tiny, name)  # type: ignore[no-any-return]


def rig_for(models: Models, **fields: object) -> Rig:
    """A rig over built models."""
    layout = models.layout
    defaults: dict[str, object] = {
        "num_base_blocks": layout.num_base_blocks,
        "num_extra_blocks": layout.num_extra_blocks,
        "max_model_len": 200,
        "vocab_size": VOCAB_SIZE,
    }
    return Rig(models.target, models.draft, **{**defaults, **fields})  # type: ignore[arg-type]


def answer(models: Models, text: list[int], sampling: SamplingParams) -> list[int]:
    """Plain decoding of one request alone, with no draft at all."""
    rig = Rig(models.target, None, num_base_blocks=24, max_model_len=200, vocab_size=VOCAB_SIZE)
    rig.submit(0, text, sampling)
    rig.run()
    assert rig.end(0).reason in ("length", "stop")
    return rig.tokens(0)


@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_gamma_gives_plain_decodings_answer(
    build: Callable[..., Models], folders: Callable[[str], Path], name: str, temperature: float
) -> None:
    """Gamma 0 to 8, alone: the answer of a worker without any draft."""
    models = build(folders("target"), folders(name))
    sampling = params(temperature=temperature, seed=11, max_tokens=40)
    text = prompt(random.Random(3), 19, VOCAB_SIZE)
    expected = answer(models, text, sampling)
    for gamma in range(9):
        rig = rig_for(models, gamma=gamma)
        rig.submit(0, text, sampling)
        rig.run()
        assert rig.tokens(0) == expected
        usage = rig.end(0).usage
        if name == "target":
            assert usage.num_accepted_tokens == usage.num_draft_tokens
            assert usage.num_draft_tokens > 0 or gamma == 0


@pytest.mark.parametrize(
    ("name", "depth"),
    [
        ("target", 1),
        ("noisy", 0),
        ("noisy", 1),
        ("random", 0),
        pytest.param("target", 0, marks=pytest.mark.slow),
        pytest.param("random", 1, marks=pytest.mark.slow),
    ],
)
def test_mixed_batches(
    build: Callable[..., Models], folders: Callable[[str], Path], name: str, depth: int
) -> None:
    """Random gammas, chunks, prefix hits and preemptions change no answer."""
    models = build(folders("target"), folders(name))
    rng = random.Random(f"mixed {name}")
    stem = prompt(rng, 70, VOCAB_SIZE)
    requests: Requests = {
        request_id: (
            stem[: rng.randint(1, 70)] + prompt(rng, rng.randint(0, 20), VOCAB_SIZE),
            params(
                temperature=rng.choice([0.0, 0.8, 1.0]),
                top_p=rng.choice([1.0, 0.9]),
                seed=rng.getrandbits(63),
                max_tokens=rng.randint(20, 90),
            ),
        )
        for request_id in range(10)
    }
    rig = rig_for(
        models,
        gamma=lambda: rng.choice([0, 0, 1, 2, 3, 5, 8]),
        num_base_blocks=13,
        num_extra_blocks=0,
        max_num_seqs=6,
        max_num_batched_tokens=48,
        max_catchup_tokens=24,
        depth=depth,
    )
    for request_id, (text, sampling) in requests.items():
        rig.submit(request_id, text, sampling)
        for _ in range(rng.randint(0, 6)):
            rig.step()
    rig.run()
    assert rig.scheduler.num_preemptions > 0
    assert sum(rig.end(request_id).usage.num_cached_tokens for request_id in requests) > 0
    for request_id, (text, sampling) in requests.items():
        assert rig.tokens(request_id) == answer(models, text, sampling)
        usage = rig.end(request_id).usage
        if name == "target":
            assert usage.num_accepted_tokens == usage.num_draft_tokens


@pytest.mark.parametrize("name", ["target", "noisy"])
def test_extra_drafts_change_no_answer(
    build: Callable[..., Models], folders: Callable[[str], Path], name: str
) -> None:
    """0 to 3 extra drafts, 1 to 8 rows with caps of their own: what plain decoding says."""
    models = build(folders("target"), folders(name))
    rng = random.Random(f"extra {name}")
    requests: Requests = {
        request_id: (
            prompt(rng, rng.randint(1, 20), VOCAB_SIZE),
            params(
                temperature=[0.0, 0.8, 1.0][request_id % 3],
                top_p=rng.choice([1.0, 0.9]),
                seed=rng.getrandbits(63),
                max_tokens=rng.randint(10, 30),
                max_gamma=[None, 1, None, 4, None, 0, 2, None][request_id],
            ),
        )
        for request_id in range(8)
    }
    expected = {n: answer(models, *request) for n, request in requests.items()}
    num_dropped = 0
    for extra in range(4):
        for num_rows in (1, 2, 5, 8) if extra else (8,):
            rig = rig_for(models, gamma=2, extra=extra, prefix_cache=False)
            for request_id in range(num_rows):
                rig.submit(request_id, *requests[request_id])
            rig.run()
            assert {n: rig.tokens(n) for n in range(num_rows)} == dict(
                list(expected.items())[:num_rows]
            )
            for done in rig.done:
                num_made = sum(row.gamma for row in done.plan.rows)
                num_verified = sum(result.num_drafts for result in done.rows)
                num_drafting = sum(1 for row in done.plan.rows if row.gamma)
                assert num_verified == min(num_made, done.plan.gamma * num_drafting)
                num_dropped += num_made - num_verified
    assert num_dropped > 50


def test_the_tail_comes_and_goes(
    build: Callable[..., Models], folders: Callable[[str], Path]
) -> None:
    """While the draft's bytes hold KV, and after they are back, answers and acceptance stay."""
    models = build(folders("target"), folders("target"))
    assert models.draft is not None
    assert models.pool is not None
    image = torch.frombuffer(
        bytearray(Path(models.pool.image_path).read_bytes()), dtype=torch.uint8
    )
    layout, memory, rig = models.layout, models.arena.memory, rig_for(models, gamma=3)
    rng = random.Random(8)
    requests: Requests = {
        request_id: (prompt(rng, 60, VOCAB_SIZE), params(seed=request_id, max_tokens=90))
        for request_id in range(6)
    }
    for request_id, (text, sampling) in requests.items():
        rig.submit(request_id, text, sampling)
    for _ in range(10):
        rig.step()

    models.draft.drop()
    rig.blocks.expand()
    rig.scheduler.drafting.set_resident(False)
    memory[layout.tail_offset :].view(torch.float32).fill_(float("nan"))
    while not rig.blocks.live_tail_blocks():
        assert rig.step()
    for _ in range(20):
        rig.step()
    before = rig.scheduler.num_draft_tokens

    rig.blocks.close_tail()
    moves = None
    while moves is None:
        live = rig.blocks.live_tail_blocks()
        destinations = rig.blocks.reserve(len(live))
        if destinations is not None:
            moves = dict(zip(live, destinations, strict=True))
        else:
            assert rig.step()
    for source, destination in moves.items():
        start, end = layout.block_offset(source), layout.block_offset(destination)
        size = layout.block_bytes
        memory[end : end + size] = memory[start : start + size].clone()
    rig.scheduler.rename(moves)
    rig.blocks.give_tail_to_draft()
    memory[layout.tail_offset :].view(torch.float32).fill_(float("nan"))
    memory[layout.image_offset : layout.image_offset + layout.image_bytes] = image
    models.draft.restore()
    rig.scheduler.drafting.set_resident(True)
    rig.scheduler.check_integrity()
    rig.run()

    assert moves
    assert rig.scheduler.num_draft_tokens > before
    assert rig.scheduler.num_accepted_tokens == rig.scheduler.num_draft_tokens
    for request_id, (text, sampling) in requests.items():
        assert rig.tokens(request_id) == answer(models, text, sampling)


def test_a_stop_string_ends_the_answer_within_a_block(
    build: Callable[..., Models], folders: Callable[[str], Path]
) -> None:
    """A stop string completed by any token ends the row with that token, whatever gamma is."""
    from worker.text.detokenizer import Detokenizer

    models = build(folders("target"), folders("target"))
    tokenizer = Tokenizer.load(folders("target"))
    text = prompt(random.Random(4), 12, 300)
    free = answer(models, text, params(max_tokens=24, ignore_eos=True))
    for k in (2, 4, 7, 8, 11):
        stop = tokenizer.decode(free[: k + 1])[-2:]
        if "�" in stop or not stop:
            continue
        count = next(n for n in range(1, 25) if stop in tokenizer.decode(free[:n]))
        for gamma in range(9):
            rig = rig_for(models, gamma=gamma)
            sampling = params(max_tokens=24, ignore_eos=True, stop=(stop,))
            rig.submit(0, text, sampling, Detokenizer(tokenizer, (stop,)))
            rig.run()
            assert rig.tokens(0) == free[:count]
            assert rig.end(0).reason == "stop"


def test_padded_vocabulary_is_never_sampled(
    build: Callable[..., Models], folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """Pad ids, whose logits are the largest, appear in no answer and no draft."""
    from tiny import tiny_folder

    target = tiny_folder(tmp_path, "target", vocab_size=384)
    models = build(target, tiny_folder(tmp_path, "noisy", vocab_size=448))
    gammas = random.Random(448)
    for temperature in (0.0, 1.0):
        rig = rig_for(models, gamma=lambda: gammas.randint(0, 8))
        rig.submit(0, [5, 6, 7], params(temperature=temperature, max_tokens=60, ignore_eos=True))
        rig.run()
        assert len(rig.tokens(0)) == 60
        assert max(rig.tokens(0)) < VOCAB_SIZE
        assert rig.scheduler.num_accepted_tokens > 0
