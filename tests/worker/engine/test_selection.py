"""Extra drafts: which of all rows' drafts are verified, how many, and that answers stay."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
import torch
from engine_rig import Rig, fakes, oracle, params, prompt
from fake_forward import FakeForward
from structlog.testing import capture_logs

from worker.engine.plan import Plan
from worker.sampling import sample
from worker.speculative.selection import likeliest


def by_hand(rows: list[list[float]], capacity: int) -> list[int]:
    """The rule word by word: take the largest sum that is left, of equals the lowest place."""
    left = {
        (sum(row[: position + 1]), -position, -index): index
        for index, row in enumerate(rows)
        for position in range(len(row))
    }
    taken = [0] * len(rows)
    for _ in range(min(capacity, len(left))):
        taken[left.pop(max(left))] += 1
    return taken


def worth(rows: list[list[float]], lengths: tuple[int, ...] | list[int]) -> float:
    """Sum of the cumulative log-probabilities of what is taken."""
    return sum(sum(row[: j + 1]) for row, n in zip(rows, lengths, strict=True) for j in range(n))


def test_the_likeliest_are_taken_up_to_the_capacity() -> None:
    """Equal to the rule by hand, ties included; no other prefixes of that many are worth more."""
    rng = random.Random(1)
    for _ in range(400):
        rows = [
            [-rng.choice([0.0, 0.25, 0.5, 2.0, float("inf")]) for _ in range(rng.randint(0, 4))]
            for _ in range(rng.randint(0, 4))
        ]
        total = sum(map(len, rows))
        capacity = rng.randint(0, 14)
        taken = likeliest(rows, capacity)
        assert taken == by_hand(rows, capacity)
        assert sum(taken) == min(capacity, total)
        others = itertools.product(*(range(len(row) + 1) for row in rows))
        best = max(worth(rows, other) for other in others if sum(other) == sum(taken))
        assert worth(rows, taken) == best


def reference(plan: Plan, draft: FakeForward) -> list[int]:
    """Drafts that each decode row may keep, from the draft's own logits."""
    rows = []
    for row in plan.rows[: plan.num_decode_rows]:
        tokens, scores = list(row.sequence.token_ids), []
        sampling = row.sequence.params
        for _ in range(row.gamma):
            logits = torch.from_numpy(draft.logits(tokens))[None, : draft.real_vocab_size]
            (token,) = sample(logits, [sampling], [len(tokens)])
            scale = sampling.temperature or 1.0
            scores.append(float(torch.log_softmax(logits[0] / scale, 0)[token]))
            tokens.append(token)
        rows.append(scores)
    num_drafting = sum(1 for row in rows if row)
    return by_hand(rows, plan.gamma * num_drafting)


def test_of_all_rows_drafts_the_likeliest_are_verified() -> None:
    """Step by step what is verified is what the rule says; the capacity is kept, and used."""
    seen = Counter(row for seed in range(4) for row in run_and_compare(random.Random(seed)))
    assert min(seen[kind] for kind in ("all", "more", "some", "none")) > 5, seen


def run_and_compare(rng: random.Random) -> list[str]:
    """One random run; returns what became of each drafting row: how many drafts it kept."""
    target, draft = fakes("noisy", num_base_blocks=100)
    assert draft is not None
    rig = Rig(
        target,
        draft,
        gamma=lambda: rng.choice([0, 1, 2, 3]),
        extra=lambda: rng.choice([0, 1, 2, 3]),
        max_gamma=5,
        num_base_blocks=100,
        max_num_batched_tokens=rng.choice([24, 64]),
        max_catchup_tokens=rng.choice([16, 64]),
    )
    requests = {}
    for request_id in range(8):
        text = prompt(rng, rng.randint(5, 30))
        requests[request_id] = (
            text,
            params(
                temperature=rng.choice([0.0, 0.7, 1.0]),
                seed=request_id,
                max_tokens=rng.randint(20, 60),
                max_gamma=rng.choice([None, None, 0, 1, 2, 4]),
            ),
        )
        rig.submit(request_id, *requests[request_id])
    fates = []
    while rig.scheduler.has_work:
        plan = rig.scheduler.schedule(rig.choose)
        rows, choice = plan.rows[: plan.num_decode_rows], plan.choice
        expected = reference(plan, draft) if plan.gamma else [0] * len(rows)
        for row in rows:
            cap = row.sequence.params.max_gamma
            assert row.gamma <= min(5, 5 if cap is None else cap)
            num_slots = len(row.sequence.block_table) * rig.blocks.block_size
            assert num_slots >= len(row.sequence.token_ids) + row.gamma
        num_inputs = sum(row.num_tokens for row in plan.rows)
        assert num_inputs + plan.num_verified <= rig.scheduler.max_num_batched_tokens
        done = rig.runner.launch(plan).retire()
        verified = [result.num_drafts for result in done.rows[: plan.num_decode_rows]]
        assert verified == expected
        rig.take(rig.scheduler.commit(done))
        rig.scheduler.check_integrity()
        drafting = [row.gamma for row in rows if row.gamma]
        assert sum(verified) == plan.num_verified == min(sum(drafting), plan.gamma * len(drafting))
        if drafting:
            assert choice is not None
            assert plan.gamma <= choice.gamma
            assert max(drafting) <= plan.gamma + choice.num_extra_drafts
            assert len(done.reached) == max(drafting)
            assert sum(done.reached) <= sum(verified)
            assert done.num_emitted <= len(rows) + plan.num_verified
        for row, num_verified in zip(rows, verified, strict=True):
            if num_verified == row.gamma > 0:
                fates.append("all")
            elif row.gamma and num_verified > plan.gamma:
                fates.append("more")
            elif row.gamma:
                fates.append("some" if num_verified else "none")
    for request_id, (text, sampling) in requests.items():
        assert rig.tokens(request_id) == oracle(target, text, sampling)[0]
        usage = rig.end(request_id).usage
        assert sum(n * k for n, k in enumerate(usage.gamma_histogram)) >= usage.num_draft_tokens
    return fates


def test_a_row_alone_drafts_no_more_than_gamma() -> None:
    """With one row there is nothing to choose: extra drafts would only cost."""
    target, draft = fakes("noisy")
    rig = Rig(target, draft, gamma=2, extra=3)
    rig.submit(0, prompt(random.Random(1), 20), params(max_tokens=60))
    rig.submit(1, prompt(random.Random(2), 20), params(max_tokens=60, max_gamma=0))
    while rig.scheduler.has_work:
        rig.step()
        assert all(row.gamma <= 2 for row in rig.done[-1].plan.rows)
    assert rig.end(0).usage.num_draft_tokens > 0


def test_extra_drafts_at_gamma_zero_draft_nothing() -> None:
    """Gamma 0 is plain decoding, whatever else the decision says."""
    target, draft = fakes("target")
    assert draft is not None
    rig = Rig(target, draft, gamma=0, extra=3)
    for request_id in range(3):
        rig.submit(request_id, prompt(random.Random(request_id), 20), params())
    rig.run()
    assert draft.num_runs == 0


def test_log_probabilities_are_made_only_to_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without extra drafts, or where caps leave nothing to choose, nobody asks how likely."""
    calls = []

    def refuse(*_: object) -> list[float]:
        calls.append(1)
        raise AssertionError

    monkeypatch.setattr("worker.speculative.draft_model.log_probabilities", refuse)
    for extra, cap in ((0, None), (3, 2)):
        target, draft = fakes("noisy")
        rig = Rig(target, draft, gamma=2, extra=extra)
        for request_id in range(3):
            text = prompt(random.Random(request_id), 20)
            rig.submit(request_id, text, params(max_gamma=cap, temperature=0.5))
        rig.run()
        assert rig.scheduler.num_draft_tokens > 0
    assert calls == []
    rig = Rig(*fakes("noisy"), gamma=2, extra=3)
    for request_id in range(3):
        rig.submit(request_id, prompt(random.Random(request_id), 20), params(max_tokens=9))
    with pytest.raises(AssertionError):
        rig.run()
    assert calls == [1]


def test_a_row_whose_draft_fails_leaves_its_share_to_others() -> None:
    """NaN of one row's draft: the row decodes plainly, the others may verify what it does not."""
    target, draft = fakes("target")
    assert draft is not None
    rig = Rig(target, draft, gamma=2, extra=2)
    texts = {request_id: prompt(random.Random(request_id), 20) for request_id in range(3)}
    for request_id, text in texts.items():
        rig.submit(request_id, text, params(max_tokens=40))
    expected = {n: oracle(target, text, params(max_tokens=40))[0] for n, text in texts.items()}
    broken = tuple(texts[1] + expected[1][:12])
    draft.poisoned_prefixes.add(broken)
    rig.run()
    failed = [done for done in rig.done if any(result.draft_failed for result in done.rows)]
    assert len(failed) == 1
    assert [result.num_drafts for result in failed[0].rows] == [3, 0, 3]
    assert {n: rig.tokens(n) for n in texts} == expected


def test_ngrams_ignore_extra_drafts_and_say_so_once() -> None:
    """They have no probabilities: gamma alone holds, with one line in the log."""
    target, _ = fakes(None, window=1)
    with capture_logs() as logs:
        rig = Rig(target, None, ngram=True, gamma=2, extra=3)
        for request_id in range(4):
            rig.submit(request_id, prompt(random.Random(request_id), 10), params(max_tokens=60))
        rig.run()
    told = [line for line in logs if "extra drafts are ignored" in line["event"]]
    assert len(told) == 1
    assert all(row.gamma <= 2 for done in rig.done for row in done.plan.rows)
    assert rig.scheduler.num_accepted_tokens > 0
