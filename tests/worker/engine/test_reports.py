"""Sums of steps for the planner, pressure for the agent."""

from __future__ import annotations

from worker.engine.decisions import Choice
from worker.engine.plan import Plan, StepResult
from worker.engine.reports import PressureReports, ReportSums
from worker.messages import Context, Pressure


def context(*, feasible: int = 5, num_prefill_tokens: int = 0, batch_size: int = 3) -> Context:
    """Of three rows, unless told otherwise."""
    return Context(
        batch_size=batch_size,
        num_kv_tokens=90,
        num_prefill_tokens=num_prefill_tokens,
        num_waiting=0,
        num_free_blocks=10,
        max_stale_tokens=0,
        sum_stale_tokens=0,
        draft_resident=True,
        cpu_utilization=0.5,
        feasible_max_gamma=feasible,
    )


def done(
    gamma: int = 2,
    *,
    bucket: int = 3,
    step_us: int = 100,
    grid: int = 1,
    num_catch_up_tokens: int = 8,
) -> StepResult:
    """A step of three rows that delivered seven tokens."""
    choice = Choice(gamma, gamma, bucket, "d", "v", True, grid)
    plan = Plan(1, [], 3, choice, gamma)
    reached, accepted = [3, 2][:gamma], [2, 2][:gamma]
    num_tokens = num_catch_up_tokens
    return StepResult(plan, [], step_us, 5 * num_tokens, num_tokens, 5, 7, reached, accepted)


def test_sums_are_kept_by_bucket_gamma_and_decision() -> None:
    """Equal keys add up in one entry, with the newest context; others stay apart."""
    sums = ReportSums()
    sums.add(done(), context())
    sums.add(done(step_us=50), context(feasible=4))
    sums.add(done(1), context())
    sums.add(done(bucket=2), context())
    taken = sums.take(0.0)
    assert [(s.gamma, s.num_steps) for s in taken] == [(2, 2), (1, 1), (2, 1)]
    first = taken[0]
    assert (first.decision_id, first.num_timed_steps, first.step_us) == ("d", 2, 150)
    assert (first.num_emitted, first.num_timed_emitted, first.num_timed_rows) == (14, 14, 6)
    assert (first.catch_up_us, first.num_catch_up_tokens, first.draft_prefill_us) == (80, 16, 10)
    assert (first.reached, first.accepted) == ((6, 4), (4, 4))
    assert first.context.feasible_max_gamma == 4
    assert sums.take(0.0) == []


def test_steps_that_caught_up_are_counted() -> None:
    """Of three steps one caught up nothing: two did, with all tokens and microseconds summed."""
    sums = ReportSums()
    for num_tokens in (8, 0, 2):
        sums.add(done(num_catch_up_tokens=num_tokens), context())
    (entry,) = sums.take(0.0)
    assert (entry.num_steps, entry.num_catch_up_steps) == (3, 2)
    assert (entry.num_catch_up_tokens, entry.catch_up_us) == (10, 50)


def test_steps_are_added_only_to_steps_like_them() -> None:
    """Another grid, batch size, or word on what was feasible: another entry, its own context."""
    sums = ReportSums()
    for _ in range(2):
        sums.add(done(), context())
        sums.add(done(grid=2), context())  # bucket 3 of a later grid
        sums.add(done(), context(batch_size=4))  # the bucket holds batches of 3 and 4
    sums.add(done(), context(batch_size=4))
    taken = sums.take(0.0)
    assert [(s.grid, s.bucket, s.context.batch_size, s.num_steps) for s in taken] == [
        (1, 3, 3, 2),
        (2, 3, 3, 2),
        (1, 3, 4, 3),
    ]


def test_steps_without_a_decision_keep_what_was_feasible_apart() -> None:
    """The planner goes by the last context alone: it must hold for each step of the entry."""
    sums = ReportSums()
    plain = StepResult(Plan(1, [], 3, Choice(0, 0, 3, grid=1)), [], 100)
    for feasible in (5, 0, 4, 0):
        sums.add(plain, context(feasible=feasible))
    taken = sums.take(0.0)
    assert [(s.decision_id, s.num_steps, s.num_timed_steps) for s in taken] == [
        ("", 2, 2),
        ("", 2, 0),
    ]
    assert [s.context.feasible_max_gamma for s in taken] == [4, 0]


def test_steps_with_prompt_tokens_teach_acceptance_but_no_time() -> None:
    """A mixed step counts its tokens and drafts; its duration is left out."""
    sums = ReportSums()
    sums.add(done(), context(num_prefill_tokens=60))
    (entry,) = sums.take(0.0)
    assert (entry.num_steps, entry.num_timed_steps, entry.step_us) == (1, 0, 0)
    assert (entry.num_emitted, entry.num_timed_emitted, entry.num_prefill_tokens) == (7, 0, 60)
    assert entry.reached == (3, 2)


def test_steps_where_nothing_was_feasible_teach_nothing() -> None:
    """Such a step counts under no decision, and only its catch-up is told."""
    sums = ReportSums()
    sums.add(done(0), context(feasible=0))
    (entry,) = sums.take(0.0)
    assert (entry.decision_id, entry.num_timed_steps, entry.step_us) == ("", 0, 0)
    assert (entry.catch_up_us, entry.num_catch_up_tokens) == (40, 8)


def test_sums_are_due_20_ms_after_the_last_were_taken() -> None:
    """Nothing is due without sums, and not before 20 ms."""
    sums = ReportSums()
    assert not sums.due(5.0)
    sums.add(done(), context())
    assert sums.due(5.0)
    sums.take(5.0)
    sums.add(done(), context())
    assert not sums.due(5.019)
    assert sums.due(5.0201)


def test_pressure_is_told_on_change_and_every_200_ms() -> None:
    """Reports are numbered; a state that stays is repeated after 200 ms."""
    reports = PressureReports()

    def report(now: float, free: int = 5, residency: str = "resident") -> Pressure | None:
        return reports.report(
            now,
            num_free_blocks=free,
            num_total_blocks=9,
            num_waiting=1,
            num_running=2,
            exploit_gamma=3,
            residency=residency,
        )

    first = report(0.0)
    assert first is not None
    assert (first.sequence, first.num_free_blocks, first.exploit_gamma) == (1, 5, 3)
    assert report(0.1) is None
    assert report(0.11, free=4) is not None
    assert report(0.115, free=3) is None  # changes are told at most every 10 ms
    assert report(0.13, free=4, residency="offloading") is not None
    assert report(0.3, free=4, residency="offloading") is None
    last = report(0.34, free=4, residency="offloading")
    assert last is not None
    assert last.sequence == 4
