"""GPU decoding: Nightjar's engine beside vLLM, on one GPU, in one call.

    python benchmarks/gpu_decode.py --out DIR --vllm-site SITE --trace TRACE.csv
    python benchmarks/gpu_decode.py --out DIR --sections plain,spec --arms exact+draft
    python benchmarks/gpu_decode.py --out DIR --tiny      # every section but vLLM's, on a CPU

Both engines get the same configuration-only model (7.6B parameters as Qwen2-7B, drafted for by
0.5B), random weights and the same random prompts. Arms, each an engine in a process of its own:

    exact, free              Nightjar without a draft, in either arithmetic
    exact+draft, free+draft  the same with the draft loaded
    vllm, vllm-own           vLLM with its engine core in the process, and in one of its own
    vllm-invariant           the same with VLLM_BATCH_INVARIANT=1

Sections:

    plain     decode tok/s at each batch size: B x N / (time for N + 1 tokens - time for 1)
    bits      answers that differ from one batch's at gamma 0, by chunking, batch size and gamma
    spec      step times by batch size and gamma; the best gamma at each acceptance, computed, and
              at some batch sizes run with the acceptance made up
    idle      time of a step that no work on the GPU covers, kernels, share of the roofline
    openloop  highest rate of a trace's arrivals whose TTFT p99 stays within the limit
    serve     `nightjar worker` under streaming clients, beside the same load in process
    pair      acceptance of the default model's draft on real prompts (needs --spec-bench)

Figures go to DIR/gpu_decode.json as they come. Those already there stay and are compared with, so
arms and sections can be measured in several calls. An arm or section that cannot run is named
with its reason, and the others go on.
"""

from __future__ import annotations

import argparse
import atexit
import json
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from gpu import sections, served, shapes, tables
from gpu.arm_list import (
    FOLDERS,
    NIGHTJAR,
    PAIR,
    PEERS,
    has_gpu,
    nightjar_flags,
    opened,
    serving_arm,
)

MAX_GAMMA = 8
# What --tiny puts in the place of these options' defaults.
TINY: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "flag": ["num-threads=1"],
    "max_num_seqs": 4,
    "batches": [1, 2],
    "cells": [2],
    "profiled": [2],
    "gammas": [0, 2],
    "context": 20,
    "tokens": 6,
    "repeats": 1,
    "steps": 4,
    "num_answers": 4,
    "max_model_len": 128,
    "kv_tokens": 2048,
    "copy_bytes": 1 << 20,
    "open_start": 40.0,
    "open_runs": 2,
    "open_seconds": 0.2,
    "clients": 4,
    "rounds": 1,
    "client_processes": 1,
}


def main(argv: list[str] | None = None) -> int:
    """Measure and print; returns 1 if something that was asked for could not run."""
    options = parsed(argv)
    try:
        return measured(options, options.results)
    except KeyboardInterrupt:
        say("stopped; what was measured is kept")
        return 130


def measured(options: argparse.Namespace, results: dict[str, Any]) -> int:
    """Measure arm by arm, adding to `results`."""
    file = Path(options.out) / "gpu_decode.json"
    results["machine"] = machine()
    failures: dict[str, str] = {}

    def save() -> None:
        file.write_text(json.dumps(results, indent=1) + "\n")

    for name in options.arms:
        wanted = [s for s in sections.BY_ARM if s in options.sections]
        wanted = [s for s in wanted if name in sections.BY_ARM[s][1]]
        if not wanted:
            continue
        try:
            with opened(name, options, say) as arm:
                results.setdefault("arms", {})[name] = arm.facts
                say(f"{name}: {arm.facts}")
                for section in wanted:
                    try:
                        sections.BY_ARM[section][0](arm, name, options, results, say)
                    except (SystemExit, OSError) as error:
                        failures[f"{section} of {name}"] = str(error)
                        say(f"{section} of {name} failed: {error}")
                    save()
        except (SystemExit, OSError) as error:
            failures[name] = str(error)
            say(f"{name} is left out: {error}")
    if "serve" in options.sections and (served_arm := serving_arm(options)):
        try:
            results.setdefault("serve", {}).update(serve(served_arm, options))
        except (SystemExit, OSError) as error:
            failures["serve"] = str(error)
    results["left_out"] = {**options.left_out, **failures}
    save()
    show(results, options)
    return 1 if failures or options.missing else 0


def serve(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Rates of streaming clients of an arm's worker."""
    flags = [f for f in nightjar_flags(name, options) if not f.startswith("--gamma=")]
    return served.measure(
        flags,
        served.environment(*FOLDERS),
        repeats=options.repeats,
        planner=not options.tiny,
        num_clients=options.clients,
        num_processes=options.client_processes,
        rounds=options.rounds,
        length=options.context,
        vocab=options.vocab,
        max_tokens=options.tokens,
    )


def show(results: dict[str, Any], options: argparse.Namespace) -> None:
    """Print the tables of every section that has figures."""
    if "plain" in results:
        print(tables.plain(results))
    if "spec" in results:
        print(tables.spec(results, options.alphas))
    if "idle" in results:
        print(tables.idle(results))
    if "openloop" in results:
        print(tables.openloop(results))
    for arm, found in results.get("bits", {}).items():
        print(f"\nbits, {arm}: of {found['num_answers']} answers differ {found['differ']}")
    if "serve" in results:
        print(tables.serve(results))
    for name, found in results.get("pair", {}).items():
        numbers = ", ".join(f"{value:.3f}" for value in found["tokens_per_step"])
        print(f"\nshipped pair, {name}: tokens of a step at gamma 0, 1, …: {numbers}")
    for name, reason in results["left_out"].items():
        print(f"\nleft out: {name}: {reason}")


def parsed(argv: list[str] | None) -> argparse.Namespace:
    """Options, with what follows from them: shapes, folders, arms, what must be left out."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*sections.BY_ARM]
    add = parser.add_argument
    add("--out", required=True, help="folder of gpu_decode.json")
    add("--work", help="folder for model configurations; a temporary one if not given")
    add("--tiny", action="store_true", help="a tiny model on the CPU, everything small")
    add("--sections", type=_names, default=names, help=f"of {','.join(names)}")
    add(
        "--arms",
        type=_names,
        help=f"of {','.join((*PEERS, *NIGHTJAR, PAIR))}; default: all that can run",
    )
    add("--vllm-site", help="folder of vLLM's packages; without it vLLM is left out")
    add("--trace", type=Path, help="an Azure LLM inference trace, for openloop")
    add("--spec-bench", type=Path, help="Spec-Bench's question.jsonl, for pair")
    add("--flag", action="append", default=[], metavar="NAME=VALUE", help="a worker's flag more")
    add("--device", default="cuda", help="Nightjar's --device")
    add("--dtype", default="bfloat16", help="Nightjar's --dtype")
    add("--max-num-seqs", type=int, default=256, help="most requests in a batch, of both engines")
    add("--batches", type=_numbers, default=[1, 8, 32, 64, 128, 256], help="batch sizes")
    add("--context", type=int, default=512, help="tokens of a prompt")
    add("--tokens", type=int, default=128, help="tokens of an answer")
    add("--repeats", type=int, default=2, help="runs of a figure; the better one counts")
    add("--gammas", type=_numbers, default=[0, 1, 2, 3, 4, 5], help="gammas of spec and bits")
    add("--steps", type=int, default=30, help="steps of a cell of spec and idle")
    add("--alphas", type=_shares, default=[0.6, 0.7, 0.8], help="acceptances to compute with")
    add("--synthetic", type=float, default=0.7, help="acceptance of the runs that check spec")
    add("--cells", type=_numbers, default=[1, 8, 32], help="batch sizes of those runs")
    add("--profiled", type=_numbers, default=[1, 32], help="batch sizes of idle")
    add("--copy-bytes", type=int, default=2 << 30, help="size of the copy that gives bandwidth")
    add("--num-answers", type=int, default=8, help="answers that bits compares")
    add("--max-model-len", type=int, default=4096, help="of both engines; cuts the trace's rows")
    add("--kv-tokens", type=int, default=256 * 2048, help="tokens of KV that either engine gets")
    add("--batched-tokens", type=int, default=8192, help="most tokens in a step, of both engines")
    add("--open-start", type=float, default=12.0, help="requests/s of the first run")
    add("--open-runs", type=int, default=7, help="runs of the search; each halves the interval")
    add("--open-seconds", type=float, default=20.0, help="seconds of arrivals of a run")
    add("--ttft-limit", type=float, default=1.0, help="seconds that TTFT p99 may take")
    add("--clients", type=int, default=128, help="streaming clients of serve")
    add("--rounds", type=int, default=3, help="requests of each client")
    add("--client-processes", type=int, default=8, help="processes that they are spread over")
    add("--per-category", type=int, default=8, help="prompts of each category of Spec-Bench")
    if argv is None:
        argv = sys.argv[1:]
    if "--tiny" in argv:
        parser.set_defaults(**TINY)
    options = parser.parse_args(argv)
    if unknown := set(options.sections) - {*names}:
        parser.error(f"unknown sections: {', '.join(sorted(unknown))}")
    if unknown := set(options.arms or ()) - {*PEERS, *NIGHTJAR, PAIR}:
        parser.error(f"unknown arms: {', '.join(sorted(unknown))}")
    if options.device == "cuda" and not has_gpu():
        parser.error("no GPU is visible here; --tiny runs every section on a CPU")
    for name in ("repeats", "tokens", "steps", "clients", "rounds", "client_processes"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if not all(0 <= gamma <= MAX_GAMMA for gamma in options.gammas):
        parser.error(f"--gammas are from 0 to {MAX_GAMMA}")
    if not all(1 <= size <= options.max_num_seqs for size in (*options.batches, *options.cells)):
        parser.error(f"--batches and --cells are from 1 to --max-num-seqs={options.max_num_seqs}")
    asked = options.arms or ()
    _leave_out(options)
    options.missing = {*asked} - {*options.arms}
    options.results = _results(parser, Path(options.out))
    target, draft = shapes.TARGET, shapes.DRAFT
    if options.tiny:
        target, draft = shapes.TINY_TARGET, shapes.TINY_DRAFT
    if not options.work:
        options.work = tempfile.mkdtemp(prefix="gpu-decode-")
        atexit.register(shutil.rmtree, options.work, ignore_errors=True)
    root = Path(options.work)
    options.shape, options.vocab = target, target.vocab
    options.target, options.draft = target.write(root), draft.write(root)
    return options


def _results(parser: argparse.ArgumentParser, out: Path) -> dict[str, Any]:
    """What the folder holds already, empty if nothing; the folder is made."""
    file = out / "gpu_decode.json"
    try:
        out.mkdir(parents=True, exist_ok=True)
        found = json.loads(file.read_text()) if file.exists() else {}
    except OSError as error:
        parser.error(f"--out={out}: {error.strerror}")
    except ValueError:
        found = None
    if not isinstance(found, dict):
        parser.error(f"{file} holds no results; move it away")
    return found


def _leave_out(options: argparse.Namespace) -> None:
    """Drop what lacks a file, with the reason."""
    left: dict[str, str] = {}
    arms = options.arms or [*PEERS, *(["exact+draft", "free"] if options.tiny else NIGHTJAR), PAIR]
    if not options.vllm_site:
        left.update(dict.fromkeys([arm for arm in arms if arm in PEERS], "needs --vllm-site"))
    for section, file in (("openloop", "trace"), ("pair", "spec_bench")):
        if section in options.sections and not getattr(options, file):
            left[section] = f"needs --{file.replace('_', '-')}"
    options.arms = [arm for arm in arms if arm not in left]
    options.sections = [section for section in options.sections if section not in left]
    options.left_out = left


def _names(text: str) -> list[str]:
    return text.split(",")


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _shares(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for name, command in (
        ("gpu", ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv"]),
        ("commit", ["git", "rev-parse", "--short", "HEAD"]),
    ):
        try:
            ran = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError:
            continue
        if ran.returncode == 0:
            found[name] = ran.stdout.strip().splitlines()[-1]
    return found


def say(text: str) -> None:
    """Progress."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
