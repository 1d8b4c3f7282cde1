"""`nightjar policy evaluate`: another policy's throughput, estimated from audit logs."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nightjar import log
from nightjar.errors import ConfigError, InvalidRequest, NotPossibleNow
from planner_service.bins import Drawn, Heard, Log, parse, put_together
from planner_service.evaluate import evaluate
from planner_service.plugins.discovery import installed, load_plugins
from planner_service.policies import BUILT_IN
from planner_service.policies.policy import Policy
from planner_service.replay import Replay

SUMMARY = "estimate another policy off-line from audit logs"
MAX_LINE_CHARACTERS = 1_000_000
NUM_NAMED = 5  # bad lines that are named
MIN_ESS = 30.0
PLUGIN_TIMEOUT_S = 1.0  # nobody waits for an answer here


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the verb, beside --json, --profile and --param."""
    parser.add_argument("log", nargs="+", metavar="LOG", help="audit log, in any order")
    parser.add_argument("--policy", required=True, metavar="NAME", help="policy to estimate")
    parser.add_argument("--seed", type=int, default=0, help="of the policy's own draws")
    parser.add_argument(
        "--min-ess",
        type=float,
        default=MIN_ESS,
        metavar="BINS",
        help="least effective sample size of a bucket, at least 5 [default: %(default)g]",
    )
    parser.add_argument(
        "--allow-partial", action="store_true", help="report the buckets with overlap alone"
    )


def run(options: argparse.Namespace, parameters: Mapping[str, str]) -> int:
    """Print estimates; returns 0.

    Raises:
        ConfigError: A file, a flag or the log as a whole is unusable.
        InvalidRequest: The policy or a parameter is unknown.
        NotPossibleNow: The log says too little about the policy in some bucket.
    """
    if not options.min_ess >= 5:
        raise ConfigError(f"--min-ess={options.min_ess:g}: must be at least 5")
    with _policy(options.policy, parameters) as (policy, shown):
        lines, bad = read(options.log)
        profile, told = _log(lines, options.profile, bad)
        bins = told.bins
        if not bins:
            raise ConfigError(f"LOG: no bin with a choice and a timed step; {_counts(lines, bad)}")
        replay = Replay(policy, options.seed)
        found = evaluate(bins, replay.run(told.events), min_ess=options.min_ess)
    if found.overall is None or (found.refused and not options.allow_partial):
        reasons = "".join(f"\n  {r.name} ({r.share:.1%}): {r.reason}" for r in found.refused)
        hint = "" if found.overall is None else "\n--allow-partial reports the other buckets"
        raise NotPossibleNow(f"too little overlap between log and policy in{reasons}{hint}")
    answer: dict[str, Any] = {
        "policy": options.policy,
        "parameters": shown,
        "profile": profile,
        "num_lines": len(lines),
        "num_bad_lines": len(bad),
        "bad_lines": bad[:NUM_NAMED],
        "num_bins": len(bins),
        "num_steps": told.num_steps,
        "steps_left_out": dict(told.steps_left_out),
        "mean_unseen_probability": sum(replay.unseen.values()) / len(bins),
        "covered_share": found.overall.share,
        "buckets": [_plain(row) for row in found.buckets],
        "overall": _plain(found.overall),
        "refused": [refusal._asdict() for refusal in found.refused],
    }
    print(json.dumps(answer, indent=2) if options.json else "\n".join(_text(answer)))
    return 0


def read(paths: Sequence[str]) -> tuple[list[Drawn | Heard], list[str]]:
    """Lines of files, and what is wrong with the bad ones, by file and number.

    Raises:
        ConfigError: A file cannot be read.
    """
    lines, bad = list[Drawn | Heard](), list[str]()
    for path in paths:
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                number = 0
                while text := file.readline(MAX_LINE_CHARACTERS):
                    number += 1
                    try:
                        if text.strip():
                            lines.append(parse(text))
                    except ValueError as error:
                        bad.append(f"{path}:{number}: {error}")
        except OSError as error:
            raise ConfigError(f"LOG {path!r}: {error.strerror}") from None
    return lines, bad


@contextlib.contextmanager
def _policy(name: str, parameters: Mapping[str, str]) -> Iterator[tuple[Policy, dict[str, str]]]:
    """The policy and all its parameters; a plug-in runs in a process that ends with the block."""
    known, process = dict(BUILT_IN), None
    if name not in known and installed():
        log.configure("policy")  # what is said of plug-ins goes to standard error
        plugins, process = load_plugins(BUILT_IN, PLUGIN_TIMEOUT_S)
        known.update(plugins)
    try:
        if name not in known:
            words = f"unknown policy {name[:64]!r}; known: {', '.join(known)}"
            raise InvalidRequest("policy", words)
        with known[name].on_trial(parameters) as made:
            yield made
    finally:
        if process is not None:
            process.close()


def _log(lines: Sequence[Drawn | Heard], wanted: str, bad: Sequence[str]) -> tuple[str, Log]:
    """The log of one profile.

    Raises:
        ConfigError: There is none, or which one is not said.
    """
    keys = sorted({line.profile_key for line in lines})
    if not keys:
        raise ConfigError(f"LOG: empty; {_counts(lines, bad)}")
    if wanted and wanted not in keys:
        raise ConfigError(f"--profile={wanted!r}: not in the log, which has {', '.join(keys)}")
    if len(keys) > 1 and not wanted:
        raise ConfigError(f"--profile: choose one of the log's, {', '.join(keys)}")
    profile = wanted or keys[0]
    return profile, put_together(line for line in lines if line.profile_key == profile)


def _counts(lines: Sequence[Drawn | Heard], bad: Sequence[str]) -> str:
    decisions = sum(isinstance(line, Drawn) for line in lines)
    named = "".join(f"\n  {text}" for text in bad[:NUM_NAMED])
    return f"{decisions} decisions, {len(lines) - decisions} reports, {len(bad)} bad lines{named}"


def _plain(row: Any) -> dict[str, Any]:
    values = {n: v._asdict() if hasattr(v, "_asdict") else v for n, v in row._asdict().items()}
    return dict(values)


def _text(answer: Mapping[str, Any]) -> list[str]:
    parameters = " ".join(f"{k}={v}" for k, v in answer["parameters"].items())
    lines = [
        f"policy   {answer['policy']} {parameters}".rstrip() + f", profile {answer['profile']}",
        f"log      {answer['num_lines']} lines, {answer['num_bins']} bins, "
        f"{answer['num_steps']} steps",
    ]
    if answer["num_bad_lines"]:
        lines.append(f"bad      {answer['num_bad_lines']} lines left out:")
        lines += [f"         {text}" for text in answer["bad_lines"]]
    for reason, steps in answer["steps_left_out"].items():
        lines.append(f"left out {steps} steps ({steps / answer['num_steps']:.1%}): {reason}")
    if answer["mean_unseen_probability"] > 0.001:
        lines.append(
            f"assumed  {answer['mean_unseen_probability']:.1%} of the policy's probability was "
            "never drawn here and is spread evenly over its other arms"
        )
    columns = f"{'bins':>6} {'share':>6} {'logged':>10} {'SNIPS':>24} {'doubly robust':>24}"
    lines += ["", f"{'tokens/s':<13} {columns} {'ESS':>8} {'weight':>7}"]
    lines += [_row_text(row) for row in (*answer["buckets"], answer["overall"])]
    if answer["refused"]:
        lines += ["", f"estimates cover {answer['covered_share']:.1%} of the steps; refused:"]
        lines += [f"  {r['name']} ({r['share']:.1%}): {r['reason']}" for r in answer["refused"]]
    return lines


def _row_text(row: Mapping[str, Any]) -> str:
    cells = [
        f"{v['tokens_per_s']:.1f} [{v['low']:.1f}, {v['high']:.1f}]"
        for v in (row["snips"], row["doubly_robust"])
    ]
    return (
        f"{row['name']:<13} {row['num_bins']:>6} {row['share']:>6.1%} "
        f"{row['logged']['tokens_per_s']:>10.1f} {cells[0]:>24} {cells[1]:>24} "
        f"{row['effective_sample_size']:>8.1f} {row['mean_weight']:>7.2f}"
    )
