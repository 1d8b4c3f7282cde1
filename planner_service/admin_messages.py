"""Between planner.proto's messages for operators and the core's values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nightjar.errors import InvalidRequest
from nightjar.v1 import planner_pb2 as pb
from planner_service.context import Profile, check_text
from planner_service.net_benefit import Benefit, of_stats
from planner_service.policies.policy import PolicySpec
from planner_service.sums import Stats
from planner_service.switching import us_per_step
from planner_service.versions import Floor, Scope, Version

MAX_WORKER_IDS, MAX_PARAMETERS = 256, 64
MAX_FLOOR, MIN_FLOOR_S, MAX_FLOOR_S = 10, 0.1, 86_400.0


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
