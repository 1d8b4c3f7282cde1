"""Every sampling parameter means the same at every draft position as without any draft."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable

import pytest
from engine_rig import Rig, fakes, oracle, params, prompt
from fake_forward import Kind

from worker.messages import SamplingParams

DRAFTS: list[Kind] = ["target", "noisy", "random"]
GAMMAS = range(9)
TEXT = prompt(random.Random(21), 18)
EVERYTHING: dict[str, object] = {
    "repetition_penalty": 1.2,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "logit_bias": ((3, 2.5), (17, -6.0)),
    "min_tokens": 9,
    "stop_token_ids": (3, 8),
    "num_logprobs": 2,
}


def answers(
    draft: Kind, sampling: SamplingParams, depth: int, text: list[int] = TEXT, **fields: object
) -> list[Rig]:
    """Rigs that have answered, one for each gamma."""
    rigs = []
    for gamma in GAMMAS:
        target, model = fakes(draft, window=fields.get("window", 0))  # type: ignore[arg-type]
        rig = Rig(target, model, gamma=gamma, depth=depth)
        rig.submit(0, text, sampling)
        rig.run()
        rigs.append(rig)
    return rigs


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1.1},
        {"repetition_penalty": 1.5, "min_p": 0.3, "temperature": 1.2},
        {"frequency_penalty": 2.0},
        {"temperature": 5e-324, "presence_penalty": -1.0},
        {"repetition_penalty": 0.7, "temperature": 1.0},
        {"frequency_penalty": -2.0, "temperature": 0.8},
        {"presence_penalty": 1.5, "logit_bias": ((0, 3.0), (39, -100.0)), "top_p": 0.9},
        {**EVERYTHING, "temperature": 0.9, "top_k": 20, "min_p": 0.01},
    ],
    ids=str,
)
def test_every_gamma_gives_plain_decodings_answer(
    draft: Kind, fields: dict[str, object], depth: int
) -> None:
    """A target that repeats itself is penalized position by position, in drafts as in samples."""
    sampling = params(max_tokens=30, seed=7, **fields)
    target, _ = fakes(None, window=2)
    text = [5, 5, 5, 5] if fields.get("repetition_penalty") == 1.5 else TEXT
    expected, reason = oracle(target, text, sampling)
    for rig in answers(draft, sampling, depth, text, window=2):
        assert rig.tokens(0) == expected
        assert rig.end(0).reason == reason
        usage = rig.end(0).usage
        if draft == "target":  # it proposes under the same processors
            assert usage.num_accepted_tokens == usage.num_draft_tokens


def test_frequency_penalties_of_both_signs_do_what_they_say() -> None:
    """Rewarded, one token takes over; punished, tokens hardly recur; with drafts and without."""
    most = {}
    text = [5, 5, 5, 5]
    for penalty in (-2.0, 0.0, 2.0):
        sampling = params(max_tokens=30, frequency_penalty=penalty)
        expected, _ = oracle(fakes(None, window=1)[0], text, sampling)
        most[penalty] = Counter(expected).most_common(1)[0][1]
        for draft in DRAFTS:
            for rig in answers(draft, sampling, 0, text, window=1):
                assert rig.tokens(0) == expected
    assert most[2.0] < most[0.0] < most[-2.0]


@pytest.mark.parametrize("depth", [0, 1])
def test_no_stop_before_min_tokens(depth: int) -> None:
    """EOS, wherever plain decoding would end, is masked until min_tokens and allowed after."""
    target, _ = fakes(None)
    free, _ = oracle(target, TEXT, params(max_tokens=30))
    for k in (0, 3):
        for how in ("eos", "stop id"):
            eos = (free[k],) if how == "eos" else ()
            sampling = params(max_tokens=20, min_tokens=8, stop_token_ids=() if eos else (free[k],))
            expected, reason = oracle(target, TEXT, sampling, eos_token_ids=eos)
            assert free[k] not in expected[:8]
            for draft in DRAFTS:
                for gamma in GAMMAS:
                    rig = Rig(*fakes(draft), gamma=gamma, eos_token_ids=eos, depth=depth)
                    rig.submit(0, TEXT, sampling)
                    rig.run()
                    assert (rig.tokens(0), rig.end(0).reason) == (expected, reason)


def test_an_answer_may_end_right_after_min_tokens() -> None:
    """A token that is likeliest everywhere ends the answer as its token min_tokens + 1."""
    sampling = params(max_tokens=40, min_tokens=8, logit_bias=((6, 90.0),), stop_token_ids=(6,))
    for draft in DRAFTS:
        for rig in answers(draft, sampling, 0):
            assert len(rig.tokens(0)) == 9
            assert rig.tokens(0)[8] == 6
            assert rig.end(0).reason == "stop"


@pytest.mark.parametrize("draft", DRAFTS)
def test_min_tokens_beyond_the_context_end_with_it(draft: Kind) -> None:
    """Nothing waits for tokens that have no room: the answer fills the context and ends."""
    for gamma, depth in itertools.product(GAMMAS, (0, 1)):
        rig = Rig(*fakes(draft), gamma=gamma, max_model_len=48, num_base_blocks=3, depth=depth)
        rig.submit(0, TEXT, params(max_tokens=500, min_tokens=500, ignore_eos=True))
        rig.run()
        assert len(TEXT) + len(rig.tokens(0)) == 48
        assert rig.end(0).reason == "length"
        assert rig.blocks.num_free == rig.blocks.num_total


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("draft", DRAFTS)
def test_what_is_delivered_is_what_is_counted(draft: Kind, depth: int) -> None:
    """For every max_tokens and gamma: tokens, log-probabilities and usage agree; length."""
    for gamma in GAMMAS:
        target, model = fakes(draft)
        rig = Rig(target, model, gamma=gamma, depth=depth)
        for max_tokens in range(1, 13):
            rig.submit(max_tokens, TEXT[:3], params(max_tokens=max_tokens, num_logprobs=1))
        rig.run()
        for max_tokens in range(1, 13):
            num_logprobs = len(rig.answers[max_tokens].logprobs.chosen)
            assert len(rig.tokens(max_tokens)) == num_logprobs == max_tokens
            assert rig.end(max_tokens).usage.num_completion_tokens == max_tokens
            assert rig.end(max_tokens).reason == "length"


@pytest.mark.parametrize("depth", [0, 1])
def test_nothing_after_a_stop_counts(depth: int) -> None:
    """At each offset of a block: no log-probability, no acceptance beyond the stop token."""
    target, draft = fakes("target")
    free, _ = oracle(target, TEXT, params(max_tokens=20))
    for gamma in GAMMAS:
        rig = Rig(target, draft, gamma=gamma, prefix_cache=False, depth=depth)
        for k in range(1, 14):
            stop = (free[k],)
            rig.submit(k, TEXT, params(max_tokens=20, stop_token_ids=stop, num_logprobs=0))
        rig.run()
        num_drafts = num_accepted = 0
        for k in range(1, 14):
            num_tokens = free.index(free[k]) + 1
            usage = rig.end(k).usage
            assert len(rig.answers[k].logprobs.chosen) == num_tokens
            assert usage.num_completion_tokens == num_tokens
            assert usage.num_accepted_tokens == usage.num_draft_tokens <= num_tokens - 1
            num_drafts += usage.num_draft_tokens
            num_accepted += usage.num_accepted_tokens
        assert sum(sum(done.reached) for done in rig.done) == num_drafts
        assert sum(sum(done.accepted) for done in rig.done) == num_accepted


@pytest.mark.parametrize("depth", [0, 1])
def test_neighbours_with_every_parameter_change_nothing(depth: int) -> None:
    """A greedy canary, seeded requests and penalized ones share batches: each is as if alone."""
    rng = random.Random(5)
    requests = {0: (TEXT, params(max_tokens=60))}
    for seed in (1, 2, 900, 901):
        requests[len(requests)] = (TEXT, params(max_tokens=50, temperature=1.0, seed=seed))
    for seed in (1, 2, 3):
        text = prompt(rng, rng.randint(3, 20))
        requests[len(requests)] = (
            text,
            params(max_tokens=45, temperature=seed * 0.4, seed=seed, **EVERYTHING),
        )
    for draft in DRAFTS:
        target, model = fakes(draft)
        rig = Rig(target, model, gamma=lambda: rng.choice([0, 1, 3, 5, 8]), depth=depth)
        for request_id, (text, sampling) in requests.items():
            rig.submit(request_id, text, sampling)
            rig.step()
        rig.run()
        for request_id, (text, sampling) in requests.items():
            assert rig.tokens(request_id) == oracle(target, text, sampling)[0]
    assert rig.tokens(1) != rig.tokens(2)


@pytest.mark.parametrize("draft", DRAFTS)
def test_samples_are_the_targets_own_at_any_batch_size(draft: Kind) -> None:
    """Hundreds of short answers at temperature 1: token for token those of gamma 0."""
    requests = [
        params(max_tokens=1 + seed % 3, temperature=1.0, seed=seed, frequency_penalty=seed % 2)
        for seed in range(300)
    ]
    expected = [oracle(fakes(None)[0], TEXT, sampling)[0] for sampling in requests]
    for num_rows, depth in ((1, 0), (2, 1), (3, 0), (8, 1)):
        target, model = fakes(draft)
        rig = Rig(target, model, gamma=3, max_num_seqs=num_rows, depth=depth)
        for request_id, sampling in enumerate(requests):
            rig.submit(request_id, TEXT, sampling)
        rig.run()
        assert [rig.tokens(request_id) for request_id in range(300)] == expected
        least = {"target": 90, "noisy": 30, "random": 0}[draft]
        assert rig.scheduler.num_accepted_tokens > least


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("draft", DRAFTS)
def test_preempted_rows_keep_their_counts(draft: Kind, depth: int) -> None:
    """In seven blocks one of two rows is sent back, more than once: penalties know all of it."""
    texts = [prompt(random.Random(seed), 34) for seed in (1, 2)]
    sampling = params(max_tokens=35, temperature=0.7, **{**EVERYTHING, "stop_token_ids": ()})
    expected = [oracle(fakes(None)[0], text, sampling)[0] for text in texts]
    for gamma in GAMMAS:
        target, model = fakes(draft, num_base_blocks=7)
        rig = Rig(target, model, gamma=gamma, num_base_blocks=7, depth=depth)
        for request_id, text in enumerate(texts):
            rig.submit(request_id, text, sampling)
        rig.run()
        assert rig.scheduler.num_preemptions > 0
        assert [rig.tokens(request_id) for request_id in (0, 1)] == expected
        assert [len(rig.answers[i].logprobs.chosen) for i in (0, 1)] == [35, 35]


@pytest.mark.parametrize("draft", DRAFTS)
def test_answers_do_not_depend_on_the_engines_age(draft: Kind) -> None:
    """A seeded request is answered alike by a fresh engine and after a hundred others."""
    target, model = fakes(draft)
    rig = Rig(target, model, gamma=lambda: gammas.choice(GAMMAS))
    sampling = params(max_tokens=30, temperature=2.0, seed=42)
    gammas = random.Random(42)
    rig.submit(1000, TEXT, sampling)
    rig.run()
    for seed in range(100):
        rig.submit(seed, TEXT[: 1 + seed % 18], params(max_tokens=9, temperature=1.0, seed=seed))
    rig.submit(1001, TEXT, sampling)
    rig.run()
    assert rig.tokens(1000) == rig.tokens(1001) == oracle(target, TEXT, sampling)[0]


def limit(
    *, make: Callable[[], Rig], max_tokens: int = 30, max_gamma: int | None = None
) -> tuple[Rig, str]:
    """What a request is told of its speculation."""
    rig = make()
    rig.submit(0, TEXT, params(max_tokens=max_tokens, max_gamma=max_gamma))
    rig.run()
    return rig, rig.end(0).usage.speculation_limit


def test_who_gets_fewer_drafts_than_asked_is_told() -> None:
    """The worker's own limit, a draft that is no number, no proposer; else nothing is said."""
    target, draft = fakes("target")
    assert draft is not None
    assert limit(make=lambda: Rig(target, draft, gamma=3))[1] == ""
    assert limit(make=lambda: Rig(target, draft, gamma=3), max_gamma=0)[1] == ""
    few = limit(make=lambda: Rig(target, draft, gamma=3, max_gamma=4), max_gamma=6)[1]
    assert few == "this worker drafts at most 4 tokens a step"
    none = limit(make=lambda: Rig(target, None), max_gamma=2)[1]
    assert none == "this worker drafts at most 0 tokens a step"
    assert limit(make=lambda: Rig(target, None))[1] == ""
    draft.poisoned_prefixes.add(tuple(TEXT + oracle(target, TEXT, params(max_tokens=2))[0]))
    rig, broken = limit(make=lambda: Rig(target, draft, gamma=3, prefix_cache=False))
    assert broken == "the draft's logits were not numbers"
    assert rig.tokens(0) == oracle(target, TEXT, params(max_tokens=30))[0]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("draft", DRAFTS)
def test_the_end_of_the_drafts_context_ends_the_drafts(draft: Kind, depth: int) -> None:
    """Where the target has room and the draft has none, rows go on at gamma 0, and are told."""
    target, model = fakes(draft, draft_model_len=64)
    text = prompt(random.Random(3), 60)
    expected, _ = oracle(target, text, params(max_tokens=30), max_model_len=128)
    for gamma in GAMMAS:
        rig = Rig(target, model, gamma=gamma, max_model_len=128, max_catchup_tokens=64, depth=depth)
        rig.submit(0, text, params(max_tokens=30))
        rig.run()
        assert rig.tokens(0) == expected
        usage = rig.end(0).usage
        told = "the draft model's context ended" if gamma else ""
        assert usage.speculation_limit == told
        assert usage.gamma_histogram[0] > 20
