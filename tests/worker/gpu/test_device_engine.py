"""The whole engine on a device: graphs, draft loop, depth one; on a CPU by the interpreter."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from device_engine import DeviceEngine
from engine_rig import Answer
from tiny import TinyModels

from nightjar.errors import ModelRefused
from worker.config import WorkerConfig
from worker.engine.plan import StepResult
from worker.kernels import sampling_cut
from worker.messages import SamplingParams
from worker.model import build
from worker.model.build import Models, build_models
from worker.model.device import Placement

VOCAB, EOS = 320, 2
SIZE = (5, 12) if torch.cuda.is_available() else (3, 6)  # requests, tokens; interpreted slowly
HAS_GPU = torch.cuda.is_available()
KERNELS = Placement(torch.device("cuda" if HAS_GPU else "cpu"), kernels=True)
CONFIG = WorkerConfig(
    device="cuda" if HAS_GPU else "cpu",
    dtype="float32",
    build="eager",
    arithmetic="exact",
    num_threads=1,
    num_blocks=24,
    max_num_seqs=4,
    max_num_batched_tokens=48,
    max_catchup_tokens=32,
    max_model_len=96,
    gamma=0,
)
INTERPRETED_SLOWLY = pytest.mark.slow if not HAS_GPU else pytest.mark.gpu
# Tokens of nobody multiply whatever their memory holds.
pytestmark = pytest.mark.filterwarnings(
    "ignore:(invalid value|overflow) encountered:RuntimeWarning"
)


def silent(stage: str, detail: str) -> None:
    """Progress that nobody reads."""


def built(target: Path, draft: Path | None, **changes: object) -> Models:
    """Models over kernels; the interpreter's products prove no bits."""
    config = dataclasses.replace(CONFIG, **changes)
    with pytest.MonkeyPatch.context() as patch:
        if not HAS_GPU:
            patch.setattr(build, "prove_exact", lambda *args, **kwargs: None)
        return build_models(config, target, draft, silent, KERNELS)


@pytest.fixture(scope="module")
def plain(tiny: TinyModels) -> Iterator[Models]:
    """A target without a draft."""
    models = built(tiny.target, None, proposer="none")
    yield models
    models.close()


@pytest.fixture(scope="module", params=[pytest.param("target", marks=INTERPRETED_SLOWLY), "noisy"])
def pair(tiny: TinyModels, request: pytest.FixtureRequest) -> Iterator[Models]:
    """The target and a draft: itself, or a noisy copy."""
    models = built(tiny.target, getattr(tiny, request.param))
    yield models
    models.close()


def requests(seed: int, count: int, max_tokens: int) -> dict[int, tuple[list[int], object]]:
    """Random prompts, greedy and sampled; every third request has its logits processed."""
    rng = random.Random(seed)
    asked: dict[int, tuple[list[int], object]] = {}
    for number in range(count):
        more: dict[str, object] = {}
        if number % 3 == 1:
            more = {
                "repetition_penalty": 1.4,
                "presence_penalty": 0.6,
                "frequency_penalty": rng.choice([0.8, -1.2]),
                "logit_bias": ((EOS, 9.0), (7, -3.0), (200, 2.5)),
                "min_tokens": max_tokens - 1,
                "stop_token_ids": (EOS,),
                "num_logprobs": 2,
                "num_prompt_logprobs": 1,
            }
        asked[number] = (
            [rng.randrange(VOCAB) for _ in range([1, 7, 18, 40, 2][number % 5])],
            SamplingParams(
                temperature=rng.choice([0.0, 0.8]),
                top_p=rng.choice([1.0, 0.9]),
                seed=rng.getrandbits(64),
                max_tokens=max_tokens,
                ignore_eos=True,
                **more,  # type: ignore[arg-type]
            ),
        )
    return asked


def alone(plain: Models, asked: dict[int, tuple[list[int], object]]) -> dict[int, Answer]:
    """What plain decoding makes of each request by itself."""
    answers = {}
    for number, (prompt, sampling) in asked.items():
        engine = DeviceEngine(dataclasses.replace(CONFIG, proposer="none"), plain, vocab_size=VOCAB)
        engine.submit(number, prompt, sampling)  # type: ignore[arg-type]
        answers[number] = engine.run()[number]
    return answers


def expected(plain: Models, asked: dict[int, tuple[list[int], object]]) -> dict[int, list[int]]:
    """Answers of plain decoding, each request alone."""
    return {number: answer.token_ids for number, answer in alone(plain, asked).items()}


def test_any_gamma_in_any_batch_gives_plain_decodings_answers(plain: Models, pair: Models) -> None:
    """Requests that arrive together, gamma changing at every step, answer as alone.

    What is reported of tokens and prompts is the same too.
    """
    asked = requests(1, *SIZE)
    by_themselves = alone(plain, asked)
    answers = {number: answer.token_ids for number, answer in by_themselves.items()}
    assert all(len(tokens) == SIZE[1] for tokens in answers.values())
    engine = DeviceEngine(CONFIG, pair, vocab_size=VOCAB)
    rng = random.Random(2)
    for number, (prompt, sampling) in asked.items():
        engine.submit(number, prompt, sampling)  # type: ignore[arg-type]
    for _ in range(400):
        engine.set_gamma(rng.choice([0, 0, 1, 2, 3, 5]))
        engine.engine.turn()
        engine.engine.scheduler.check_integrity()
        if not engine.engine.scheduler.has_work and not engine.channel.inbox:
            break
    found = engine.run()
    assert {number: answer.token_ids for number, answer in found.items()} == answers
    assert len(found[1].logprobs.chosen) == SIZE[1]
    assert len(found[1].prompt_logprobs.chosen) == len(asked[1][0]) - 1
    for number, answer in by_themselves.items():
        for ours, theirs in (
            (found[number].logprobs, answer.logprobs),
            (found[number].prompt_logprobs, answer.prompt_logprobs),
        ):
            assert ours.chosen == pytest.approx(theirs.chosen, abs=1e-4)
            assert ours.top_ids == theirs.top_ids
    drafted = [answer.finished.usage.num_draft_tokens for answer in found.values()]
    accepted = [answer.finished.usage.num_accepted_tokens for answer in found.values()]
    assert sum(drafted) > 0
    if pair.draft_identity == pair.target_identity:
        assert accepted == drafted


@pytest.mark.parametrize("size", [(2, 4), pytest.param((7, 12), marks=INTERPRETED_SLOWLY)])
def test_drafts_above_gamma_change_no_answer(
    plain: Models, pair: Models, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The likeliest of more drafts are verified, as many as planned, and answers stay."""
    asked = requests(4, *size)
    answers = expected(plain, asked)
    engine = DeviceEngine(CONFIG, pair, vocab_size=VOCAB)
    scheduler, steps = engine.engine.scheduler, list[StepResult]()
    commit = scheduler.commit
    monkeypatch.setattr(scheduler, "commit", lambda done: (steps.append(done), commit(done))[1])
    engine.set_gamma(1, num_extra_drafts=2)
    for number, (prompt, sampling) in asked.items():
        engine.submit(number, prompt, sampling)  # type: ignore[arg-type]
        if number > 1:  # prompts run beside rows that draft
            engine.engine.turn()
    found = engine.run()
    assert {number: answer.token_ids for number, answer in found.items()} == answers
    num_dropped = 0
    for done in steps:
        made = [row.gamma for row in done.plan.rows]
        verified = [result.num_drafts for result in done.rows]
        assert all(few <= many for few, many in zip(verified, made, strict=True))
        assert sum(verified) == done.plan.num_verified
        assert sum(done.reached) <= sum(verified)
        num_dropped += sum(made) - sum(verified)
        if pair.draft_identity == pair.target_identity:
            assert [result.num_accepted for result in done.rows] == verified
    assert num_dropped > 0


@INTERPRETED_SLOWLY
def test_preempted_rows_and_prefix_hits_answer_the_same(plain: Models, tiny: TinyModels) -> None:
    """With blocks for half of what four rows need, answers are those of a request alone."""
    models = built(tiny.target, tiny.noisy, num_blocks=7)
    try:
        asked = {
            number: (
                [*range(12), number // 2],
                SamplingParams(temperature=0.0, seed=1, max_tokens=26, ignore_eos=True),
            )
            for number in range(4)
        }
        answers = expected(plain, asked)  # type: ignore[arg-type]
        config = dataclasses.replace(CONFIG, num_blocks=7, gamma=2)
        engine = DeviceEngine(config, models, vocab_size=VOCAB)
        for number, (prompt, sampling) in asked.items():
            engine.submit(number, prompt, sampling)
        found = engine.run()
        assert {number: answer.token_ids for number, answer in found.items()} == answers
        assert engine.engine.scheduler.num_preemptions > 0
    finally:
        models.close()


def test_ngrams_are_verified_on_the_device(plain: Models) -> None:
    """Drafts that the host looks up change no answer, some are accepted, and no cache is filled."""
    prompt = [3, 4, 5] * 3
    asked = {0: (prompt, SamplingParams(temperature=0.0, seed=1, max_tokens=6, ignore_eos=True))}
    answers = expected(plain, asked)  # type: ignore[arg-type]
    config = dataclasses.replace(CONFIG, proposer="ngram", gamma=3)
    engine = DeviceEngine(config, plain, vocab_size=VOCAB)
    engine.submit(0, *asked[0])
    found = engine.run()[0]
    assert found.token_ids == answers[0]
    assert found.finished.usage.num_draft_tokens > 0
    assert engine.engine.scheduler.blocks.draft.computed([0], 0) == (0, 0)


def test_a_vocabulary_that_sampling_cannot_take_is_refused(
    plain: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sentence names both sizes and what serves the model."""
    monkeypatch.setattr(sampling_cut, "MAX_VOCAB_SIZE", VOCAB - 1)
    config = dataclasses.replace(CONFIG, proposer="none")
    with pytest.raises(ModelRefused, match=f"{VOCAB} tokens.* up to {VOCAB - 1}: say --device=cpu"):
        DeviceEngine(config, plain, vocab_size=VOCAB)
