"""Penalties, bias, min_tokens and log-probabilities through the whole engine on a device."""

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

from worker.config import WorkerConfig
from worker.messages import SamplingParams
from worker.model import build
from worker.model.build import Models, build_models
from worker.model.device import Placement

VOCAB = 320
EOS = (2,)
HAS_GPU = torch.cuda.is_available()
CONFIG = WorkerConfig(
    device="cuda" if HAS_GPU else "cpu",
    dtype="float32",
    build="eager",
    arithmetic="exact",
    num_threads=1,
    num_blocks=24,
    max_num_seqs=3,
    max_num_batched_tokens=48,
    max_catchup_tokens=32,
    max_model_len=96,
    gamma=0,
)
Asked = dict[int, tuple[list[int], SamplingParams]]
pytestmark = [
    pytest.mark.slow if not HAS_GPU else pytest.mark.gpu,  # interpreted slowly
    # Tokens of nobody multiply whatever their memory holds.
    pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning"),
]


def built(target: Path, draft: Path | None, *, kernels: bool, **changes: object) -> Models:
    """Models over kernels, whose products prove no bits where interpreted, or a CPU's."""
    device = torch.device("cuda" if HAS_GPU and kernels else "cpu")
    config = dataclasses.replace(CONFIG, device=device.type, **changes)
    with pytest.MonkeyPatch.context() as patch:
        if not HAS_GPU:
            patch.setattr(build, "prove_exact", lambda *args, **kwargs: None)
        placement = Placement(device, kernels=kernels)
        return build_models(config, target, draft, lambda stage, detail: None, placement)


@pytest.fixture(scope="module")
def on_cpu(tiny: TinyModels) -> Iterator[Models]:
    """A target on a CPU, without a draft."""
    models = built(tiny.target, None, kernels=False, proposer="none")
    yield models
    models.close()


@pytest.fixture(scope="module")
def pair(tiny: TinyModels) -> Iterator[Models]:
    """A target and a noisy copy as its draft, over kernels."""
    models = built(tiny.target, tiny.noisy, kernels=True)
    yield models
    models.close()


def asked(seed: int, count: int, max_tokens: int) -> Asked:
    """Requests that set nearly all there is to set, and one in four that sets nothing."""
    rng = random.Random(seed)
    requests: Asked = {}
    for number in range(count):
        bias = {rng.randrange(VOCAB): rng.choice([-8.0, -1.5, 2.0]) for _ in range(5)} | {2: 6.0}
        asking = number % 4 != 3
        sampling = SamplingParams(
            temperature=rng.choice([0.0, 0.9]),
            top_p=rng.choice([1.0, 0.9]),
            seed=rng.getrandbits(64),
            max_tokens=max_tokens,
            ignore_eos=not asking,
            min_tokens=rng.choice([1, 3, max_tokens - 1]) if asking else 0,
            stop_token_ids=tuple(rng.sample(range(VOCAB), 3)) if asking else (),
            repetition_penalty=rng.choice([1.0, 1.3, 0.7]) if asking else 1.0,
            presence_penalty=rng.choice([0.0, 1.5, -0.8]) if asking else 0.0,
            frequency_penalty=rng.choice([0.0, 0.9, -0.7]) if asking else 0.0,
            logit_bias=tuple(sorted(bias.items())) if asking else (),
            num_logprobs=[2, -1, 0, -1][number % 4],
            num_prompt_logprobs=[1, -1, -1, -1][number % 4],
        )
        length = [6, 3, 18, 40][number % 4]
        requests[number] = ([rng.randrange(VOCAB) for _ in range(length)], sampling)
    return requests


def answers(config: WorkerConfig, models: Models, requests: Asked) -> dict[int, Answer]:
    """All requests together."""
    engine = DeviceEngine(config, models, vocab_size=VOCAB, eos=EOS)
    for number, (prompt, sampling) in requests.items():
        engine.submit(number, prompt, sampling)
    return engine.run()


def alone(models: Models, requests: Asked) -> dict[int, Answer]:
    """Each request by itself, without drafts."""
    config = dataclasses.replace(CONFIG, device="cpu", proposer="none")
    return {
        number: answers(config, models, {number: request})[number]
        for number, request in requests.items()
    }


def check(found: dict[int, Answer], expected: dict[int, Answer], requests: Asked) -> None:
    """Answers, ends and log-probabilities are equal, the latter but for rounding."""
    assert set(found) == set(expected)
    for number, answer in expected.items():
        got, sampling = found[number], requests[number][1]
        assert got.token_ids == answer.token_ids
        assert got.finished is not None
        assert answer.finished is not None
        assert got.finished.reason == answer.finished.reason
        num_prompt = len(requests[number][0])
        for ours, theirs, top, count in (
            (got.logprobs, answer.logprobs, sampling.num_logprobs, len(got.token_ids)),
            (
                got.prompt_logprobs,
                answer.prompt_logprobs,
                sampling.num_prompt_logprobs,
                num_prompt - 1,
            ),
        ):
            assert len(ours.chosen) == (count if top >= 0 else 0)
            assert ours.chosen == pytest.approx(theirs.chosen, abs=1e-4)
            assert ours.top_ids == theirs.top_ids
            for one, other in zip(ours.top, theirs.top, strict=True):
                assert one == pytest.approx(other, abs=1e-4)


def test_requests_that_ask_for_everything_answer_as_on_a_cpu(on_cpu: Models, pair: Models) -> None:
    """Together, with drafts, in slots used again: a CPU's tokens, ends and log-probabilities."""
    requests = asked(5, 8, 12)
    expected = alone(on_cpu, requests)
    unasked = {n: (p, without_processors(s)) for n, (p, s) in requests.items()}
    plain = alone(on_cpu, unasked)
    assert sum(expected[n].token_ids != plain[n].token_ids for n in requests) >= 4
    for gamma in range(9):
        found = answers(dataclasses.replace(CONFIG, gamma=gamma), pair, requests)
        check(found, expected, requests)
        drafted = [answer.finished.usage.num_draft_tokens for answer in found.values()]
        assert (sum(drafted) > 0) == (gamma > 0)


def without_processors(sampling: SamplingParams) -> SamplingParams:
    """The same request without anything that changes logits."""
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
    )


def test_preempted_and_resumed_rows_count_what_they_said(on_cpu: Models, tiny: TinyModels) -> None:
    """With blocks for some of the rows, and with answers begun elsewhere: the same answers."""
    models = built(tiny.target, tiny.noisy, kernels=True, num_blocks=7)
    try:
        requests = {
            number: (
                [*range(10, 22), number],
                SamplingParams(
                    temperature=0.0,
                    seed=1,
                    max_tokens=26,
                    ignore_eos=True,
                    repetition_penalty=1.2,
                    frequency_penalty=0.4,
                    num_logprobs=1,
                ),
            )
            for number in range(4)
        }
        expected = alone(on_cpu, requests)
        config = dataclasses.replace(CONFIG, num_blocks=7, gamma=2)
        engine = DeviceEngine(config, models, vocab_size=VOCAB, eos=EOS)
        for number, (prompt, sampling) in requests.items():
            engine.submit(number, prompt, sampling)
        check(engine.run(), expected, requests)
        assert engine.engine.scheduler.num_preemptions > 0
        for number, (prompt, sampling) in requests.items():
            engine.submit(10 + number, prompt, sampling, tuple(expected[number].token_ids[:9]))
        found = engine.run()
        for number in requests:
            assert found[10 + number].token_ids == expected[number].token_ids[9:]
    finally:
        models.close()
