"""`nightjar bench calibrate`: measure this machine's steps, and teach them to its planner."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from nightjar import log
from nightjar.config import at_least, option, parse
from nightjar.errors import ConfigError
from worker.calibration.grid import Grid, Measured, default_batch_sizes
from worker.config import WorkerConfig, resolved
from worker.messages import Ready

DESCRIPTION = """\
Measure what steps cost here, at each batch size and gamma, and what the draft's catch-up costs
after steps at gamma 0; print it, and teach it to the planner, so that a cold machine starts with
figures of its own. Give the flags of the worker that is to profit: the planner knows a profile by
models, proposer, dtype, device, build and arithmetic. Nothing else should run meanwhile.

Switches without a value:
  --dry-run   print what was measured and teach nobody
  --json      print JSON instead of tables

The planner is --planner, else $NIGHTJAR_PLANNER, else the one that `nightjar up` started. Flags of
a worker that have to do with serving (--listen, --memory-agent, ...) are accepted and change
nothing.
"""
# Text that a row's prompt is cut from: any will do that a model can go on with.
TEXT = """\
The lighthouse stands at the end of the pier, and every evening its keeper climbs the stairs to
clean the lamp. In winter the storms come from the west; the waves reach the first windows and the
wind carries salt into the village. She writes down the time of each ship that passes, its name,
its colour and the weather, because the harbour master asks for the book at the end of the month.
To bake a simple loaf you need flour, water, salt and yeast. Mix the flour with the salt, add the
yeast to warm water, and stir until no dry flour is left. Let the dough rest for an hour, fold it
twice, and bake it in a hot oven until the crust sounds hollow when you knock on it.
A list is sorted when no element is smaller than the one before it. To sort a short list, look for
the smallest element, put it first, and go on with the rest; the work grows with the square of the
length. For a long one, cut it in two, sort both halves, and merge them by comparing their heads.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrateConfig(WorkerConfig):
    """A worker's flags, and what to measure."""

    budget_s: float = at_least(1, 120, "seconds for measuring, start aside; the rest is left out")
    batch_sizes: tuple[int, ...] = option(
        (),
        "batch sizes, such as 1,4,16; empty takes powers of two up to --max-num-seqs, to 64",
        check=lambda sizes: all(size >= 1 for size in sizes),
        limit="at least 1 each",
    )
    context_lengths: tuple[int, ...] = option(
        (64, 512),
        "tokens of each row when measuring begins",
        check=lambda lengths: lengths and all(length >= 1 for length in lengths),
        limit="at least 1 each",
    )
    stale_tokens: tuple[int, ...] = option(
        (4, 16, 64),
        "tokens of each row that the draft catches up",
        check=lambda counts: all(count >= 2 for count in counts),
        limit="at least 2 each: one token costs no catch-up",
    )
    repeats: int = at_least(1, 8, "steps of each batch size and gamma")
    temperature: float = at_least(0, 1.0, "of sampling; how many drafts are accepted depends on it")


def main(argv: Sequence[str]) -> int:
    """Calibrate; returns the exit status.

    Raises:
        ConfigError: A flag is wrong, or nothing says where a planner is.
        NightjarError: The model cannot be served, or the planner does not take the reports.
    """
    parser = argparse.ArgumentParser(
        prog="nightjar bench calibrate", add_help=False, allow_abbrev=False
    )
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--json", action="store_true")
    switches, flags = parser.parse_known_args(argv)
    config = resolved(
        parse(CalibrateConfig, flags, prog="nightjar bench calibrate", description=DESCRIPTION)
    )
    if too_large := [size for size in config.batch_sizes if size > config.max_num_seqs]:
        raise ConfigError(
            f"--batch-sizes={too_large[0]}: more rows than run at once, which are "
            f"--max-num-seqs={config.max_num_seqs}"
        )
    log.configure("calibrate")
    address = "" if switches.dry_run else config.planner or find_planner()
    ready, measured, num_taught = calibrate(config, address)
    answer = {
        "profile": _facts(ready),
        "cells": [cell.figures() for cell in measured.cells.values()],
        "catch_ups": [row._asdict() for row in measured.catch_ups],
        "left_out": measured.left_out,
        "planner": address,
        "num_reports_taught": num_taught,
    }
    print(json.dumps(answer, indent=2) if switches.json else "\n".join(_lines(answer)))
    return 0


def find_planner() -> str:
    """Address of the planner that `nightjar up` started.

    Raises:
        ConfigError: No system is noted.
    """
    folder = Path(os.environ.get("NIGHTJAR_RUN_DIR") or Path.home() / ".cache/nightjar/run")
    path = folder / "addresses.json"
    try:
        return str(json.loads(path.read_text())["planner"])
    except FileNotFoundError:
        raise ConfigError(
            "--planner: give the planner's address, start a system with `nightjar up`, or say "
            "--dry-run"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: does not say where the planner is ({error!r})") from None


def calibrate(config: CalibrateConfig, address: str) -> tuple[Ready, Measured, int]:
    """Load, measure, and teach the planner at `address`, if one is given.

    Returns:
        The engine's facts, what was measured, and how many reports the planner took.
    """
    began = time.monotonic()

    def say(words: str) -> None:
        print(f"[{time.monotonic() - began:6.1f} s] {words}", file=sys.stderr, flush=True)

    from worker.calibration.teach_client import CalibrationClient, greet

    if address:
        greet(address)  # a planner that is not there is told of now, not at the end

    # Only now: what is refused above is refused at once, before torch has been imported.
    from worker.calibration.measure import Calibration, Direct
    from worker.engine.main import start

    channel = Direct(say)
    # The engine reports to its channel as to a planner, which the calibration plays.
    engine_config = dataclasses.replace(config, planner="calibration", memory_agent="")
    models, engine, ready = start(engine_config, cast(Any, channel))
    try:
        calibration = Calibration(
            engine,
            channel,
            _prompts(config),
            say,
            max_catchup_tokens=config.max_catchup_tokens if models.draft is not None else 0,
            budget_s=config.budget_s,
        )
        measured = calibration.run(_grid(config))
    finally:
        models.close()
    num_taught = CalibrationClient(address, ready).teach(measured.reports) if address else 0
    return ready, measured, num_taught


def _grid(config: CalibrateConfig) -> Grid:
    return Grid(
        context_lengths=config.context_lengths,
        batch_sizes=config.batch_sizes or default_batch_sizes(min(config.max_num_seqs, 64)),
        stale_tokens=config.stale_tokens,
        repeats=config.repeats,
        temperature=config.temperature,
    )


def _prompts(config: CalibrateConfig) -> Callable[[int, int], list[int]]:
    from worker.model.fetch import cache_folder, resolve_model
    from worker.text.tokenizer import Tokenizer

    folder = resolve_model(
        config.model,
        cache_folder(config.cache_dir),
        lambda *_: None,
        needs_weights=config.load_format != "dummy",
    )
    token_ids = Tokenizer.load(folder).encode(TEXT)

    def prompt(number: int, length: int) -> list[int]:
        first = 37 * number % len(token_ids)
        repeated = token_ids * (2 + length // len(token_ids))
        return repeated[first : first + length]

    return prompt


def _facts(ready: Ready) -> dict[str, str]:
    names = ("target_identity", "draft_identity", "proposer", "dtype", "device", "build")
    return {name: getattr(ready, name) for name in (*names, "arithmetic")}


def _lines(answer: dict[str, Any]) -> list[str]:
    lines = ["profile  " + " ".join(f"{k}={v}" for k, v in answer["profile"].items() if v), ""]
    lines.append(
        f"{'context':>8} {'batch':>6} {'gamma':>6} {'steps':>6} {'ms/step':>9} "
        f"{'tokens/step':>12} {'ms/token':>9}"
    )
    lines += [
        f"{c['context_length']:>8} {c['batch_size']:>6} {c['gamma']:>6} {c['num_steps']:>6} "
        f"{c['ms_per_step']:>9.2f} {c['tokens_per_step']:>12.2f} {c['ms_per_token']:>9.2f}"
        for c in answer["cells"]
    ]
    if answer["catch_ups"]:
        lines += ["", f"{'batch':>6} {'stale tokens a row':>20} {'steps':>6} {'ms in all':>10}"]
    lines += [
        f"{c['batch_size']:>6} {c['stale_tokens']:>20} {c['num_steps']:>6} {c['ms']:>10.2f}"
        for c in answer["catch_ups"]
    ]
    lines += ["", *(f"left out: {words}" for words in answer["left_out"])]
    if answer["planner"]:
        lines.append(
            f"taught the planner at {answer['planner']}: {answer['num_reports_taught']} reports"
        )
    else:
        lines.append("dry run: nobody was taught")
    return lines
