"""`nightjar policy`: list, activate, roll back and inspect policies of a running planner."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nightjar.errors import ConfigError
from planner_service.admin_client import AdminClient

EXAMPLES = """examples:
  nightjar policy list
  nightjar policy activate fixed --param gamma=2
  nightjar policy activate nightjar --param gamma_max=4 --param estimator=mean_of_ratios
  nightjar policy rollback
  nightjar policy state --json

Workers keep their streams and their requests; the next decision is the new version's.
The planner is --planner, else $NIGHTJAR_PLANNER, else the one that `nightjar up` started."""


def main(argv: Sequence[str]) -> int:
    """Run one subcommand; returns the exit status."""
    options = _parser().parse_args(argv)
    with AdminClient(options.planner or default_address()) as client:
        match options.verb:
            case "list":
                answer = client.list_policies()
                lines = _list_lines(answer)
            case "activate":
                parameters = _parameters(options.param)
                answer = client.activate(options.name, parameters, options.profile, options.worker)
                lines = [f"active: {_version_line(answer['version'])}"]
            case "rollback":
                answer = client.rollback(options.profile, options.worker)
                lines = [f"active again: {_version_line(answer['version'])}"]
            case _:
                answer = client.state(options.profile)
                lines = _state_lines(answer)
    print(json.dumps(answer, indent=2) if options.json else "\n".join(lines))
    return 0


def default_address() -> str:
    """Address of the planner to talk to where none is given.

    Raises:
        ConfigError: Nothing says where a planner is.
    """
    if address := os.environ.get("NIGHTJAR_PLANNER"):
        return address
    folder = Path(os.environ.get("NIGHTJAR_RUN_DIR") or Path.home() / ".cache/nightjar/run")
    path = folder / "addresses.json"
    try:
        address = json.loads(path.read_text())["planner"]
        if isinstance(address, str) and address:
            return address
        raise ValueError("'planner' is no address")
    except FileNotFoundError:
        raise ConfigError(
            "--planner: give the planner's address, or start a system with `nightjar up`"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: does not say where the planner is ({error!r})") from None


def _parser() -> argparse.ArgumentParser:
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--planner", default="", metavar="ADDRESS", help="address of the planner")
    shared.add_argument("--json", action="store_true", help="print the answer as JSON")
    profile = argparse.ArgumentParser(add_help=False)
    profile.add_argument(
        "--profile", default="", metavar="KEY", help="one profile (`policy state` lists them)"
    )
    scope = argparse.ArgumentParser(add_help=False, parents=[profile])
    scope.add_argument(
        "--worker", action="append", default=[], metavar="ID", help="one worker; may be repeated"
    )
    parser = argparse.ArgumentParser(
        prog="nightjar policy",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb, parents, words in (
        ("list", [shared], "policies with their parameters, and versions, newest first"),
        ("activate", [shared, scope], "make a version of a policy and use it at once"),
        ("rollback", [shared, scope], "go back to the version before"),
        ("state", [shared, profile], "the version that decides, and what was learned"),
    ):
        added = verbs.add_parser(
            verb,
            parents=parents,
            help=words,
            description=words,
            epilog=EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if verb == "activate":
            added.add_argument("name", metavar="NAME", help="policy, as `policy list` shows it")
            added.add_argument(
                "--param", action="append", default=[], metavar="NAME=VALUE", help="may be repeated"
            )
    return parser


def _parameters(pairs: Iterable[str]) -> dict[str, str]:
    parameters: dict[str, str] = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator or not name:
            raise ConfigError(f"--param={pair!r}: must be NAME=VALUE, for example gamma=2")
        if name in parameters:
            raise ConfigError(f"--param={pair!r}: {name} is given twice")
        parameters[name] = value
    return parameters


def _list_lines(answer: Mapping[str, Any]) -> list[str]:
    lines = ["POLICIES"]
    for policy in answer["policies"]:
        lines.append(f"  {policy['name']:<12} {policy['summary']}")
        lines += [
            f"  {'':<12}   {p['name']}={p['default_value']}: {p['description']}"
            for p in policy["parameters"]
        ]
    lines += ["", "VERSIONS, newest first (* decides)"]
    lines += [
        f"{'*' if version['active'] else ' '} {_version_line(version)}"
        for version in answer["versions"]
    ]
    return lines


def _version_line(version: Mapping[str, Any]) -> str:
    parameters = " ".join(f"{k}={v}" for k, v in sorted(version["parameters"].items())) or "-"
    scope = version.get("scope") or {}
    where = [f"profile {scope['profile_key']}"] if scope.get("profile_key") else []
    where += [f"worker {name}" for name in scope.get("worker_ids", [])]
    line = f"{version['version']:<14} {parameters}  for {', '.join(where) or 'everyone'}"
    if millis := int(version["activated_at_ms"]):
        moment = datetime.fromtimestamp(millis / 1000, UTC)
        line += f"  since {moment:%Y-%m-%d %H:%M:%S} UTC ({version['reason']})"
    return line


def _state_lines(answer: Mapping[str, Any]) -> list[str]:
    lag_s = int(answer["store_lag_ms"]) / 1000
    store = "answers" if answer["store_connected"] else "none answers; decisions go on from memory"
    lines = [
        f"version  {_version_line(answer['version'])}",
        f"store    {store}; {lag_s:.1f} s behind, {answer['num_dropped_updates']} updates dropped",
    ]
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
        f"catch-up {state['catch_up_us_per_token']:.0f} us a token "
        f"(of it {state['catch_up_us_per_step']:.0f} us a step whatever the tokens)",
        f"  prior: {state['num_prior_steps']} of the steps, learned before this planner knew of "
        f"it; acceptance {elsewhere} on other profiles of these models",
    ]
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
