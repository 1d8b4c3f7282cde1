"""Order of trust, holds, questions."""

from __future__ import annotations

import random

from nightjar.buckets import BucketGrid
from worker.engine.decisions import Decisions
from worker.messages import Decision


def decision(
    name: str = "d1",
    *,
    version: str = "1",
    table: dict[int, tuple[int, int]] | None = None,
    bucket: int = 0,
    hold_steps: int = 3,
    edges: tuple[int, ...] = (2, 4),
    kv_edges: tuple[int, ...] = (),
    num_extra_drafts: int = 0,
) -> Decision:
    """A decision over buckets of batch sizes 0-1, 2-3 and 4 up."""
    return Decision(
        decision_id=name,
        policy_version=version,
        batch_size_edges=edges,
        kv_token_edges=kv_edges,
        table={0: (4, 3), 1: (2, 2)} if table is None else table,
        bucket=bucket,
        hold_steps=hold_steps,
        explored=False,
        session=name.encode(),
        num_extra_drafts=num_extra_drafts,
    )


def connected() -> Decisions:
    """With a planner, its stream open since time 0."""
    decisions = Decisions(planned=True, fixed_gamma=0)
    decisions.link(True, 0.0)
    return decisions


def test_without_planner_the_fixed_gamma_holds() -> None:
    """No planner configured: the configured gamma, for every batch, and no question."""
    decisions = Decisions(planned=False, fixed_gamma=3)
    choice = decisions.choose(5, 100, 1e9)
    assert (choice.gamma, choice.exploit_gamma, choice.decision_id) == (3, 3, "")
    assert not decisions.asks(5, 100, 0.0)


def test_before_the_first_decision_gamma_is_zero_and_asked_for() -> None:
    """A planner that has not answered: gamma 0; asked once, and again when no answer comes."""
    decisions = Decisions(planned=True, fixed_gamma=3)
    assert not decisions.asks(1, 10, 0.0)  # no stream yet
    decisions.link(True, 0.0)
    choice = decisions.choose(1, 10, 0.0)
    assert choice.gamma == 0
    assert decisions.asks(1, 10, 0.0)
    assert not decisions.asks(1, 10, 0.05)
    assert decisions.asks(1, 10, 0.11)


def test_a_hold_lasts_its_steps_and_only_in_its_bucket() -> None:
    """A hold counts steps of its own bucket; others take the table and are asked about."""
    decisions = connected()
    decisions.take(decision(), 0.0)
    assert decisions.session == b"d1"
    for step in range(3):
        choice = decisions.choose(1, 10, 0.1)
        assert (choice.gamma, choice.held, choice.decision_id) == (4, True, "d1")
        assert not decisions.asks(1, 10, 0.1)
        other = decisions.choose(2, 10, 0.1)
        assert (other.gamma, other.held) == (2, False)
        assert not decisions.ran(other)
        assert decisions.ran(choice) == (step == 2)
    choice = decisions.choose(1, 10, 0.2)
    assert (choice.gamma, choice.held) == (4, False)
    assert decisions.asks(1, 10, 0.2)


def test_holds_of_several_buckets_live_side_by_side() -> None:
    """A batch that comes back to a bucket goes on with what is left of its hold."""
    decisions = connected()
    decisions.take(decision("a", table={0: (4, 4)}, hold_steps=2), 0.0)
    decisions.take(decision("b", table={0: (1, 1), 1: (2, 2)}, bucket=1), 0.0)
    assert decisions.choose(2, 0, 0.0).decision_id == "b"
    choice = decisions.choose(1, 0, 0.0)
    assert (choice.decision_id, choice.gamma) == ("a", 4)
    assert not decisions.ran(choice)
    assert decisions.ran(choice)


def test_a_new_version_ends_every_hold() -> None:
    """After a hot swap no step runs under the old version."""
    decisions = connected()
    decisions.take(decision("a"), 0.0)
    decisions.take(decision("b", version="2", bucket=1), 0.0)
    choice = decisions.choose(1, 0, 0.0)
    assert (choice.policy_version, choice.held) == ("2", False)
    assert decisions.asks(1, 0, 0.0)


def test_a_lost_stream_leaves_the_hold_250_ms_and_the_table_60_s() -> None:
    """Held, then table, then gamma 0, as time goes by without a planner."""
    decisions = connected()
    decisions.take(decision(table={0: (4, 3)}), 0.0)
    decisions.link(False, 10.0)
    assert decisions.choose(1, 0, 10.2).held
    late = decisions.choose(1, 0, 10.3)
    assert (late.gamma, late.held) == (4, False)
    assert decisions.choose(1, 0, 61.0).gamma == 0
    assert not decisions.asks(1, 0, 61.0)


def test_a_bucket_the_table_lacks_runs_at_zero() -> None:
    """No decision for the bucket: gamma 0, with the question put."""
    decisions = connected()
    decisions.take(decision(), 0.0)
    choice = decisions.choose(9, 0, 0.0)
    assert (choice.bucket, choice.gamma, choice.exploit_gamma) == (2, 0, 0)
    assert decisions.asks(9, 0, 0.0)


def test_a_decision_about_a_bucket_it_does_not_hold_is_no_hold() -> None:
    """A table without its own bucket, or a hold of no steps, holds nothing."""
    for bad in (decision(table={1: (2, 2)}), decision(hold_steps=0)):
        decisions = connected()
        decisions.take(bad, 0.0)
        assert not decisions.choose(1, 0, 0.0).held
        assert decisions.asks(1, 0, 0.0)


# About what a policy with a coarse grid sends: 20 edges of batch size, 6 of KV tokens.
COARSE = BucketGrid(
    (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 192, 256),
    (1_000, 4_000, 16_000, 64_000, 128_000, 256_000),
)


def coarse(
    name: str, batch_size: int, num_kv_tokens: int, gammas: dict[int, int], **fields: object
) -> Decision:
    """A decision about a context, over the coarse grid; it holds for 5 steps."""
    bucket = COARSE.bucket(batch_size, num_kv_tokens)
    return decision(
        name,
        table={b: (gamma, gamma) for b, gamma in gammas.items()},
        bucket=bucket,
        edges=COARSE.batch_size_edges,
        kv_edges=COARSE.kv_token_edges,
        **{"hold_steps": 5, **fields},  # type: ignore[arg-type]
    )


def test_batches_and_kv_tokens_share_a_coarse_bucket() -> None:
    """All contexts between two edges take one entry and one hold; past an edge, another."""
    decisions = connected()
    here, longer = COARSE.bucket(17, 20_000), COARSE.bucket(17, 64_000)
    assert COARSE.num_buckets == 147
    decisions.take(coarse("a", 17, 20_000, {here: 3, longer: 1}), 0.0)
    for batch_size, num_kv_tokens in ((16, 16_000), (19, 63_999), (17, 30_000)):
        choice = decisions.choose(batch_size, num_kv_tokens, 0.0)
        assert (choice.bucket, choice.gamma, choice.held) == (here, 3, True)
        assert not decisions.asks(batch_size, num_kv_tokens, 0.0)
        decisions.ran(choice)
    choice = decisions.choose(17, 64_000, 0.0)
    assert (choice.bucket, choice.gamma, choice.held, choice.decision_id) == (longer, 1, False, "a")
    uncovered = decisions.choose(20, 20_000, 0.0)
    assert (uncovered.gamma, uncovered.decision_id, uncovered.grid) == (0, "", choice.grid)
    assert decisions.asks(20, 20_000, 0.0)
    decisions.take(coarse("b", 20, 20_000, {COARSE.bucket(20, 20_000): 2, here: 4}), 0.0)
    assert decisions.choose(20, 20_000, 0.0).gamma == 2
    held = decisions.choose(18, 20_000, 0.0)  # two steps of the hold are left
    assert (held.decision_id, held.gamma) == ("a", 3)
    assert not decisions.ran(held)
    assert decisions.ran(held)
    assert decisions.choose(18, 20_000, 0.0).gamma == 4


def test_a_new_grid_ends_every_hold_of_the_same_version() -> None:
    """A hold of bucket 1 says nothing about bucket 1 of other edges."""
    decisions = connected()
    decisions.take(decision("a", table={1: (4, 4)}, bucket=1), 0.0)
    before = decisions.choose(2, 10, 0.0)
    assert before.held
    decisions.take(decision("b", table={1: (2, 2), 2: (1, 1)}, bucket=2, edges=(5, 9)), 0.0)
    choice = decisions.choose(6, 10, 0.0)
    assert (choice.bucket, choice.gamma, choice.held) == (1, 2, False)
    assert choice.grid != before.grid
    assert not decisions.ran(before)
    decisions.take(decision("c", table={2: (1, 1)}, bucket=2, edges=(5, 9)), 0.0)
    assert decisions.choose(9, 10, 0.0).grid == choice.grid


def test_extra_drafts_come_with_the_decision_that_is_trusted() -> None:
    """Held or from the table, a choice has its own decision's extra drafts; gamma 0 has none."""
    decisions = connected()
    decisions.take(decision("a", num_extra_drafts=2), 0.0)
    decisions.take(decision("b", bucket=1, num_extra_drafts=1), 0.0)
    assert decisions.choose(1, 10, 0.0).num_extra_drafts == 2
    assert decisions.choose(2, 10, 0.0).num_extra_drafts == 1
    assert decisions.choose(9, 10, 0.0).num_extra_drafts == 0


def test_one_question_at_a_time_wherever_the_batch_goes() -> None:
    """While a question is open nothing else is asked, until its answer, or 100 ms, have come."""
    decisions = connected()
    assert decisions.asks(1, 10, 0.0)
    assert not decisions.asks(2, 10, 0.01)
    assert not decisions.asks(9, 10, 0.02)
    # One that comes unasked, about another bucket, is no answer.
    decisions.take(decision("push", table={2: (1, 1)}, bucket=2), 0.03)
    assert not decisions.asks(2, 10, 0.04)
    decisions.take(decision("answer"), 0.05)
    assert decisions.asks(2, 10, 0.06)
    assert not decisions.asks(4, 10, 0.15)  # held by "push" as it is
    assert decisions.asks(3, 10, 0.17)


def test_wandering_batches_ask_once_a_hold() -> None:
    """On a coarse grid questions are as rare as holds are long, wherever the batch wanders."""
    decisions, rng = connected(), random.Random(1)
    batch_size, num_asked, asked, num_steps = 20, 0, None, 4_000
    for step in range(num_steps):
        now = step * 0.005
        if asked is not None:  # the answer takes less than a step
            everything = dict.fromkeys(range(COARSE.num_buckets), 2)
            decisions.take(coarse(f"d{step}", *asked, everything, hold_steps=16), now)
            asked = None
        batch_size = min(64, max(1, batch_size + rng.randint(-3, 3)))
        num_kv_tokens = batch_size * rng.randint(150, 250)
        choice = decisions.choose(batch_size, num_kv_tokens, now)
        decisions.ran(choice)
        if decisions.asks(batch_size, num_kv_tokens, now):
            asked, num_asked = (batch_size, num_kv_tokens), num_asked + 1
    # Each question brings 16 steps; some holds are unfinished in the end.
    assert num_steps / 16 <= num_asked < num_steps / 16 + 40
