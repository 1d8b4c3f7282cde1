"""Stop rules inside accepted blocks: nothing after a stop is delivered or counted."""

from __future__ import annotations

import random

import pytest
from engine_rig import Rig, fakes, oracle, params, prompt
from fake_forward import Kind

TEXT = prompt(random.Random(11), 17)
DRAFTS: list[Kind] = ["target", "noisy", "random"]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("how", ["eos", "stop id"])
def test_a_stop_ends_the_answer_at_every_offset(how: str, draft: Kind, depth: int) -> None:
    """The stop token may fall on any draft, on the bonus token, or on the prompt's first."""
    target, model = fakes(draft)
    free, _ = oracle(target, TEXT, params(max_tokens=20, ignore_eos=True))
    for k in range(16):
        eos = (free[k],) if how == "eos" else ()
        sampling = params(max_tokens=20, stop_token_ids=() if eos else (free[k],))
        expected = free[: free.index(free[k]) + 1]
        for gamma in range(9):
            rig = Rig(
                target, model, gamma=gamma, eos_token_ids=eos, prefix_cache=False, depth=depth
            )
            rig.submit(0, TEXT, sampling)
            rig.run()
            assert rig.tokens(0) == expected
            finished = rig.end(0)
            assert finished.reason == "stop"
            usage = finished.usage
            assert usage.num_completion_tokens == len(expected)
            # The prompt's own step delivered the first token, each decode step one of its own.
            assert usage.num_accepted_tokens <= len(expected) - 1
            if draft == "target":
                assert usage.num_accepted_tokens == usage.num_draft_tokens
            # What a policy learns from is what the client got: nothing after the stop.
            assert sum(sum(done.reached) for done in rig.done) <= usage.num_draft_tokens
            assert sum(sum(done.accepted) for done in rig.done) == usage.num_accepted_tokens
            assert sum(done.num_emitted for done in rig.done) == len(expected) - 1


@pytest.mark.parametrize("depth", [0, 1])
def test_ignored_eos_does_not_stop(depth: int) -> None:
    """With ignore_eos the answer runs to max_tokens; a stop id of the request still ends it."""
    target, draft = fakes("target")
    free, _ = oracle(target, TEXT, params(max_tokens=20))
    rig = Rig(target, draft, gamma=4, eos_token_ids=(free[3],), depth=depth)
    rig.submit(0, TEXT, params(max_tokens=20, ignore_eos=True))
    rig.submit(1, TEXT, params(max_tokens=20, ignore_eos=True, stop_token_ids=(free[3],)))
    rig.run()
    assert rig.tokens(0) == free
    assert rig.tokens(1) == free[: free.index(free[3]) + 1]


@pytest.mark.parametrize("depth", [0, 1])
def test_the_contexts_end_ends_the_answer(depth: int) -> None:
    """Prompt and answer fill the context to its last token."""
    target, draft = fakes("target")
    for gamma in range(9):
        rig = Rig(target, draft, gamma=gamma, max_model_len=40, depth=depth)
        rig.submit(0, TEXT, params(max_tokens=500))
        rig.run()
        assert len(TEXT) + len(rig.tokens(0)) == 40
        assert rig.end(0).reason == "length"


@pytest.mark.parametrize("depth", [0, 1])
def test_the_last_token_may_be_the_stop(depth: int) -> None:
    """A stop on the last allowed token is a stop, not a length."""
    target, draft = fakes("target")
    free, _ = oracle(target, TEXT, params(max_tokens=6))
    assert free.index(free[5]) == 5
    rig = Rig(target, draft, gamma=8, depth=depth)
    rig.submit(0, TEXT, params(max_tokens=6, stop_token_ids=(free[5],)))
    rig.run()
    assert rig.end(0).reason == "stop"


class StopAfter:
    """Stops once it has seen a token."""

    def __init__(self, token_id: int) -> None:
        self.token_id, self.stopped = token_id, False

    def push(self, token_id: int) -> str:
        """Take a token."""
        assert not self.stopped, "a token was pushed after the stop"
        self.stopped = token_id == self.token_id
        return ""


class Breaks:
    """Raises at the third token."""

    stopped = False
    count = 0

    def push(self, token_id: int) -> str:
        """Take a token."""
        self.count += 1
        if self.count == 3:
            raise ValueError("no such character")
        return ""


@pytest.mark.parametrize("depth", [0, 1])
def test_a_stop_string_ends_the_answer_with_the_token_that_completes_it(depth: int) -> None:
    """The detector sees each delivered token once, and none after the stop."""
    target, draft = fakes("noisy")
    free, _ = oracle(target, TEXT, params(max_tokens=30))
    for k in (0, 1, 5, 9):
        for gamma in range(9):
            rig = Rig(target, draft, gamma=gamma, depth=depth)
            rig.submit(0, TEXT, params(max_tokens=30), StopAfter(free[k]))
            rig.run()
            assert rig.tokens(0) == free[: free.index(free[k]) + 1]
            assert rig.end(0).reason == "stop"


@pytest.mark.parametrize("depth", [0, 1])
def test_a_detector_that_raises_ends_its_request_alone(depth: int) -> None:
    """Its neighbour in the batch gets its whole answer."""
    target, draft = fakes("target")
    rig = Rig(target, draft, gamma=2, depth=depth)
    rig.submit(0, TEXT, params(max_tokens=20), Breaks())
    rig.submit(1, TEXT[:9], params(max_tokens=20))
    rig.run()
    assert rig.end(0).reason == "error"
    assert "no such character" in rig.end(0).error
    assert rig.end(0).usage.num_completion_tokens == len(rig.tokens(0))
    assert rig.tokens(1) == oracle(target, TEXT[:9], params(max_tokens=20))[0]
    assert rig.blocks.num_free == rig.blocks.num_total
