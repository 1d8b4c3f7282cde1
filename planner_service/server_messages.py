"""Between planner.proto's messages and the core's values; limits are checked on the values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

from nightjar.buckets import BucketGrid
from nightjar.errors import InvalidRequest
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
from planner_service.net_benefit import Benefit, of_stats
from planner_service.planner import Decision, Report, Stream
from planner_service.policies.policy import PolicySpec
from planner_service.sums import Stats
from planner_service.switching import us_per_step
from planner_service.versions import Floor, Scope, Version

MAX_REPORTS, MAX_WORKER_IDS, MAX_PARAMETERS = 1024, 256, 64
MAX_FLOOR, MIN_FLOOR_S, MAX_FLOOR_S = 10, 0.1, 86_400.0


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
    )
    outcome.check(field, message.gamma)
    check_text(f"{field}.decision_id", message.decision_id)
    ran = context(message.context, f"{field}.context", max_gamma, max_batch_size)
    return Report(ran, message.gamma, message.decision_id, outcome)


def scope(message: pb.PolicyScope) -> Scope:
    """Read and check a scope."""
    share = message.canary_share
    if not 0 <= share <= 1:
        raise InvalidRequest("scope.canary_share", f"must lie in [0, 1], got {share:g}")
    check_text("scope.profile_key", message.profile_key)
    if len(message.worker_ids) > MAX_WORKER_IDS:
        raise InvalidRequest("scope.worker_ids", f"at most {MAX_WORKER_IDS} workers")
    for i, name in enumerate(message.worker_ids):
        check_text(f"scope.worker_ids[{i}]", name)
        if not name:
            raise InvalidRequest(f"scope.worker_ids[{i}]", "must not be empty")
    workers = tuple(sorted(set(message.worker_ids)))
    return Scope(
        profile_key=message.profile_key,
        worker_ids=workers,
        canary_share=share if share < 1 else 0.0,
    )


def floor(request: pb.ActivatePolicyRequest) -> Floor | None:
    """Read and check a floor; None if none is set."""
    if not request.HasField("floor"):
        return None
    read = Floor(min_net_benefit=request.floor.min_net_benefit, for_s=request.floor.for_s)
    if not -1 < read.min_net_benefit <= MAX_FLOOR:
        raise InvalidRequest(
            "floor.min_net_benefit",
            f"must lie above -1 and not above {MAX_FLOOR}, got {read.min_net_benefit:g}",
        )
    if not MIN_FLOOR_S <= read.for_s <= MAX_FLOOR_S:
        raise InvalidRequest(
            "floor.for_s", f"must lie in [{MIN_FLOOR_S:g}, {MAX_FLOOR_S:g}], got {read.for_s:g}"
        )
    return read


def parameters(message: Mapping[str, str]) -> dict[str, str]:
    """Check the size of parameters; the policy checks the rest."""
    if len(message) > MAX_PARAMETERS:
        raise InvalidRequest("parameters", f"at most {MAX_PARAMETERS}")
    return dict(message)


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


def version_message(version: Version, benefit: Benefit | None, *, active: bool) -> pb.PolicyVersion:
    """A version to show."""
    shown = pb.PolicyVersion(
        version=version.id,
        name=version.name,
        parameters=version.parameters,
        scope=pb.PolicyScope(
            profile_key=version.scope.profile_key,
            worker_ids=version.scope.worker_ids,
            canary_share=version.scope.canary_share,
        ),
        activated_at_ms=version.activated_at_ms,
        reason=version.reason,
        active=active,
        withdrawn_because=version.withdrawn_because,
        withdrawn_at_ms=version.withdrawn_at_ms,
    )
    if version.floor is not None:
        shown.floor.min_net_benefit = version.floor.min_net_benefit
        shown.floor.for_s = version.floor.for_s
    if benefit is not None:
        shown.net_benefit = benefit.net
        shown.num_baseline_steps = benefit.num_baseline_steps
    return shown


def policy_message(spec: PolicySpec) -> pb.PolicyInfo:
    """A policy to show, with its parameters' ranges in words."""
    return pb.PolicyInfo(
        name=spec.name,
        summary=spec.summary,
        additive=spec.additive,
        parameters=[
            pb.PolicyParameter(
                name=parameter.name,
                default_value=str(parameter.default),
                description=f"{parameter.help} ({parameter.allowed})",
            )
            for parameter in spec.parameters
        ],
    )


def profile_state(known: Profile, stats: Stats) -> pb.ProfileState:
    """What was learned for a profile."""
    arms = [
        pb.ArmState(
            bucket=bucket,
            gamma=gamma,
            num_steps=round(sums.steps),
            seconds_per_token=sums.seconds_per_token(),
            mean_tokens_per_step=sums.emitted / sums.rows if sums.rows else 0.0,
        )
        for bucket, row in sorted(stats.buckets.items())
        for gamma, sums in sorted(row.items())
    ]
    totals, benefit = stats.totals, of_stats(stats)
    return pb.ProfileState(
        profile_key=known.key,
        profile=pb.Profile(**known.as_dict()),  # type: ignore[arg-type]
        arms=arms,
        acceptance_by_position=_rates(stats.reached, stats.accepted),
        prior_acceptance_by_position=_rates(stats.prior_reached, stats.prior_accepted),
        catch_up_us_per_token=stats.catch_up_us_per_token,
        catch_up_us_per_step=us_per_step(stats),
        num_steps=round(totals.steps),
        num_prior_steps=round(stats.num_prior_steps),
        untimed_share=1 - totals.timed_steps / totals.steps if totals.steps > 0 else 0.0,
        net_benefit=benefit.net if benefit else None,
        num_baseline_steps=benefit.num_baseline_steps if benefit else 0,
    )


def _rates(reached: Sequence[float], accepted: Sequence[float]) -> list[float]:
    """Accepted by reached, up to the last draft position that was ever reached."""
    return [part / whole for whole, part in zip(reached, accepted, strict=False) if whole > 0]
