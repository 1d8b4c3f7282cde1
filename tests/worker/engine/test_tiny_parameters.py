"""All parameters at once on real forwards: with drafts, in company and resumed, as without."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_rig import Rig, params, prompt

from worker.messages import SamplingParams
from worker.model.build import Models
from worker.text.detokenizer import Detokenizer
from worker.text.tokenizer import Tokenizer

DRAFTS = ["target", "noisy", "random"]
VOCAB_SIZE = 320


@pytest.fixture
def folders(tiny: object) -> Callable[[str], Path]:
    """Folder of the target or of a draft, by name."""
    return lambda name: getattr(tiny, name)  # type: ignore[no-any-return]


def rig_for(models: Models, **fields: object) -> Rig:
    """A rig over built models."""
    defaults: dict[str, object] = {
        "num_base_blocks": models.layout.num_base_blocks,
        "max_model_len": 200,
        "vocab_size": VOCAB_SIZE,
        "eos_token_ids": (2,),
    }
    draft = fields.pop("draft", models.draft)
    return Rig(models.target, draft, **{**defaults, **fields})  # type: ignore[arg-type]


def everything(rng: random.Random, tokenizer: Tokenizer, num_stops: int) -> SamplingParams:
    """A request that sets what there is to set; one of its stop strings is likely to come."""
    return params(
        temperature=rng.choice([0.0, 0.7, 1.0, 1.5]),
        top_p=rng.choice([1.0, 0.9]),
        top_k=rng.choice([0, 30]),
        min_p=rng.choice([0.0, 0.02]),
        seed=rng.getrandbits(63),
        max_tokens=rng.randint(12, 24),
        min_tokens=rng.choice([0, 4, 11]),
        repetition_penalty=rng.choice([1.0, 1.05, 1.5, 0.8]),
        presence_penalty=rng.choice([0.0, 0.9, -0.5]),
        frequency_penalty=rng.choice([0.0, 0.6, -0.3]),
        logit_bias=tuple((i, rng.uniform(-5, 5)) for i in sorted(rng.sample(range(VOCAB_SIZE), 5))),
        stop_token_ids=tuple(rng.sample(range(VOCAB_SIZE), 2 * num_stops)),
        stop=tuple(
            tokenizer.decode([i]) or "x" for i in rng.sample(range(200, VOCAB_SIZE), num_stops)
        ),
        num_logprobs=rng.choice([-1, 0, 2]),
        num_prompt_logprobs=rng.choice([-1, -1, 1]),
    )


@pytest.mark.parametrize("draft", DRAFTS)
def test_every_gamma_answers_alike_in_company(
    build: Callable[..., Models], folders: Callable[[str], Path], draft: str
) -> None:
    """Requests of all kinds together, gamma 0 to 8: each as alone without a draft."""
    models = build(folders("target"), folders(draft))
    tokenizer = Tokenizer.load(folders("target"))
    rng = random.Random("everything")
    requests = [
        (prompt(rng, rng.randint(2, 30), VOCAB_SIZE), everything(rng, tokenizer, num_stops))
        for num_stops in (0, 3, 6, 9)
    ]

    def submit(rig: Rig, request_id: int, num_prior: int = 0) -> None:
        text, sampling = requests[request_id]
        detector = Detokenizer(tokenizer, sampling.stop, sampling.min_tokens)
        prior = expected[request_id].tokens(request_id)[:num_prior] if num_prior else []
        rig.submit(request_id, text, sampling, detector, prior)

    expected: list[Rig] = []
    for request_id in range(len(requests)):
        rig = rig_for(models, draft=None)
        submit(rig, request_id)
        rig.run()
        expected.append(rig)
    assert {rig.end(i).reason for i, rig in enumerate(expected)} == {"stop", "length"}
    for gamma in range(9) if draft == "noisy" else (1, 5, 8):
        rig = rig_for(models, gamma=gamma, max_num_batched_tokens=64, max_num_seqs=3)
        for request_id in range(len(requests)):
            most = len(expected[request_id].tokens(request_id)) - 1
            submit(rig, request_id, rng.randint(0, most) if gamma % 3 == 2 else 0)
            rig.step()
        rig.run()
        for request_id, alone in enumerate(expected):
            tokens, whole = rig.tokens(request_id), alone.tokens(request_id)
            assert tokens == whole[len(whole) - len(tokens) :]
            end = rig.end(request_id)
            assert end.reason == alone.end(request_id).reason
            assert end.usage.num_completion_tokens == len(whole)
            logprobs = alone.answers[request_id].logprobs.chosen
            assert rig.answers[request_id].logprobs.chosen == logprobs[-len(tokens) :]
            if draft == "target":
                assert end.usage.num_accepted_tokens == end.usage.num_draft_tokens


def test_a_slight_penalty_changes_no_answer_of_a_hundred(
    build: Callable[..., Models], folders: Callable[[str], Path]
) -> None:
    """Greedy, repetition penalty 1.05: with drafts and without, a hundred answers are equal."""
    models = build(folders("target"), folders("noisy"))
    rng = random.Random(105)
    texts = [prompt(rng, rng.randint(2, 12), VOCAB_SIZE) for _ in range(100)]
    sampling = params(max_tokens=10, repetition_penalty=1.05, ignore_eos=True)
    answers = []
    for gamma in (0, 3):
        rig = rig_for(models, gamma=gamma, max_num_seqs=20, max_num_batched_tokens=128)
        for request_id, text in enumerate(texts):
            rig.submit(request_id, text, sampling)
        rig.run()
        answers.append([rig.tokens(request_id) for request_id in range(100)])
    assert answers[0] == answers[1]
    assert rig.scheduler.num_accepted_tokens > 150


def test_a_stop_string_within_min_tokens_is_text(
    build: Callable[..., Models], folders: Callable[[str], Path]
) -> None:
    """It ends the answer where it occurs again, at every gamma and for every resumed part."""
    models = build(folders("target"), folders("target"))
    tokenizer = Tokenizer.load(folders("target"))
    token = 100  # its text is the stop string, and it is all that the target says
    sampling = params(
        max_tokens=20, min_tokens=6, stop=(tokenizer.decode([token]),), logit_bias=((token, 90.0),)
    )
    for gamma in (0, 1, 3, 8):
        for num_prior in (0, 1, 4, 5):
            rig = rig_for(models, gamma=gamma)
            detector = Detokenizer(tokenizer, sampling.stop, sampling.min_tokens)
            rig.submit(0, [5, 6, 7], sampling, detector, [token] * num_prior)
            rig.run()
            assert rig.tokens(0) == [token] * (6 - num_prior)
            assert rig.end(0).reason == "stop"
