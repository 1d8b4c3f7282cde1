"""Staleness of the draft's cache: catch-up, its budget, its cost, and what is never done."""

from __future__ import annotations

import random

import pytest
from engine_rig import Rig, fakes, oracle, params, prompt

from worker.engine.sequence import PlannedRow
from worker.speculative.ngram import NgramProposer


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("num_plain", [1, 2, 20, 70])
def test_acceptance_is_whole_again_after_gamma_zero(num_plain: int, depth: int) -> None:
    """Gamma 4, then 0 for a while, then 4: every draft of the target's own copy is accepted."""
    target, draft = fakes("target")
    rig = Rig(target, draft, gamma=4, max_catchup_tokens=16, depth=depth)
    rig.submit(0, prompt(random.Random(1), 30), params(max_tokens=150))
    for _ in range(6):
        rig.step()
    rig.drain()
    rig.gamma = 0
    assert draft is not None
    before = draft.num_runs
    for _ in range(num_plain):
        rig.step()
    assert draft.num_runs == before  # gamma 0 does not touch the draft
    rig.gamma = 4
    rig.run()
    usage = rig.end(0).usage
    assert usage.num_accepted_tokens == usage.num_draft_tokens > 30


@pytest.mark.parametrize("depth", [0, 1])
def test_prefix_hits_carry_the_drafts_cache(depth: int) -> None:
    """The same long prompt again: no draft prefill of the cached part, all drafts accepted."""
    target, draft = fakes("target")
    assert draft is not None
    rig = Rig(
        target, draft, gamma=4, max_catchup_tokens=256, max_num_batched_tokens=256, depth=depth
    )
    text = prompt(random.Random(2), 100)
    rig.submit(0, text, params(max_tokens=20))
    rig.run()
    first, draft.num_tokens = draft.num_tokens, 0
    rig.submit(1, text, params(max_tokens=20))
    rig.run()
    assert rig.end(1).usage.num_cached_tokens == 96
    assert draft.num_tokens == first - 96
    for request_id in (0, 1):
        usage = rig.end(request_id).usage
        assert usage.num_accepted_tokens == usage.num_draft_tokens
    assert rig.tokens(0) == rig.tokens(1)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_prefix_cached_at_gamma_zero_is_stale(depth: int) -> None:
    """A hit on blocks that the draft never saw is caught up, not trusted."""
    target, draft = fakes("target")
    rig = Rig(target, draft, gamma=0, depth=depth)
    text = prompt(random.Random(3), 60)
    rig.submit(0, text, params(max_tokens=20))
    rig.run()
    rig.gamma = 4
    rig.submit(1, text, params(max_tokens=20))
    rig.run()
    usage = rig.end(1).usage
    assert usage.num_cached_tokens == 48
    assert usage.num_accepted_tokens == usage.num_draft_tokens > 0


def test_catch_up_is_bounded_and_serves_the_oldest_first() -> None:
    """At most the budget per step; rows still behind run plainly beside rows that draft."""
    target, draft = fakes("target")
    rig = Rig(target, draft, gamma=3, max_catchup_tokens=40, max_num_batched_tokens=200)
    for request_id in range(3):
        rig.submit(request_id, prompt(random.Random(request_id), 50), params(max_tokens=40))
    rig.step()
    seen = []
    for _ in range(5):
        plan = rig.scheduler.schedule(rig.choose)
        assert sum(row.num_catch_up for row in plan.rows) <= 40
        seen.append([(row.num_catch_up, row.gamma) for row in plan.rows])
        rig.take(rig.scheduler.commit(rig.runner.launch(plan).retire()))
        rig.scheduler.check_integrity()
    # Rows that run plainly meanwhile fall behind by a token a step: 51, then 52 and 53 are due.
    assert seen[0] == [(40, 0), (0, 0), (0, 0)]
    assert seen[1] == [(11, 3), (29, 0), (0, 0)]
    assert seen[2] == [(0, 3), (23, 3), (17, 0)]
    assert seen[3] == [(0, 3), (0, 3), (36, 3)]
    assert seen[4] == [(0, 3), (0, 3), (0, 3)]
    rig.run()
    assert rig.scheduler.num_accepted_tokens == rig.scheduler.num_draft_tokens


def test_a_step_in_which_nobody_is_ready_is_not_feasible() -> None:
    """While all rows catch up the step ran plainly and says feasible 0; a question says more."""
    target, draft = fakes("target")
    rig = Rig(target, draft, gamma=3, max_catchup_tokens=16, max_num_batched_tokens=200)
    rig.submit(0, prompt(random.Random(1), 50), params(max_tokens=60))
    rig.step()
    plans = []
    for _ in range(6):
        rig.step()
        plans.append(rig.done[-1].plan)
    gammas = [plan.gamma for plan in plans]
    assert gammas[:3] == [0, 0, 0]
    assert gammas[-1] == 3
    for plan in plans:
        assert plan.context is not None
        assert plan.context.feasible_max_gamma == (8 if plan.gamma else 0)
        assert plan.possible_gamma == 8


def test_catch_up_is_told_from_draft_prefill() -> None:
    """Tokens that the target prefilled are draft prefill; those emitted at gamma 0, catch-up."""
    target, draft = fakes("target")
    rig = Rig(target, draft, gamma=0, max_catchup_tokens=256)
    rig.submit(0, prompt(random.Random(1), 50), params(max_tokens=60))
    for _ in range(11):
        rig.step()
    rig.gamma = 2
    rig.step()
    done = rig.done[-1]
    assert done.num_catch_up_tokens == 10
    assert done.catch_up_us == 1000 * 10 // 60  # the rig's clock ticks once per reading
    assert done.draft_prefill_us == 1000 - done.catch_up_us
    assert done.step_us == 2000
    rig.step()
    assert (rig.done[-1].catch_up_us, rig.done[-1].draft_prefill_us) == (0, 0)


@pytest.mark.parametrize(("num_plain", "num_caught_up"), [(0, 0), (1, 2), (2, 3)])
def test_the_usual_lag_is_no_catch_up(num_plain: int, num_caught_up: int) -> None:
    """The newest token, and the last draft after full acceptance, cost no forward of their own."""
    target, draft = fakes("target")
    rig = Rig(target, draft, gamma=3)
    rig.submit(0, prompt(random.Random(1), 20), params(max_tokens=60))
    for _ in range(4):
        rig.step()
    sequence = rig.scheduler.running[0]
    assert len(sequence.token_ids) - rig.scheduler.drafting.num_draft_computed(sequence) == 2
    rig.gamma = 0
    for _ in range(num_plain):
        rig.step()
    rig.gamma = 3
    rig.step()
    assert rig.done[-1].num_catch_up_tokens == num_caught_up


def test_gamma_respects_every_limit_of_a_row() -> None:
    """max_tokens, the request's max_gamma, the step's tokens and the draft's context cut gamma."""
    target, draft = fakes("target", draft_model_len=64)
    rig = Rig(target, draft, gamma=8, max_num_batched_tokens=16, max_catchup_tokens=256)
    rig.submit(0, prompt(random.Random(1), 10), params(max_tokens=100))
    rig.submit(1, prompt(random.Random(2), 10), params(max_tokens=100, max_gamma=2))
    rig.submit(2, prompt(random.Random(3), 10), params(max_tokens=3))
    while rig.scheduler.has_work:
        plan = rig.scheduler.schedule(rig.choose)
        for row in plan.rows[: plan.num_decode_rows]:
            num_tokens = len(row.sequence.token_ids)
            room = 10 + row.sequence.params.max_tokens - num_tokens - 1
            most = min(room, 16 // plan.num_decode_rows - 1, 64 - num_tokens + 1)
            assert row.gamma <= max(0, most)
            assert row.sequence.request_id != 1 or row.gamma <= 2
        rig.take(rig.scheduler.commit(rig.runner.launch(plan).retire()))
    for request_id in range(3):
        usage = rig.end(request_id).usage
        assert usage.num_accepted_tokens == usage.num_draft_tokens
    histogram = rig.end(0).usage.gamma_histogram
    assert histogram[0] >= 40  # beyond the draft's context
    assert histogram[8] > 0


@pytest.mark.parametrize("depth", [0, 1])
def test_draft_vocabulary_smaller_than_the_targets(depth: int) -> None:
    """Ids that only the target knows are answered, merely never drafted."""
    target, _ = fakes(None)
    _, draft = fakes("target")
    assert draft is not None
    draft.vocab_size = draft.real_vocab_size = 30
    rig = Rig(target, draft, gamma=3, depth=depth)
    text = prompt(random.Random(5), 20)
    rig.submit(0, text, params(max_tokens=60))
    rig.run()
    assert rig.tokens(0) == oracle(target, text, params(max_tokens=60))[0]
    assert max(rig.tokens(0)) >= 30


def test_ngrams_take_the_longest_and_newest_match() -> None:
    """The continuation of the longest repeated suffix is drafted, of several the newest."""
    target, _ = fakes(None)
    rig = Rig(target, None, ngram=True, gamma=3)
    rig.submit(0, [9, 1, 2, 3, 30, 31, 1, 2, 3, 20, 21, 5, 3, 11, 1, 2], params())
    rig.scheduler.schedule(rig.choose)
    sequence = rig.scheduler.running[0]
    proposer = NgramProposer()

    def drafts(gamma: int) -> list[int]:
        row = PlannedRow(sequence, 0, 1, True, True, gamma)
        return proposer.propose([row], gamma).drafts[0]

    sequence.token_ids.append(3)  # ... 11 1 2 3: "1 2 3" came twice, "11 1 2 3" never
    assert drafts(2) == [20, 21]
    assert drafts(0) == []
    sequence.token_ids += [30]  # "2 3 30" came once
    assert drafts(3) == [31, 1, 2]
    sequence.token_ids += [39]
    assert drafts(3) == []


def test_ngrams_are_accepted_where_the_text_repeats() -> None:
    """A target that depends on two tokens falls into a cycle: n-grams then carry it."""
    target, _ = fakes(None, window=1)
    rig = Rig(target, None, ngram=True, gamma=4)
    text = prompt(random.Random(6), 10)
    rig.submit(0, text, params(max_tokens=150))
    rig.run()
    assert rig.tokens(0) == oracle(target, text, params(max_tokens=150))[0]
    usage = rig.end(0).usage
    assert usage.num_accepted_tokens > 80
    assert usage.num_steps < 80


def test_ngrams_speculate_while_a_draft_model_would_be_away() -> None:
    """Residency concerns the draft model alone."""
    target, _ = fakes(None, window=1)
    rig = Rig(target, None, ngram=True, gamma=4)
    rig.scheduler.drafting.set_resident(False)
    rig.submit(0, [1, 2, 3], params(max_tokens=100))
    rig.run()
    assert rig.end(0).usage.num_draft_tokens > 0
