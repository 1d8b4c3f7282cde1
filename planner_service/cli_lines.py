"""What `nightjar policy` prints: a planner's answers as lines for people."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any


def list_lines(answer: Mapping[str, Any]) -> list[str]:
    """Policies with their parameters, then versions."""
    lines = ["POLICIES"]
    for policy in answer["policies"]:
        lines.append(f"  {policy['name']:<12} {policy['summary']}")
        lines += [
            f"  {'':<12}   {p['name']}={p['default_value']}: {p['description']}"
            for p in policy["parameters"]
        ]
    lines += ["", "VERSIONS, newest first (* decides)"]
    lines += [
        f"{'*' if version['active'] else ' '} {version_line(version)}"
        for version in answer["versions"]
    ]
    return lines


def history_lines(answer: Mapping[str, Any]) -> list[str]:
    """Versions with when and why they came, and when and why they went."""
    lines = ["VERSIONS, newest first (* decides)"]
    for version in answer["versions"]:
        lines.append(f"{'*' if version['active'] else ' '} {version_line(version)}")
        if at_ms := int(version["withdrawn_at_ms"]):
            lines.append(f"    withdrawn {_moment(at_ms)}: {version['withdrawn_because']}")
    return lines


def version_line(version: Mapping[str, Any]) -> str:
    """One version in one line."""
    parameters = " ".join(f"{k}={v}" for k, v in sorted(version["parameters"].items())) or "-"
    scope = version.get("scope") or {}
    share = scope.get("canary_share", 0.0)
    where = [f"{share:.3g} of the steps"] if share else []
    where += [f"profile {scope['profile_key']}"] if scope.get("profile_key") else []
    where += [f"worker {name}" for name in scope.get("worker_ids", [])]
    line = f"{version['version']:<14} {parameters}  for {', '.join(where) or 'everyone'}"
    if at_ms := int(version["activated_at_ms"]):
        line += f"  since {_moment(at_ms)} ({version['reason']})"
    if floor := version.get("floor"):
        line += f"  floor {floor['min_net_benefit']:+.1%} for {floor['for_s']:g} s"
    if "net_benefit" in version:
        steps = version.get("num_baseline_steps", 0)
        line += f"  net benefit {version['net_benefit']:+.1%} ({steps} plain steps)"
    return line


def _moment(at_ms: int) -> str:
    return f"{datetime.fromtimestamp(at_ms / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC"


def state_lines(answer: Mapping[str, Any]) -> list[str]:
    """The version that decides, the store, and what was learned for each profile."""
    lag_s = int(answer["store_lag_ms"]) / 1000
    store = "answers" if answer["store_connected"] else "none answers; decisions go on from memory"
    lines = [
        f"version  {version_line(answer['version'])}",
        f"store    {store}; {lag_s:.1f} s behind, {answer['num_dropped_updates']} updates dropped",
    ]
    if faults := int(answer["num_policy_faults"]):
        lines.append(f"faults   {faults} versions withdrawn here because their policy failed")
    for state in answer["profiles"]:
        lines += ["", *_profile_lines(state)]
    if not answer["profiles"]:
        lines += ["", "no worker has spoken yet"]
    return lines


def _profile_lines(state: Mapping[str, Any]) -> list[str]:
    profile = state["profile"]
    drafts = profile["draft"] or "-"
    rates, elsewhere = (
        " ".join(f"{rate:.2f}" for rate in state[name]) or "-"
        for name in ("acceptance_by_position", "prior_acceptance_by_position")
    )
    lines = [
        f"profile {state['profile_key']}: {profile['target']}, "
        f"draft {drafts} ({profile['proposer']})",
        f"  {profile['dtype']} on {profile['device']}, {profile['engine']}",
        f"  {state['num_steps']} steps taught; {state['untimed_share']:.0%} of them no time, since "
        "they held prompt tokens",
        f"  acceptance by position {rates}; "
        f"catch-up {state['catch_up_us_per_token']:.0f} us a token in all; a step of it takes "
        f"{state['catch_up_us_per_step']:.0f} us whatever its tokens",
        f"  prior: {state['num_prior_steps']} of the steps, learned before this planner knew of "
        f"it; acceptance {elsewhere} on other profiles of these models",
    ]
    lines.append(f"  net benefit against plain decoding {_net_benefit(state)}")
    if state["arms"]:
        lines.append(
            f"  {'batch':>7} {'gamma':>6} {'steps':>9} {'ms/token':>9} {'tokens/step':>12}"
        )
    for arm in state["arms"]:
        seconds = float(arm["seconds_per_token"])  # "Infinity" where nothing was delivered
        lines.append(
            f"  {arm['bucket']:>7} {arm['gamma']:>6} {arm['num_steps']:>9} "
            f"{seconds * 1000:>9.2f} {arm['mean_tokens_per_step']:>12.2f}"
        )
    return lines


def _net_benefit(state: Mapping[str, Any]) -> str:
    if "net_benefit" not in state:
        return "-, since plain decoding was not measured"
    return f"{state['net_benefit']:+.1%}, against {state['num_baseline_steps']} of its steps"
