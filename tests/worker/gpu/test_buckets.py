"""Sizes that forwards are padded to: every step that may be planned has one. Pure."""

from __future__ import annotations

import random

import pytest
from engine_rig import Rig, fakes, params

from nightjar.errors import EngineFailure
from worker.config import WorkerConfig
from worker.engine.plan import MAX_SCORED
from worker.gpu.buckets import Buckets
from worker.gpu.device_rows import shape_of
from worker.gpu.placing import buckets_of


@pytest.mark.parametrize("seed", range(20))
def test_every_step_within_the_limits_has_a_size(seed: int) -> None:
    """Tokens, logits, drafting rows and catch-up of any step fit a size, and products have it."""
    rng = random.Random(seed)
    num_rows, gamma = rng.choice([1, 2, 3, 16, 100, 256]), rng.randint(0, 8)
    budget = rng.randint(max(2, num_rows), 4 * num_rows + 3000)
    catch_up = rng.randint(1, 2000)
    buckets = Buckets.of(
        max_num_seqs=num_rows,
        max_gamma=gamma,
        max_num_batched_tokens=budget,
        max_catchup_tokens=catch_up,
    )
    products, logits = set(buckets.products), set(buckets.logits)
    for _ in range(200):
        decode = rng.randint(0, num_rows)
        drafts = rng.randint(0, max(0, min(decode * gamma, budget - decode)))
        room, prompts = budget - decode - drafts, num_rows - decode
        prompt = rng.randint(0, room) if prompts else 0
        if not decode + prompt:
            continue
        scored = rng.randint(0, min(MAX_SCORED, prompt))
        num_kept = decode + drafts + scored + rng.randint(0, min(prompts, prompt - scored))
        num_tokens = decode + drafts + prompt
        size = buckets.token_bucket(num_tokens, has_prompt=prompt > 0)
        kept = buckets.kept_bucket(num_kept, size) if prompt else size
        assert num_tokens <= size <= buckets.max_tokens
        assert num_kept <= kept <= buckets.max_kept
        assert size in products
        assert kept in logits
        assert not prompt or kept in buckets.kept_buckets(size)
    for number in (1, num_rows):
        rows = buckets.row_bucket(number)
        assert rows >= number
        assert {rows, 2 * rows} <= products
        assert rows in logits
        assert 2 * rows <= buckets.max_tokens
    assert buckets.catch_up_bucket(catch_up) == max(2, catch_up) <= buckets.max_tokens
    with pytest.raises(EngineFailure, match="exceeds"):
        buckets.token_bucket(budget + 1, has_prompt=True)


def test_a_worker_that_drafts_nothing_has_no_sizes_for_drafts() -> None:
    """Its largest step without prompts is a token for each row."""
    config = WorkerConfig(
        max_num_seqs=64, max_num_batched_tokens=512, max_catchup_tokens=64, max_gamma=5
    )
    assert buckets_of(config).decode[-1] == 384
    none = WorkerConfig(**{**vars(config), "proposer": "none"})
    assert buckets_of(none).decode[-1] == 64
    assert buckets_of(none).max_kept == 64 + MAX_SCORED


def test_reports_have_room_for_drafts_that_are_not_selected() -> None:
    """Staged are the most drafts of each row: more than any step keeps where rows draft extra."""
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 16, "max_catchup_tokens": 32}
    buckets = Buckets.of(max_gamma=8, **limits)
    rig = Rig(*fakes("noisy"), gamma=1, extra=7, max_gamma=8, **limits)  # type: ignore[arg-type]
    for request_id in range(8):
        rig.submit(request_id, [1, 2, 3 + request_id], params(max_tokens=20))
    most = 0
    while rig.scheduler.has_work:
        rig.launch()
        plan = rig.flights[-1][0]
        staged = shape_of(plan, [min(row.gamma, plan.num_verified) for row in plan.rows])
        most = max(most, staged.num_kept)
        rig.retire()
    assert buckets.max_kept < most <= buckets.max_reports
