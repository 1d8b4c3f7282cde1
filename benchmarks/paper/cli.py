r"""The paper's comparison, on real text at real cost.

    python benchmarks/paper.py run --out DIR --model /tmp/target --draft /tmp/draft \
        --spec-bench question.jsonl --sections closed --cells 1 8 32
    python benchmarks/paper.py run --out DIR … --sections open --after DIR/run-001.json
    python benchmarks/paper.py run --out DIR … --sections elastic --after DIR/run-001.json
    python benchmarks/paper.py report DIR/run-*.json
    python benchmarks/paper.py run --tiny --out DIR      # the same in seconds, on a CPU

`run` loads one engine and swaps arms in it, each with a planner core of its own that learns from
its own slices alone. Requests are the same for every arm of a pass; passes go forward and
backward (ABBA). Cells, temperature and seeds are fixed in paper/design.py; flags choose parts.

    closed   arms at 1, 8, 32, 64 and 128 rows: from when all rows decode, for a slice's length
    open     whole traces, drained in between: 0.8 and 1.2 x the capacity of `off` at the most rows
             (Poisson), burst and oscillation. Needs the capacity and the best gamma, from `closed`
             in this run or in --after.
    elastic  the Poisson trace at 1.2 with the draft's memory elastic and not; a capped pool, so it
             runs by itself.

A run ends by itself before --budget-s and keeps what it has; what its arms have learned goes into
learned-NNN.json beside run-NNN.json, which moves with it. --after names all runs to go on from: as
with a planner's store, an arm begins with what they taught it. `report` pools runs over their
common arm `off`.

Minutes on one GPU, without the engine's start (about 1.5; the two models about 0.5 more):

{plan}
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gpu_decode
from gpu import shapes

from nightjar.errors import ConfigError, NightjarError
from paper import learned, report
from paper.design import (
    ALIASES,
    CLOSED_ARMS,
    DESIGN,
    ELASTIC_ARMS,
    LEARNING,
    MAX_GAMMA,
    OFF,
    OPEN_ARMS,
    REHEARSAL,
    TINY,
    TRACES,
    Design,
)

SECTIONS = ("closed", "open", "elastic")
_SETTLE_S, _DRAIN_S = 1.0, 4.0  # about, of a slice


def main(argv: Sequence[str] | None = None) -> int:
    """Run or report; returns the exit status: 1 if something that was asked for is left out."""
    try:
        options = _parsed(sys.argv[1:] if argv is None else list(argv))
        return _report(options) if options.verb == "report" else _run(options)
    except ConfigError as error:
        print(f"paper: {error}", file=sys.stderr)
        return 2
    except NightjarError as error:
        print(f"paper: {error}", file=sys.stderr)
        return 1


def minutes(design: Design) -> dict[str, float]:
    """About how long each section takes with all of its arms."""
    warm, trace = len(LEARNING) * design.warm_passes, design.trace_s + _DRAIN_S
    closed = len(CLOSED_ARMS) * design.closed_passes + warm
    traces = len(OPEN_ARMS) * design.open_passes + warm / 2
    elastic = len(ELASTIC_ARMS) * (design.open_passes + design.warm_passes / 2)
    return {
        "closed": closed * len(design.cells) * (design.slice_s + _SETTLE_S) / 60,
        "open": traces * len(TRACES) * trace / 60,
        "elastic": elastic * (trace + _DRAIN_S) / 60,
    }


def _plan() -> str:
    cell = minutes(DESIGN)["closed"] / len(DESIGN.cells)
    trace = minutes(DESIGN)["open"] / len(TRACES)
    lines = [f"    {name:<8} {found:5.1f}" for name, found in minutes(DESIGN).items()]
    lines.append(
        f"    {len(CLOSED_ARMS)} arms take {cell:.1f} a cell of `closed`, {len(OPEN_ARMS)} arms "
        f"{trace:.1f} a trace of `open`; three arms a run take {cell * 3 / 8:.1f} and "
        f"{trace * 3 / 4:.1f}"
    )
    return "\n".join(lines)


def _run(options: argparse.Namespace) -> int:
    from paper.run import measure

    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    file = _next_file(out)
    design: Design = options.design
    results: dict[str, Any] = {
        "begun": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "machine": gpu_decode.machine(),
        "design": dataclasses.asdict(design),
        "models": {"target": Path(options.model).name, "draft": Path(options.draft).name},
        "max_gamma": MAX_GAMMA,
        "engine_key": [*design.flags, *options.flag],
        "slices": [],
        "record": {"steps": [], "places": {}},
        "left_out": [],
    }
    measure(options, results, file)
    for words in results["left_out"]:
        print(f"left out: {words}", file=sys.stderr)
    print(file)
    return 1 if results["left_out"] else 0


def _report(options: argparse.Namespace) -> int:
    runs = report.load(options.files)
    text = report.report(runs, replay=not options.no_replay)
    if options.out:
        Path(options.out).write_text(text + "\n")
    else:
        print(text)
    return 0


def _next_file(out: Path) -> Path:
    numbers = [int(path.stem[4:]) for path in out.glob("run-*.json") if path.stem[4:].isdigit()]
    return out / f"run-{max(numbers, default=0) + 1:03}.json"


def _parsed(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=str(__doc__).format(plan=_plan()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    run = verbs.add_parser("run", allow_abbrev=False, help="measure")
    add = run.add_argument
    add("--out", required=True, help="folder of run-NNN.json, one a run")
    add("--tiny", action="store_true", help="a tiny model on the CPU, everything small")
    add("--rehearse", action="store_true", help="the given pair on the CPU, everything small")
    add("--model", default="", help="target, as of `nightjar worker`")
    add("--draft", default="", help="its draft")
    add("--spec-bench", default="", help="Spec-Bench's question.jsonl")
    add("--sections", nargs="+", default=["closed", "open"], choices=SECTIONS)
    add("--cells", nargs="+", type=int, help="rows of closed loops, of the design's")
    add("--traces", nargs="+", default=list(TRACES), choices=list(TRACES), help="of open loops")
    names = f"policies, with {', '.join(ALIASES)} for fixed gammas and the published policy"
    add("--closed-arms", nargs="+", default=list(CLOSED_ARMS), help=names)
    add("--open-arms", nargs="+", default=list(OPEN_ARMS), help=names)
    add("--elastic-arms", nargs="+", default=list(ELASTIC_ARMS), help="`+elastic` behind one lets "
        "it lend the draft's memory")  # fmt: skip
    add("--closed-passes", type=int, help="pairs of slices; the design's by default")
    add("--open-passes", type=int, help="the same of traces")
    add("--skip-passes", type=int, default=0, help="passes that an earlier run has measured: "
        "each has requests of its own")  # fmt: skip
    add("--after", nargs="+", default=[], help="all earlier runs: capacity, best gamma and what "
        "arms know are theirs")  # fmt: skip
    add("--cold", action="store_true", help="arms begin without what those of --after learned")
    add("--capacity", type=float, default=0.0, help="requests/s, where no run has measured it")
    add("--budget-s", type=float, default=420.0, help="seconds, once the engine is loaded")
    add("--flag", action="append", default=[], metavar="NAME=VALUE", help="a worker's flag more")
    shown = verbs.add_parser("report", allow_abbrev=False, help="make the tables")
    shown.add_argument("files", nargs="+", help="results of runs")
    shown.add_argument("--out", default="", help="file for the tables")
    shown.add_argument("--no-replay", action="store_true", help="measured figures alone; a replay "
        "takes minutes")  # fmt: skip
    options = parser.parse_args(argv)
    return options if options.verb == "report" else _completed(run, options)


def _completed(parser: argparse.ArgumentParser, options: argparse.Namespace) -> argparse.Namespace:
    """The options of a run, with what follows from them."""
    if options.tiny and options.rehearse:
        parser.error("--rehearse takes a real pair: not with --tiny")
    design = options.design = TINY if options.tiny else REHEARSAL if options.rehearse else DESIGN
    fixed = {flag.partition("=")[0] for flag in design.flags}
    for flag in options.flag:
        if flag.partition("=")[0] in fixed and not design.rehearsal:
            parser.error(f"--flag {flag}: the design fixes it; --rehearse lets it be changed")
    if options.tiny:
        root = Path(tempfile.mkdtemp(prefix="paper-"))
        options.model = str(shapes.TINY_TARGET.write(root))
        options.draft, options.flag = options.model, ["load-format=dummy", *options.flag]
    elif not options.model or not options.draft or not options.spec_bench:
        parser.error("--model, --draft and --spec-bench are needed, or --tiny")
    if "elastic" in options.sections and len(options.sections) > 1:
        parser.error("--sections elastic caps the pool: run it by itself")
    options.cells = options.cells or list(design.cells)
    if unknown := set(options.cells) - set(design.cells):
        parser.error(f"--cells: {min(unknown)} is none of the design's: {design.cells}")
    for name in ("closed_arms", "open_arms"):
        arms = tuple(ALIASES.get(arm, arm) for arm in getattr(options, name))
        if OFF not in arms:
            parser.error(f"--{name.replace('_', '-')}: needs `{OFF}`, the arm that runs share")
        setattr(options, name, arms)
    options.elastic_arms = tuple(options.elastic_arms)
    options.closed_passes = options.closed_passes or design.closed_passes
    options.open_passes = options.open_passes or design.open_passes
    options.say = lambda text: print(text, file=sys.stderr, flush=True)
    options.earlier, options.known = [], []
    for path in dict.fromkeys(map(Path, options.after)):
        earlier = json.loads(path.read_text())
        options.earlier += earlier["slices"]
        options.known += [] if options.cold else [learned.read(path, earlier)]
        options.capacity = options.capacity or earlier.get("capacity_requests_per_s", 0.0)
    return options
