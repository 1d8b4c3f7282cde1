"""`nightjar policy`: list, activate, roll back and inspect policies of a running planner."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from nightjar.errors import ConfigError
from planner_service import evaluate_cli, watch_cli
from planner_service.admin_client import AdminClient
from planner_service.cli_lines import history_lines, list_lines, state_lines, version_line

EXAMPLES = """examples:
  nightjar policy list
  nightjar policy activate fixed --param gamma=2
  nightjar policy activate nightjar --param gamma_max=4 --param estimator=mean_of_ratios
  nightjar policy activate fixed --param gamma=4 --canary 0.1 --min-net-benefit -0.05 --for 60s
  nightjar policy rollback
  nightjar policy history
  nightjar policy state --json
  nightjar policy watch --reports
  nightjar policy evaluate audit.jsonl --policy fixed --param gamma=2

Workers keep their streams and their requests; the next decision is the new version's.
The planner is --planner, else $NIGHTJAR_PLANNER, else the one that `nightjar up` started."""


def main(argv: Sequence[str]) -> int:
    """Run one subcommand; returns the exit status."""
    options = _parser().parse_args(argv)
    if options.verb == "evaluate":
        return evaluate_cli.run(options, _parameters(options.param))
    if options.verb == "watch":
        return watch_cli.run(options, options.planner or default_address())
    with AdminClient(options.planner or default_address()) as client:
        match options.verb:
            case "list":
                answer = client.list_policies()
                lines = list_lines(answer)
            case "activate":
                parameters = _parameters(options.param)
                answer = client.activate(
                    options.name,
                    parameters,
                    options.profile,
                    options.worker,
                    canary_share=options.canary,
                    floor=_floor(options),
                )
                lines = [f"active: {version_line(answer['version'])}"]
            case "history":
                answer = client.list_policies(options.profile, options.worker)
                answer.pop("policies", None)
                lines = history_lines(answer)
            case "rollback":
                answer = client.rollback(options.profile, options.worker)
                lines = [f"decides now: {version_line(answer['version'])}"]
            case _:
                answer = client.state(options.profile)
                lines = state_lines(answer)
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
    as_json = argparse.ArgumentParser(add_help=False)
    as_json.add_argument("--json", action="store_true", help="print the answer as JSON")
    shared = argparse.ArgumentParser(add_help=False, parents=[as_json])
    shared.add_argument("--planner", default="", metavar="ADDRESS", help="address of the planner")
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
        ("history", [shared, scope], "versions, newest first, with why they came and went"),
        ("state", [shared, profile], "the version that decides, and what was learned"),
        ("watch", [shared, profile], watch_cli.SUMMARY),
        ("evaluate", [as_json, profile], evaluate_cli.SUMMARY),
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
                "--canary",
                type=_share,
                default=0.0,
                metavar="SHARE",
                help="share of the steps to give it, above 0 and below 1; without it, all",
            )
            added.add_argument(
                "--min-net-benefit",
                type=float,
                metavar="SHARE",
                help="withdraw it by itself when it stays below this, for example -0.05 "
                "(5 %% slower than plain decoding)",
            )
            added.add_argument(
                "--for",
                type=_seconds,
                dest="for_s",
                metavar="TIME",
                help="how long it may stay below, for example 60s or 5m",
            )
        if verb == "watch":
            watch_cli.add_arguments(added)
        if verb == "evaluate":
            evaluate_cli.add_arguments(added)
        if verb in ("activate", "evaluate"):
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


def _floor(options: argparse.Namespace) -> tuple[float, float] | None:
    if options.min_net_benefit is None and options.for_s is None:
        return None
    if options.min_net_benefit is None or options.for_s is None:
        raise ConfigError("--min-net-benefit and --for: a floor needs both")
    return options.min_net_benefit, options.for_s


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise argparse.ArgumentTypeError(f"{text!r} does not lie between 0 and 1")
    return share


def _seconds(text: str) -> float:
    found = re.fullmatch(r"([0-9]*\.?[0-9]+)(ms|s|m|h)", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is no time like 500ms, 60s, 5m or 1h")
    return float(found[1]) * {"ms": 0.001, "s": 1, "m": 60, "h": 3600}[found[2]]
