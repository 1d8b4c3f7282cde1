"""Order of trust, holds, questions."""

from __future__ import annotations

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
) -> Decision:
    """A decision over buckets of batch sizes 0-1, 2-3 and 4 up."""
    return Decision(
        decision_id=name,
        policy_version=version,
        batch_size_edges=edges,
        kv_token_edges=(),
        table={0: (4, 3), 1: (2, 2)} if table is None else table,
        bucket=bucket,
        hold_steps=hold_steps,
        explored=False,
        session=name.encode(),
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
