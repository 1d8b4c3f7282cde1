"""`nightjar policy watch`: decisions, and reports if wished, as they happen."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any, TextIO

from nightjar.errors import ConfigError
from planner_service.watch_client import watch

SUMMARY = "decisions as they are made, until Ctrl-C"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the verb, beside --planner, --json and --profile."""
    parser.add_argument("--reports", action="store_true", help="also reports, as they come in")
    parser.add_argument(
        "--jsonl",
        default="",
        metavar="FILE",
        help="append lines of JSON to a file, as the planner's own audit log has them; "
        "--json prints them",
    )


def run(options: argparse.Namespace, address: str) -> int:
    """Show what happens until Ctrl-C, or until whoever reads our output goes; returns 0.

    Raises:
        ConfigError: The file cannot be written.
        Unavailable: No planner answers, or it went away.
    """
    num_shown = 0
    with contextlib.ExitStack() as stack:
        out: TextIO = sys.stdout
        if options.jsonl:
            try:
                out = stack.enter_context(open(options.jsonl, "a", encoding="utf-8"))
            except OSError as error:
                raise ConfigError(f"--jsonl={options.jsonl!r}: {error.strerror}") from None
        as_json = bool(options.json or options.jsonl)
        show: Callable[[dict[str, Any]], str] = json.dumps if as_json else human
        try:
            for line in watch(address, options.profile, include_reports=options.reports):
                print(show(line), file=out, flush=True)
                num_shown += 1
        except KeyboardInterrupt:
            if options.jsonl:
                print(f"{num_shown} lines appended to {options.jsonl}", file=sys.stderr)
        except BrokenPipeError:  # `| head` has seen enough; its end must not fail again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except OSError as error:
            raise ConfigError(f"--jsonl={options.jsonl!r}: {error.strerror}") from None
    return 0


def human(line: dict[str, Any]) -> str:
    """A line for people."""
    moment = datetime.fromtimestamp(line["at_ms"] / 1000).astimezone()
    head = f"{moment:%H:%M:%S}.{line['at_ms'] % 1000:03d} {line['worker'] or '-'}"
    asked = line["context"]
    batch = f"batch {asked['batch_size']}"
    if line["kind"] == "report":
        words = f"{head}  ran      {batch}, gamma {line['gamma']}: {line['num_steps']} steps"
        if line["num_timed_steps"]:
            words += f", {line['step_us'] / line['num_timed_steps'] / 1000:.2f} ms each"
            words += f", {line['num_timed_emitted'] / line['num_timed_rows']:.2f} tokens a row"
        return words + (f"  [{line['decision_id']}]" if line["decision_id"] else "")
    why = f"{'explored; ' if line['explored'] else ''}best {line['exploit_gamma']}"
    extra = f" +{line['num_extra_drafts']} drafted" if line["num_extra_drafts"] else ""
    return (
        f"{head}  decided  {batch}, {asked['num_kv_tokens']} KV tokens: "
        f"gamma {line['gamma']}{extra} for {line['hold_steps']} steps "
        f"({why}; propensity {line['propensity']:.3g}) {line['version']}  [{line['decision_id']}]"
    )
