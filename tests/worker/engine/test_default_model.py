"""The default model with its default draft, exact: gamma changes no answer, alone or in a batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from engine_rig import Rig, params

from worker.messages import SamplingParams
from worker.model.build import Models
from worker.model.fetch import default_draft
from worker.text.chat_template import Chat, Message
from worker.text.tokenizer import Tokenizer

QUESTIONS = [
    "What is the capital of France?",
    "Write a short poem about a nightjar, the bird that hunts at dusk.",
]


@pytest.fixture
def models(build: Callable[..., Models], smollm2: Path) -> Models:
    """Target and draft as served by default: exact, bfloat16 where the processor has it."""
    draft = default_draft("smollm2-135m")
    return build(smollm2, draft, dtype="auto", num_threads=2, num_blocks=32, max_model_len=256)


def rig_for(models: Models, vocab_size: int, gamma: int | Callable[[], int]) -> Rig:
    """A rig over the models."""
    return Rig(
        models.target,
        models.draft,
        gamma=gamma,
        num_base_blocks=models.layout.num_base_blocks,
        max_num_batched_tokens=96,
        max_catchup_tokens=128,
        vocab_size=vocab_size,
        eos_token_ids=models.eos_token_ids,
    )


def test_gamma_changes_no_answer(models: Models, smollm2: Path) -> None:
    """Gamma 0, 3 and 8 alone, and a batch of changing gammas, greedy and sampled, some extra."""
    tokenizer = Tokenizer.load(smollm2)
    requests: list[tuple[list[int], SamplingParams]] = [
        (
            tokenizer.encode_chat(Chat([Message("user", question)])),
            params(temperature=temperature, seed=3, max_tokens=16),
        )
        for question in QUESTIONS
        for temperature in (0.0, 1.0)
    ]
    answers = []
    for text, sampling in requests[:2]:
        alone = []
        for gamma in (0, 3, 8):
            rig = rig_for(models, tokenizer.vocab_size, gamma)
            rig.submit(0, text, sampling)
            rig.run()
            alone.append(rig.tokens(0))
        assert alone[0] == alone[1] == alone[2]
        answers.append(alone[0])
    for text, sampling in requests[2:]:
        rig = rig_for(models, tokenizer.vocab_size, 0)
        rig.submit(0, text, sampling)
        rig.run()
        answers.append(rig.tokens(0))
    gammas, extras = iter([0, 3, 8, 1, 5, 0, 2, 4] * 100), iter([0, 1, 2, 3, 2] * 100)
    rig = rig_for(models, tokenizer.vocab_size, lambda: next(gammas))
    rig.extra = lambda: next(extras)
    for request_id, (text, sampling) in enumerate(requests):
        rig.submit(request_id, text, sampling)
        rig.step()
    rig.run()
    assert "Paris" in tokenizer.decode(answers[0])
    assert [rig.tokens(request_id) for request_id in range(len(requests))] == answers
    assert rig.scheduler.num_accepted_tokens > 3
