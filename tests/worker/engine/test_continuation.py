"""An answer that is taken up elsewhere goes on as if it had never been interrupted."""

from __future__ import annotations

import random

import pytest
from engine_rig import Rig, fakes, oracle, params, prompt
from fake_forward import Kind

TEXT = prompt(random.Random(31), 21)
DRAFTS: dict[str, Kind] = {"greedy": "target", "sampled": "random", "everything": "noisy"}
CASES: dict[str, dict[str, object]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 9, "top_p": 0.95},
    "everything": {
        "temperature": 0.8,
        "seed": 4,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.4,
        "logit_bias": ((2, 1.5),),
        "min_tokens": 24,
        "stop_token_ids": (2, 5, 11),
    },
}


class StopAfterPair:
    """Stops when the tokens' running sum of pairs hits a mark: it needs to see every token."""

    def __init__(self, mark: int) -> None:
        self.mark, self.last, self.stopped, self.seen = mark, -1, False, 0

    def push(self, token_id: int) -> str:
        """Take a token."""
        assert not self.stopped
        self.seen += 1
        self.stopped = (self.last * 41 + token_id) == self.mark
        self.last = token_id
        return ""


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("case", CASES)
def test_every_split_gives_the_undisturbed_answer(case: str, depth: int) -> None:
    """Whatever came before the break: same tokens, reason and whole count; only new ones sent."""
    rng = random.Random(case)
    sampling = params(max_tokens=40, **CASES[case])
    target, draft = fakes(DRAFTS[case])
    whole, reason = oracle(target, TEXT, sampling)
    assert len(whole) >= 25
    rig = Rig(target, draft, gamma=lambda: rng.randint(0, 8), depth=depth)
    for num_prior in range(len(whole)):
        rig.submit(num_prior, TEXT, sampling, prior=whole[:num_prior])
        if rng.random() < 0.3:
            rig.run()
    rig.run()
    for num_prior in range(len(whole)):
        assert rig.tokens(num_prior) == whole[num_prior:]
        finished = rig.end(num_prior)
        assert finished.reason == reason
        assert finished.usage.num_completion_tokens == len(whole)
        assert finished.usage.num_prompt_tokens == len(TEXT)
        assert finished.usage.num_cached_tokens <= len(TEXT)


@pytest.mark.parametrize("num_prior", [1, 4, 5, 6, 9])
def test_a_stop_string_may_straddle_the_break(num_prior: int) -> None:
    """The detector sees what was generated before: a stop begun there ends the answer."""
    target, draft = fakes("target")
    free, _ = oracle(target, TEXT, params(max_tokens=20))
    mark = free[9] * 41 + free[10]
    for gamma in range(9):
        detector = StopAfterPair(mark)
        rig = Rig(target, draft, gamma=gamma)
        rig.submit(0, TEXT, params(max_tokens=20), detector, prior=free[:num_prior])
        rig.run()
        assert rig.tokens(0) == free[num_prior:11]
        assert detector.seen == 11
        assert rig.end(0).reason == "stop"


def test_an_answer_that_is_complete_ends_at_once() -> None:
    """By its last token or by its length: the reason of an undisturbed run, and no step."""
    target, draft = fakes("target")
    free, _ = oracle(target, TEXT, params(max_tokens=9))
    rig = Rig(target, draft, gamma=2)
    rig.submit(0, TEXT, params(max_tokens=9), prior=free)
    rig.submit(1, TEXT, params(max_tokens=9, stop_token_ids=(free[4],)), prior=free[:5])
    detector = StopAfterPair(free[3] * 41 + free[4])
    rig.submit(2, TEXT, params(max_tokens=9), detector, prior=free[:5])
    assert [rig.end(i).reason for i in range(3)] == ["length", "stop", "stop"]
    assert [rig.end(i).usage.num_completion_tokens for i in range(3)] == [9, 5, 5]
    assert not rig.scheduler.has_work
    assert not rig.step()


def test_an_answer_that_goes_on_after_its_end_is_refused() -> None:
    """Nobody's answer has tokens after a stop, or more than max_tokens."""
    target, draft = fakes("target")
    free, _ = oracle(target, TEXT, params(max_tokens=9))
    rig = Rig(target, draft, gamma=2)
    rig.submit(0, TEXT, params(max_tokens=8), prior=free)
    rig.submit(1, TEXT, params(max_tokens=20, stop_token_ids=(free[4],)), prior=free)
    assert rig.end(0).reason == rig.end(1).reason == "error"
    assert "ended with its token 8 (length), but has 9" in rig.end(0).error
    assert "ended with its token 5 (stop), but has 9" in rig.end(1).error
    assert not rig.scheduler.has_work


@pytest.mark.parametrize("depth", [0, 1])
def test_resumed_rows_are_preempted_like_others(depth: int) -> None:
    """In a tiny pool, with prefixes cached and evicted, each goes on to the same end."""
    rng = random.Random(77)
    target, draft = fakes("noisy", num_base_blocks=9)
    rig = Rig(target, draft, gamma=lambda: rng.choice([0, 2, 5]), num_base_blocks=9, depth=depth)
    sampling = params(max_tokens=60, **{**CASES["everything"], "stop_token_ids": ()})
    whole, _ = oracle(target, TEXT, sampling)
    splits = [0, 7, 33, 50, 59, 12]
    for request_id, num_prior in enumerate(splits):
        rig.submit(request_id, TEXT, sampling, prior=whole[:num_prior])
    rig.run()
    assert rig.scheduler.num_preemptions > 0
    assert [rig.tokens(i) for i in range(6)] == [whole[num_prior:] for num_prior in splits]
