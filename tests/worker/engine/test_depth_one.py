"""Planning while a step is in flight: bounds, waits, catch-up, drafts that fail, and slots."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

import pytest
from engine_rig import Rig, fakes, oracle, params, prompt
from fake_device import FakeDeviceRunner
from fake_forward import Kind

from worker.engine.sequence import PlannedRow


def rows_of(rig: Rig, request_id: int) -> list[PlannedRow]:
    """What was planned for a request, step by step."""
    rows = [row for done in rig.done for row in done.plan.rows]
    return [row for row in rows if row.sequence.request_id == request_id]


@pytest.mark.parametrize("gamma", [0, 3])
def test_every_step_but_the_first_is_launched_ahead(gamma: int) -> None:
    """The batch never pauses: each step has the rows of the one in flight, until they end."""
    target, draft = fakes("target")
    rig = Rig(target, draft, gamma=gamma, depth=1, max_num_batched_tokens=24)
    for request_id in range(3):
        rig.submit(request_id, prompt(random.Random(request_id), 30), params(max_tokens=40))
    rig.run()
    for request_id in range(3):
        steps = [
            done.plan.step
            for done in rig.done
            if request_id in [row.sequence.request_id for row in done.plan.rows]
        ]
        assert steps == list(range(steps[0], steps[0] + len(steps)))
        first, *decode = (row for row in rows_of(rig, request_id) if row.is_decode)
        assert first.first == -1
        assert all(row.first == -1 for row in decode)
    assert isinstance(rig.runner, FakeDeviceRunner)
    assert rig.runner.num_ahead == sum(len(done.plan.rows) for done in rig.done) - 3


def test_no_step_is_launched_for_a_row_that_ends_for_sure() -> None:
    """At gamma 0 the end by length is known ahead: as many rows run as at depth zero."""
    for max_tokens in range(1, 6):
        target, _ = fakes(None)
        rig = Rig(target, None, depth=1)
        rig.submit(0, [1, 2, 3], params(max_tokens=max_tokens))
        rig.run()
        assert len(rows_of(rig, 0)) == max_tokens
    rig = Rig(target, None, depth=1, max_model_len=20)
    rig.submit(0, [1, 2, 3], params(max_tokens=50))
    rig.run()
    assert len(rows_of(rig, 0)) == 17


def test_a_row_that_stopped_is_dropped_from_the_step_in_flight() -> None:
    """Nothing after its end is delivered; blocks and slot come back when that step retires."""
    target, draft = fakes("target")
    free, _ = oracle(target, [1, 2, 3], params(max_tokens=20))
    rig = Rig(target, draft, gamma=2, depth=1, max_num_seqs=1, prefix_cache=False)
    rig.submit(0, [1, 2, 3], params(max_tokens=20, stop_token_ids=(free[7],)))
    rig.submit(1, [4, 5], params(max_tokens=5))
    while rig.answers[0].finished is None:
        rig.step()
    assert rig.tokens(0) == free[: free.index(free[7]) + 1]
    assert len(rig.flights) == 1
    assert rig.blocks.num_free < rig.blocks.num_total
    assert not rig.launch()  # the one slot is still named
    rig.retire()
    assert rig.blocks.num_free == rig.blocks.num_total
    rig.run()
    assert rig.tokens(1) == oracle(target, [4, 5], params(max_tokens=5))[0]


@pytest.mark.parametrize("block_size", [2, 4, 16])
@pytest.mark.parametrize("gamma", [0, 2, 8])
def test_the_oldest_always_advances(gamma: int, block_size: int) -> None:
    """In a tiny pool full of others it sits out at most every second step, and ends unharmed."""
    num_blocks = 160 // block_size
    target, draft = fakes("target", num_base_blocks=num_blocks, block_size=block_size)
    rig = Rig(
        target,
        draft,
        gamma=gamma,
        depth=1,
        num_base_blocks=num_blocks,
        block_size=block_size,
        max_model_len=160,
    )
    rng = random.Random(5)
    text = prompt(rng, 20)
    rig.submit(0, text, params(max_tokens=130))
    next_id, num_idle, num_waits = 1, 0, 0
    for _ in range(600):
        if rig.answers[0].finished is not None:
            break
        if rig.scheduler.num_waiting < 4:
            rig.submit(next_id, prompt(rng, rng.randint(5, 60)), params(max_tokens=40))
            next_id += 1
        before = len(rig.tokens(0))
        rig.step()
        num_idle = 0 if len(rig.tokens(0)) > before else num_idle + 1
        num_waits += num_idle
        assert num_idle <= 2 if before == 0 else num_idle <= 1
    assert rig.tokens(0) == oracle(target, text, params(max_tokens=130))[0]
    assert rig.end(0).usage.num_preemptions == 0
    assert rig.scheduler.num_preemptions > 0
    rig.run()
    assert all(answer.finished is not None for answer in rig.answers.values())
    assert rig.blocks.num_free == rig.blocks.num_total


def test_a_row_preempted_in_flight_gives_its_blocks_when_the_step_retires() -> None:
    """Its result is dropped, its blocks go on to the older row that waited, its answer stays."""
    target, draft = fakes("target", num_base_blocks=6)
    rig = Rig(target, draft, gamma=0, depth=1, num_base_blocks=6, max_model_len=96)
    texts = [prompt(random.Random(seed), 30) for seed in (1, 2)]
    for request_id, text in enumerate(texts):
        rig.submit(request_id, text, params(max_tokens=40))
    while rig.scheduler.num_preemptions == 0:
        rig.launch()
        if len(rig.flights) > 1:
            rig.retire()
        rig.scheduler.check_integrity()
    # The older row waits, without any step of its own, for what the younger one still holds.
    assert rig.scheduler.num_running == 1
    assert rig.blocks.num_free == 0
    assert len(rig.flights) == 1
    known = len(rig.tokens(1))
    rig.retire()
    assert len(rig.tokens(1)) == known
    assert rig.blocks.num_free > 0
    rig.run()
    for request_id, text in enumerate(texts):
        assert rig.tokens(request_id) == oracle(target, text, params(max_tokens=40))[0]


@pytest.mark.parametrize("ends", ["abort", "length"])
def test_blocks_that_come_back_by_themselves_are_waited_for(ends: str) -> None:
    """Nobody is preempted for a block that an aborted or surely ending row is about to return."""
    target, _ = fakes(None, num_base_blocks=8)
    rig = Rig(target, None, depth=1, num_base_blocks=8, max_model_len=96, prefix_cache=False)
    rig.submit(0, prompt(random.Random(1), 30), params(max_tokens=30))
    rig.submit(1, prompt(random.Random(2), 26), params(max_tokens=22))
    rig.submit(2, [1, 2, 3, 4], params(max_tokens=19 if ends == "length" else 30))
    rig.step()
    oldest = rig.scheduler.running[0]
    while oldest.bound < 49:
        rig.step()
    assert (rig.blocks.num_free, rig.scheduler.num_running) == (0, 3)
    if ends == "abort":
        rig.abort(2)
    rig.launch()
    assert [row.sequence.request_id for row in rig.flights[-1][0].rows] == [1]
    rig.retire()
    rig.run()
    assert [len(rig.tokens(request_id)) for request_id in (0, 1)] == [30, 22]
    assert rig.scheduler.num_preemptions == 0


@pytest.mark.parametrize("gammas", [[0, 4], [4, 0], [0, 0, 4], [4, 4, 0, 0, 0, 0, 4, 0, 4]])
@pytest.mark.parametrize("max_catchup_tokens", [3, 7, 64])
def test_a_draft_is_caught_up_while_steps_overlap(
    gammas: Seq[int], max_catchup_tokens: int
) -> None:
    """Whatever gamma was in flight, every draft of the target's own copy is accepted."""
    target, draft = fakes("target")
    steps = iter(gammas * 200)
    rig = Rig(
        target,
        draft,
        gamma=lambda: next(steps),
        depth=1,
        max_catchup_tokens=max_catchup_tokens,
        max_num_batched_tokens=32,
    )
    texts = [prompt(random.Random(seed), 25) for seed in range(3)]
    for request_id, text in enumerate(texts):
        rig.submit(request_id, text, params(max_tokens=60))
        rig.step()
    rig.run()
    assert not any(result.draft_failed for done in rig.done for result in done.rows)
    assert rig.scheduler.num_accepted_tokens == rig.scheduler.num_draft_tokens
    assert rig.scheduler.num_draft_tokens > (20 if max_catchup_tokens > 3 else -1)
    for request_id, text in enumerate(texts):
        assert rig.tokens(request_id) == oracle(target, text, params(max_tokens=60))[0]
    for done in rig.done:
        assert sum(row.num_catch_up for row in done.plan.rows) <= max_catchup_tokens


@pytest.mark.parametrize("moment", [1, 2, 4, 5, 7, 8, 10, 11, 13])
def test_a_failed_draft_in_flight_is_not_trusted_again(moment: int) -> None:
    """What it filled, and what steps launched before that was known fill, never counts.

    Another row shares its first block: it too drafts again only once it is caught up.
    """
    target, draft = fakes("target")
    assert draft is not None
    text = prompt(random.Random(3), 20)
    expected = oracle(target, text, params(max_tokens=30))[0]
    draft.poisoned_prefixes.add(tuple(text + expected[:moment]))
    rig = Rig(target, draft, gamma=2, depth=1, max_catchup_tokens=100)
    rig.submit(9, text, params(max_tokens=1))
    rig.run()
    rig.submit(0, text, params(max_tokens=30))
    rig.submit(1, [*text, 3], params(max_tokens=30))
    sequence, num_planned = None, 0
    while rig.scheduler.has_work:
        rig.step()
        if sequence is None:
            num_planned = len(rows_of(rig, 1)) + len(rig.flights)
        for running in rig.scheduler.running:
            if running.request_id == 0 and running.draft_broken:
                sequence = running
                assert rig.scheduler.drafting.num_draft_computed(running) in (0, 16)
    assert sequence is not None
    assert rig.tokens(0) == expected
    assert (rig.end(0).usage.num_cached_tokens, rig.end(1).usage.num_cached_tokens) == (16, 16)
    later = [row for row in rows_of(rig, 1)[num_planned:] if row.gamma or row.num_catch_up]
    assert later
    assert later[0].num_catch_up == later[0].bound - 1 - later[0].draft_start > 2
    assert rig.tokens(1) == oracle(target, [*text, 3], params(max_tokens=30))[0]
    draft.poisoned_prefixes.clear()
    rig.submit(2, text, params(max_tokens=30))
    rig.run()
    usage = rig.end(2).usage
    assert usage.num_cached_tokens == 16
    assert usage.num_accepted_tokens == usage.num_draft_tokens > 10
    assert not any(
        result.draft_failed
        for done in rig.done
        for row, result in zip(done.plan.rows, done.rows, strict=True)
        if row.sequence.request_id == 2
    )


def test_bounds_hold_for_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Length at launch is within [known, bound]; context and steps stay within their limits."""
    lengths: list[tuple[int, int]] = []
    own_row = FakeDeviceRunner._own_row

    def spy(self: FakeDeviceRunner, staged: object) -> PlannedRow:
        row = own_row(self, staged)  # type: ignore[arg-type]
        if row.is_decode:
            lengths.append((len(row.sequence.token_ids), row.bound))
        return row

    monkeypatch.setattr(FakeDeviceRunner, "_own_row", spy)
    target, draft = fakes("noisy")
    rng = random.Random(7)
    rig = Rig(target, draft, gamma=lambda: rng.choice([0, 2, 5]), depth=1, max_model_len=70)
    for request_id in range(6):
        rig.submit(request_id, prompt(rng, rng.randint(3, 40)), params(max_tokens=60))
    rig.run()
    assert all(length <= bound <= 70 for length, bound in lengths)
    assert any(length < bound for length, bound in lengths)
    for done in rig.done:
        context, rows = done.plan.context, done.plan.rows[: done.plan.num_decode_rows]
        if context is not None:
            assert context.num_kv_tokens == sum(row.bound for row in rows)
            assert 0 <= context.max_stale_tokens <= context.sum_stale_tokens


@pytest.mark.parametrize("draft", ["target", "noisy", None])
@pytest.mark.parametrize("block_size", [2, 5])
def test_small_blocks_and_faults(draft: Kind | None, block_size: int) -> None:
    """Random gammas, aborts and NaN in a pool of small blocks: answers, or nothing wrong."""
    num_preemptions = 0
    for seed in range(6):
        rng = random.Random(f"{seed} {draft} {block_size}")
        num_blocks = 100 // block_size
        target, model = fakes(draft, num_base_blocks=num_blocks, block_size=block_size)
        rig = Rig(
            target,
            model,
            gamma=lambda rng=rng: rng.choice([0, 1, 3, 8]),
            depth=1,
            eager=rng.random() < 0.5,
            num_base_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=rng.randint(2, 6),
            max_num_batched_tokens=rng.choice([9, 40]),
            max_catchup_tokens=rng.choice([3, 30]),
            max_model_len=90,
        )
        stem = prompt(rng, 30)
        requests, expected = {}, {}
        for request_id in range(10):
            requests[request_id] = stem[: rng.randint(1, 30)] + prompt(rng, rng.randint(0, 3))
            sampling = params(max_tokens=rng.randint(1, 50), temperature=0.8, seed=request_id)
            text = requests[request_id]
            expected[request_id] = oracle(target, text, sampling, max_model_len=90)[0]
            for model_ in filter(None, (target, model)):
                if rng.random() < 0.1:
                    answer = expected[request_id]
                    model_.poisoned_prefixes.add((*text, *answer[: rng.randint(0, 20)]))
            rig.submit(request_id, text, sampling)
            for _ in range(rng.choice([0, 1, 4])):
                rig.step()
            if rng.random() < 0.2:
                rig.launch()
                rig.abort(rng.randrange(request_id + 1))
                rig.scheduler.check_integrity()
                rig.drain()
        rig.run()
        num_preemptions += rig.scheduler.num_preemptions
        for request_id in requests:
            got, reason = rig.tokens(request_id), rig.end(request_id).reason
            assert got == expected[request_id][: len(got)]
            assert reason in ("abort", "error") or len(got) == len(expected[request_id])
        assert rig.blocks.num_free == rig.blocks.num_total
    assert num_preemptions > 0
