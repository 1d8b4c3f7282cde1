"""Log-probabilities of answers and prompts: the target's own, once a token, in any company."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_rig import Columns, Rig, fakes, oracle, params, prompt
from fake_forward import Kind
from transformers import AutoModelForCausalLM

from worker.engine.plan import MAX_SCORED
from worker.model.build import Models

VOCAB_SIZE = 320
PENALIZED: dict[str, object] = {
    "temperature": 1.0,
    "seed": 3,
    "repetition_penalty": 1.4,
    "frequency_penalty": 0.5,
    "logit_bias": ((9, 3.0),),
    "min_tokens": 5,
}


def rig_for(models: Models, **fields: object) -> Rig:
    """A rig over built models."""
    defaults: dict[str, object] = {
        "num_base_blocks": models.layout.num_base_blocks,
        "max_model_len": 200,
        "vocab_size": VOCAB_SIZE,
    }
    return Rig(models.target, models.draft, **{**defaults, **fields})  # type: ignore[arg-type]


def check(columns: Columns, exact: torch.Tensor, token_ids: list[int], num_top: int) -> None:
    """Compare with log-probabilities [m, vocab] of a pass over the whole text."""
    assert len(columns.chosen) == len(columns.top) == len(token_ids)
    of_tokens = exact[range(len(token_ids)), token_ids].numpy()
    np.testing.assert_allclose(columns.chosen, of_tokens, atol=1e-4)
    best = exact.topk(num_top, dim=1)
    np.testing.assert_allclose(columns.top, best.values.numpy(), atol=1e-4)
    for ids, values in zip(columns.top_ids, exact, strict=True):
        assert len(set(ids)) == num_top
        np.testing.assert_allclose(
            values[ids].numpy(), np.sort(values[ids].numpy())[::-1], atol=1e-4
        )


def test_they_are_the_raw_targets(build: Callable[..., Models], tiny: object) -> None:
    """Penalized, biased and sampled at every gamma, beside others: a teacher-forced pass's."""
    folder: Path = tiny.target  # type: ignore[attr-defined]
    models = build(folder, tiny.noisy)  # type: ignore[attr-defined]
    text = prompt(random.Random(4), 23, VOCAB_SIZE)
    sampling = params(max_tokens=24, num_logprobs=3, num_prompt_logprobs=2, **PENALIZED)
    found: list[Columns] = []
    for gamma in (0, 1, 3, 8):
        rig = rig_for(models, gamma=gamma, max_num_batched_tokens=17)
        rig.submit(1, text[:9], params(max_tokens=30, temperature=0.5))
        rig.submit(0, text, sampling)
        rig.submit(2, text, params(max_tokens=9, num_logprobs=0))
        rig.run()
        found += [rig.answers[0].logprobs, rig.answers[0].prompt_logprobs]
        assert len(rig.answers[2].logprobs.chosen) == 9
        assert rig.answers[1].logprobs == Columns()
    # To the bit: neither gamma nor chunks nor neighbours are in them.
    assert all(columns == found[index % 2] for index, columns in enumerate(found))
    whole = text + rig.tokens(0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        exact = model(torch.tensor([whole])).logits[0, :, :VOCAB_SIZE].double().log_softmax(1)
    check(found[0], exact[len(text) - 1 : -1], rig.tokens(0), 3)
    check(found[1], exact[: len(text) - 1], text[1:], 2)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("draft", ["target", "noisy", "random"])
def test_every_gamma_and_draft_tells_the_same(draft: Kind, depth: int) -> None:
    """Accepted, recovered or bonus token: what the target alone says of it after its prefix."""
    target, model = fakes(draft)
    text = prompt(random.Random(5), 12)
    sampling = params(max_tokens=20, num_logprobs=2, num_prompt_logprobs=1, **PENALIZED)
    token_ids, _ = oracle(target, text, sampling)
    whole = text + token_ids
    exact = [_log_softmax(target.logits(whole[:n])) for n in range(1, len(whole))]
    told = [float(exact[n][whole[n + 1]]) for n in range(len(exact))]
    for gamma in range(9):
        rig = Rig(target, model, gamma=gamma, depth=depth)
        rig.submit(0, text, sampling)
        rig.run()
        assert rig.tokens(0) == token_ids
        answer = rig.answers[0]
        np.testing.assert_allclose(answer.prompt_logprobs.chosen, told[:11], atol=1e-4)
        np.testing.assert_allclose(answer.logprobs.chosen, told[11:], atol=1e-4)
        best = [sorted(np.argsort(row)[-2:].tolist()) for row in exact[11:]]
        assert [sorted(ids) for ids in answer.logprobs.top_ids] == best


@pytest.mark.parametrize("depth", [0, 1])
def test_a_scored_prompt_takes_nothing_from_the_cache(depth: int) -> None:
    """Though its prefix is there, every token but the first is scored; others still hit."""
    target, draft = fakes("target")
    rig = Rig(target, draft, gamma=2, depth=depth)
    text = prompt(random.Random(6), 70)
    for request_id, num_top in enumerate((-1, 1, 1, -1)):
        rig.submit(request_id, text, params(max_tokens=5, num_prompt_logprobs=num_top))
        rig.run()
    cached = [rig.end(request_id).usage.num_cached_tokens for request_id in range(4)]
    assert cached == [0, 0, 0, 64]
    assert len(rig.answers[1].prompt_logprobs.chosen) == 69
    assert rig.answers[1].prompt_logprobs == rig.answers[2].prompt_logprobs
    assert rig.answers[0].prompt_logprobs == Columns()
    expected = [_log_softmax(target.logits(text[: i + 1]))[text[i + 1]] for i in range(69)]
    np.testing.assert_allclose(rig.answers[1].prompt_logprobs.chosen, expected, atol=1e-4)


@pytest.mark.parametrize("depth", [0, 1])
def test_long_prompts_are_scored_in_bounded_parts(depth: int) -> None:
    """However much a step may take, it keeps so many logits at most; others are not held up."""
    target, _ = fakes(None, num_base_blocks=96)
    rig = Rig(
        target,
        None,
        num_base_blocks=96,
        max_model_len=700,
        max_num_batched_tokens=900,
        depth=depth,
    )
    rng = random.Random(7)
    texts = [prompt(rng, length) for length in (400, 300, 90)]
    for request_id, text in enumerate(texts):
        top = 0 if request_id < 2 else -1
        rig.submit(request_id, text, params(max_tokens=4, num_prompt_logprobs=top))
    rig.run()
    kept = [sum(len(row.scored) for row in done.plan.rows) for done in rig.done]
    assert max(kept) == MAX_SCORED
    assert sum(kept) == 399 + 299
    for request_id in (0, 1):
        num_tokens = len(texts[request_id])
        assert len(rig.answers[request_id].prompt_logprobs.chosen) == num_tokens - 1
    assert len(rig.tokens(2)) == 4


@pytest.mark.parametrize("depth", [0, 1])
def test_prompts_that_wait_to_be_scored_hold_nobody_up(depth: int) -> None:
    """A row behind several has its first token with the first step, and they their scores."""
    target, _ = fakes(None, num_base_blocks=128)
    rig = Rig(
        target,
        None,
        num_base_blocks=128,
        max_model_len=500,
        max_num_batched_tokens=2048,
        depth=depth,
    )
    rng = random.Random(9)
    for request_id in range(4):
        text = prompt(rng, 400)
        rig.submit(request_id, text, params(max_tokens=2, num_prompt_logprobs=0))
    rig.submit(4, prompt(rng, 10), params(max_tokens=2))
    for _ in range(1 + depth):
        rig.step()
    assert len(rig.tokens(4)) == 1
    rig.run()
    for request_id in range(4):
        assert len(rig.answers[request_id].prompt_logprobs.chosen) == 399


@pytest.mark.parametrize("depth", [0, 1])
def test_preemption_repeats_no_logprob(depth: int) -> None:
    """Rows sent back in the middle of prompt or answer deliver each of theirs once."""
    rng = random.Random(8)
    texts = [prompt(rng, 40) for _ in range(5)]
    sampling = params(max_tokens=40, num_prompt_logprobs=1, num_logprobs=1)
    target, draft = fakes("noisy", num_base_blocks=9)
    rig = Rig(target, draft, gamma=3, num_base_blocks=9, max_num_batched_tokens=12, depth=depth)
    for request_id, text in enumerate(texts):
        rig.submit(request_id, text, sampling)
    rig.run()
    assert rig.scheduler.num_preemptions > 0
    for request_id, text in enumerate(texts):
        answer = rig.answers[request_id]
        whole = text + answer.token_ids
        expected = [_log_softmax(target.logits(whole[: i + 1]))[whole[i + 1]] for i in range(79)]
        got = answer.prompt_logprobs.chosen + answer.logprobs.chosen
        np.testing.assert_allclose(got, expected, atol=1e-4)


def test_a_resumed_answer_tells_only_what_is_new() -> None:
    """Who has the first tokens has the prompt's log-probabilities, which come before them."""
    target, draft = fakes("target")
    text = prompt(random.Random(9), 30)
    sampling = params(max_tokens=20, num_prompt_logprobs=1, num_logprobs=1)
    rig = Rig(target, draft, gamma=3)
    rig.submit(0, text, sampling)
    rig.run()
    rig.submit(1, text, sampling, prior=rig.tokens(0)[:8])
    rig.run()
    assert rig.answers[1].prompt_logprobs == Columns()
    assert rig.answers[1].logprobs.chosen == rig.answers[0].logprobs.chosen[8:]


@pytest.mark.parametrize("place", [3, 29])
def test_a_prompt_whose_logits_are_no_numbers_ends_its_request(place: int) -> None:
    """Wherever in the prompt they are, nothing is reported of them, and others go on."""
    target, draft = fakes("target")
    text, other = prompt(random.Random(10), 30), prompt(random.Random(11), 12)
    target.poisoned_prefixes.add(tuple(text[: place + 1]))
    rig = Rig(target, draft, gamma=3)
    rig.submit(0, text, params(num_prompt_logprobs=0))
    rig.submit(1, other, params(max_tokens=12, num_prompt_logprobs=0))
    rig.run()
    assert rig.end(0).reason == "error"
    assert "not numbers" in rig.end(0).error
    assert rig.end(1).reason == "length"
    assert len(rig.answers[1].prompt_logprobs.chosen) == 11


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    return wide - np.log(np.exp(wide).sum())
