"""Between planner.proto's messages and the core's values; limits are checked on the values."""

from __future__ import annotations

import math
from functools import lru_cache

from nightjar.buckets import BucketGrid
from nightjar.v1 import planner_pb2 as pb
from planner_service.context import (
    MAX_BATCH_SIZE,
    MAX_GAMMA,
    Context,
    Outcome,
    Profile,
    check_range,
    check_text,
)
from planner_service.planner import Decision, Report, Stream

MAX_REPORTS = 1024


def profile(message: pb.Profile, field: str) -> Profile:
    """Read and check a profile."""
    read = Profile(
        target=message.target,
        draft=message.draft,
        proposer=message.proposer,
        dtype=message.dtype,
        device=message.device,
        tensor_parallel_size=message.tensor_parallel_size,
        engine=message.engine,
    )
    read.check(field)
    return read


def worker_id(text: str, field: str) -> str:
    """Check a worker's or a client's name."""
    check_text(field, text)
    return text


def limits(hello: pb.PlanHello) -> tuple[int, int]:
    """Largest gamma and largest batch of a worker."""
    check_range("hello.max_gamma", hello.max_gamma, 0, MAX_GAMMA)
    check_range("hello.max_batch_size", hello.max_batch_size, 1, MAX_BATCH_SIZE)
    return hello.max_gamma, hello.max_batch_size


def context(message: pb.Context, field: str, max_gamma: int, max_batch_size: int) -> Context:
    """Read and check a context."""
    utilization = message.cpu_utilization
    read = Context(
        message.batch_size,
        message.num_kv_tokens,
        message.num_prefill_tokens,
        message.num_waiting,
        message.num_free_blocks,
        message.max_stale_tokens,
        message.sum_stale_tokens,
        message.draft_resident,
        # Measured over a short while, it may come out a little above 1.
        utilization if not utilization > 1 or math.isinf(utilization) else 1.0,
        message.feasible_max_gamma,
        max_gamma,
        max_batch_size,
    )
    read.check(field)
    return read


def report(message: pb.StepReport, field: str, max_gamma: int, max_batch_size: int) -> Report:
    """Read and check a report."""
    outcome = Outcome(
        message.num_steps,
        message.num_timed_steps,
        message.step_us,
        message.num_timed_emitted,
        message.num_timed_rows,
        message.num_emitted,
        message.num_prefill_tokens,
        message.catch_up_us,
        message.num_catch_up_tokens,
        message.draft_prefill_us,
        tuple(message.reached[: MAX_GAMMA + 1]),
        tuple(message.accepted[: MAX_GAMMA + 1]),
        message.num_catch_up_steps,
        message.mixed_step_us,
    )
    outcome.check(field, message.gamma)
    check_text(f"{field}.decision_id", message.decision_id)
    ran = context(message.context, f"{field}.context", max_gamma, max_batch_size)
    return Report(ran, message.gamma, message.decision_id, outcome)


def decision_message(decision: Decision) -> pb.Decision:
    """A decision to send."""
    choice, asked = decision.choice, decision.context
    grid, bucket = choice.grid, asked.bucket
    if grid is not None:
        bucket = grid.bucket(asked.batch_size, asked.num_kv_tokens)
    message = pb.Decision(
        decision_id=decision.decision_id,
        policy_version=decision.version,
        bucket=bucket,
        hold_steps=choice.hold_steps,
        explored=choice.explored,
        propensity=choice.propensity,
        session=decision.session,
        num_extra_drafts=choice.num_extra_drafts,
    )
    rows = [_row(bucket, choice.gamma, choice.exploit_gamma)]
    rows += [_row(at, *gammas) for at, gammas in choice.table.items() if at != bucket]
    known = _one_per_batch_size(asked.max_batch_size) if grid is None else _of(grid)
    message.MergeFromString(b"".join((known, *rows)))
    return message


# Parts of decisions as bytes: joined they are one message, and most are the same every time.


@lru_cache(maxsize=65_536)
def _row(bucket: int, gamma: int, exploit_gamma: int) -> bytes:
    """A row of the table."""
    row = pb.BucketGamma(bucket=bucket, gamma=gamma, exploit_gamma=exploit_gamma)
    return pb.Decision(table=[row]).SerializeToString()


@lru_cache(maxsize=64)
def _one_per_batch_size(max_batch_size: int) -> bytes:
    """One bucket a batch size: the bucket of a batch is its size."""
    return _of(BucketGrid(tuple(range(1, max_batch_size + 1))))


@lru_cache(maxsize=64)
def _of(grid: BucketGrid) -> bytes:
    known = pb.BucketGrid(
        batch_size_edges=grid.batch_size_edges, kv_token_edges=grid.kv_token_edges
    )
    return pb.Decision(grid=known).SerializeToString()


def watched_message(
    decision: pb.Decision, asked: Context, stream: Stream, now_ms: int
) -> pb.WatchDecisionsResponse:
    """A decision for those who watch."""
    return pb.WatchDecisionsResponse(
        decision=decision,
        context=_context_message(asked),
        worker_id=stream.worker_id,
        profile_key=stream.profile.key,
        decided_at_ms=now_ms,
    )


def watched_report(report: Report, stream: Stream, now_ms: int) -> pb.WatchDecisionsResponse:
    """A report for those who watch."""
    known = pb.StepReport.DESCRIPTOR.fields_by_name
    sums = {name: value for name, value in report.outcome._asdict().items() if name in known}
    return pb.WatchDecisionsResponse(
        report=pb.StepReport(
            context=_context_message(report.context),
            gamma=report.gamma,
            decision_id=report.decision_id,
            **sums,
        ),
        worker_id=stream.worker_id,
        profile_key=stream.profile.key,
        decided_at_ms=now_ms,
    )


def _context_message(asked: Context) -> pb.Context:
    known = pb.Context.DESCRIPTOR.fields_by_name
    return pb.Context(**{name: getattr(asked, name) for name in asked._fields if name in known})
