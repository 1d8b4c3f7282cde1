"""Admission, chunks, preemption, aborts, and the rule that nothing changes hands in flight."""

from __future__ import annotations

import random

import pytest
from engine_rig import Rig, fakes, oracle, params, prompt
from fake_forward import Kind


def test_steps_stay_within_their_tokens_and_decode_comes_first() -> None:
    """No step has more tokens than allowed; while prompts are computed, every decode row runs."""
    target, draft = fakes("target")
    rig = Rig(target, draft, gamma=3, max_num_batched_tokens=24, max_num_seqs=4)
    rng = random.Random(0)
    for request_id in range(6):
        rig.submit(request_id, prompt(rng, 60), params(max_tokens=30))
    while rig.scheduler.has_work:
        decoding = [s.request_id for s in rig.scheduler.running if s.phase == "decode"]
        plan = rig.scheduler.schedule(rig.choose)
        assert sum(row.num_tokens + row.gamma for row in plan.rows) <= 24
        rows = plan.rows[: plan.num_decode_rows]
        assert [row.sequence.request_id for row in rows] == decoding
        assert all(row.is_decode for row in rows)
        flight = rig.runner.launch(plan)
        rig.take(rig.scheduler.commit(flight.retire()))
        rig.scheduler.check_integrity()
    assert all(len(rig.tokens(request_id)) == 30 for request_id in range(6))


@pytest.mark.parametrize("depth", [0, 1])
def test_requests_are_admitted_in_their_order(depth: int) -> None:
    """A short request does not overtake a long one that waits for blocks."""
    target, _ = fakes(None, num_base_blocks=8)
    rig = Rig(target, None, num_base_blocks=8, max_model_len=128, depth=depth)
    rng = random.Random(1)
    rig.submit(0, prompt(rng, 60), params(max_tokens=20))
    rig.submit(1, prompt(rng, 100), params(max_tokens=5))
    rig.submit(2, prompt(rng, 3), params(max_tokens=2))
    firsts: list[int] = []
    while rig.scheduler.has_work:
        rig.step()
        firsts += [r for r in range(3) if rig.tokens(r) and r not in firsts]
    assert firsts == [0, 1, 2]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("gamma", [0, 1, 3, 5])
def test_preempted_requests_get_their_answers(gamma: int, depth: int) -> None:
    """Two prompts of 34 tokens and 35 new ones in 7 blocks of 16: one is preempted, both right."""
    target, draft = fakes("noisy", num_base_blocks=7)
    rig = Rig(target, draft, gamma=gamma, num_base_blocks=7, max_model_len=80, depth=depth)
    texts = [prompt(random.Random(seed), 34) for seed in (1, 2)]
    for request_id, text in enumerate(texts):
        rig.submit(request_id, text, params(max_tokens=35))
    rig.run()
    assert rig.scheduler.num_preemptions > 0
    assert sum(rig.end(r).usage.num_preemptions for r in (0, 1)) == rig.scheduler.num_preemptions
    for request_id, text in enumerate(texts):
        assert rig.tokens(request_id) == oracle(target, text, params(max_tokens=35))[0]


def test_the_oldest_always_advances() -> None:
    """One long request among many short ones in a tiny pool gets a token in every decode step."""
    target, draft = fakes("target", num_base_blocks=10)
    rig = Rig(target, draft, gamma=2, num_base_blocks=10, max_model_len=160, max_num_seqs=8)
    rng = random.Random(5)
    rig.submit(0, prompt(rng, 30), params(max_tokens=120))
    next_id = 1
    for _ in range(400):
        if rig.answers[0].finished is not None:
            break
        if rig.scheduler.num_waiting < 4:
            rig.submit(next_id, prompt(rng, rng.randint(5, 60)), params(max_tokens=40))
            next_id += 1
        before = len(rig.tokens(0))
        rig.step()
        assert len(rig.tokens(0)) > before
    assert rig.end(0).usage.num_completion_tokens == 120
    assert rig.end(0).usage.num_preemptions == 0
    assert rig.scheduler.num_preemptions > 0
    rig.run()
    assert all(answer.finished is not None for answer in rig.answers.values())


def test_what_can_never_fit_is_refused_with_a_sentence() -> None:
    """Too long for the pool, for the context, empty, or a used id: refused, others unharmed."""
    target, _ = fakes(None, num_base_blocks=4)
    rig = Rig(target, None, num_base_blocks=4, max_model_len=100)
    rig.submit(0, [1, 2, 3], params(max_tokens=10))
    rig.submit(1, [1] * 10, params(max_tokens=60))
    assert rig.end(1).reason == "error"
    assert "70 tokens of KV; the pool holds 64" in rig.end(1).error
    rig.submit(2, [1] * 100, params(max_tokens=5))
    assert "leaves no room for an answer in 100" in rig.end(2).error
    rig.submit(3, [], params(max_tokens=5))
    assert rig.end(3).error == "the prompt is empty"
    rig.run()
    assert len(rig.tokens(0)) == 10


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("draft", ["target", "noisy", "random"])
def test_aborts_at_every_moment_free_everything(draft: Kind, depth: int) -> None:
    """Aborted before, between or within its steps, a request leaves no block; a canary is fine.

    Who then goes on from what arrived, as a conversation does, finds nothing of what did not.
    """
    rng = random.Random(draft)
    canary, text = prompt(random.Random(9), 20), prompt(random.Random(8), 40)
    sampling = params(max_tokens=20, temperature=1.0, frequency_penalty=0.5)
    expected, _ = oracle(fakes(None)[0], canary, params(max_tokens=24))
    for moment in range(12):
        for gamma in (rng.randint(0, 4), rng.randint(5, 8)):
            target, model = fakes(draft)
            rig = Rig(target, model, gamma=gamma, depth=depth, max_num_batched_tokens=20)
            rig.submit(0, canary, params(max_tokens=24))
            rig.submit(1, text, sampling)
            for _ in range(moment):
                rig.step()
            rig.launch()
            rig.abort(1)
            rig.scheduler.check_integrity()
            delivered = len(rig.tokens(1))
            turn = text + rig.tokens(1) + canary[:3]
            rig.submit(2, turn, sampling)
            rig.drain()
            rig.run()
            assert len(rig.tokens(1)) == delivered
            assert rig.end(1).reason in ("abort", "length")
            assert rig.tokens(0) == expected
            assert rig.tokens(2) == oracle(target, turn, sampling)[0]
            assert rig.blocks.num_free == rig.blocks.num_total


@pytest.mark.parametrize("depth", [0, 1])
def test_a_block_named_in_flight_changes_owner_only_after_retirement(depth: int) -> None:
    """Aborted or preempted in flight, a row's blocks are free only once its step has retired."""
    target, draft = fakes("target")
    rig = Rig(target, draft, gamma=2, depth=depth)
    rig.submit(0, prompt(random.Random(2), 40), params(max_tokens=20))
    rig.step()
    rig.launch()
    held = rig.blocks.num_total - rig.blocks.num_free
    rig.abort(0)
    rig.submit(0, prompt(random.Random(2), 40), params(max_tokens=20))  # the id anew
    assert rig.blocks.num_total - rig.blocks.num_free == held
    assert rig.scheduler.blocks_being_filled()
    rig.scheduler.check_integrity()
    rig.drain()
    assert rig.tokens(0) == []
    assert rig.blocks.num_free == rig.blocks.num_total
    rig.run()
    assert len(rig.tokens(0)) == 20


@pytest.mark.parametrize("depth", [0, 1])
def test_only_accepted_tokens_enter_the_cache(depth: int) -> None:
    """After rejected drafts the cached prefix is the answer's, and another request can use it."""
    target, draft = fakes("random")
    rig = Rig(target, draft, gamma=8, depth=depth)
    text = prompt(random.Random(3), 20)
    rig.submit(0, text, params(max_tokens=60))
    rig.run()
    follow_up = text + rig.tokens(0)
    rig.submit(1, follow_up, params(max_tokens=20))
    rig.run()
    # 80 tokens have KV but the last: four full blocks of 16.
    assert rig.end(1).usage.num_cached_tokens == 64
    assert rig.tokens(1) == oracle(target, follow_up, params(max_tokens=20))[0]


@pytest.mark.parametrize("depth", [0, 1])
def test_quarantined_blocks_only_make_rows_wait(depth: int) -> None:
    """With its next block granted to the agent the only row waits, and goes on afterwards."""
    target, _ = fakes(None, num_base_blocks=4)
    rig = Rig(target, None, num_base_blocks=4, max_model_len=64, depth=depth)
    rig.submit(0, prompt(random.Random(4), 14), params(max_tokens=30))
    rig.step()
    reserved = rig.blocks.reserve(3)
    assert reserved is not None
    for _ in range(10):
        rig.step()
    stuck = len(rig.tokens(0))
    assert stuck < 30
    assert not rig.step()
    assert rig.scheduler.num_preemptions == 0
    rig.blocks.release_reserved(reserved)
    rig.run()
    assert len(rig.tokens(0)) == 30


def test_contexts_say_what_ran() -> None:
    """A decode step reports its rows and tokens; a prompt-only step decides nothing."""
    target, draft = fakes("target")
    rig = Rig(target, draft, gamma=3)
    rig.submit(0, [1] * 20, params(max_tokens=30))
    rig.step()
    assert rig.done[0].plan.choice is None
    rig.submit(1, [2] * 40, params(max_tokens=4, max_gamma=0))
    rig.step()
    context = rig.done[1].plan.context
    assert context is not None
    assert (context.batch_size, context.num_kv_tokens, context.num_prefill_tokens) == (1, 21, 40)
    assert (context.feasible_max_gamma, context.draft_resident) == (8, True)
    assert (context.max_stale_tokens, context.sum_stale_tokens) == (20, 20)
