"""Options of `gpu_decode.py`, and what follows from them."""

from __future__ import annotations

import argparse
import atexit
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from gpu import sections, shapes
from gpu.arm_list import NIGHTJAR, PAIR, PEERS, has_gpu

MAX_GAMMA = 8
CELLS = (1, 8, 32)
# What --tiny puts in the place of these options' defaults.
TINY: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "flag": ["num-threads=1"],
    "max_num_seqs": 4,
    "batches": [1, 2],
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


def parsed(argv: list[str] | None, description: str | None) -> argparse.Namespace:
    """Options, with what follows from them: shapes, folders, arms, what must be left out."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
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
    add("--cells", type=_numbers, help="batch sizes of those runs; default: 1, 8, 32 of --batches")
    add("--profiled", type=_numbers, default=[1, 32], help="batch sizes of idle")
    add("--profiled-gammas", type=_numbers, default=[0], help="their gammas")
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
    options.given = list(argv)
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
    if not all(1 <= size <= options.max_num_seqs for size in (*options.batches, *options.profiled)):
        parser.error(
            f"--batches and --profiled are from 1 to --max-num-seqs={options.max_num_seqs}"
        )
    if options.cells is None:
        options.cells = [size for size in CELLS if size in options.batches]
    if unmeasured := sorted({*options.cells} - {*options.batches}):
        parser.error(f"--cells={unmeasured[0]} is none of --batches")
    if options.cells and not any(options.gammas):
        options.cells = []  # nothing drafts
    if not all(0 <= gamma <= max(options.gammas) for gamma in options.profiled_gammas):
        parser.error(f"--profiled-gammas are from 0 to {max(options.gammas)}, as --gammas are")
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
    for section in options.sections:
        able = sections.BY_ARM[section][1]
        if section not in left and not {*able} & {*options.arms}:
            left[section] = f"runs on {' or '.join(able)} alone"
    options.sections = [section for section in options.sections if section not in left]
    options.left_out = left


def _names(text: str) -> list[str]:
    return text.split(",")


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _shares(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]
