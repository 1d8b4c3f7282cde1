"""Options of `gpu_memory.py`, and what follows from them."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from gpu import shapes
from gpu.arm_list import has_gpu

# Sections that run on the same engine, in order.
GROUPS = (("remap",), ("death",), ("reload", "capped"), ("cycles",))
NAMES = [name for group in GROUPS for name in group]

TINY: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "flag": ["num-threads=1", "build=eager"],
    "capped_tau": 30,
    "capped_hold": 0.1,
    "block_bytes": 2048,
    "moved_bytes": 1 << 16,
    "copy_bytes": 1 << 16,
    "repeats": 1,
    "rows": 6,
    "context": 40,
    "steps": 12,
    "reload_cycles": 3,
    "drafting_cycles": 1,
    "full_cycles": 1,
    "num_blocks": 64,
    "max_num_seqs": 40,
    "max_model_len": 480,
    "prompt": 16,
    "answer": 112,
    "requests_per_row": 2,
    "capped_gammas": [0, 1],
    "cycles": 4,
    "cycle_blocks": 64,
    "distinct": 6,
    "longest": 32,
    "lengths": 4,
    "window": 6,
    "between": 8,
    "cycle_rows": 8,
}

_LEAST = {
    "repeats": 1,
    "rows": 1,
    "context": 1,
    "steps": 2,
    "reload_cycles": 1,
    "drafting_cycles": 0,
    "full_cycles": 0,
    "window": 1,
    "between": 0,
    "cycle_rows": 1,
    "distinct": 1,
}


def parsed(argv: list[str], description: str | None) -> argparse.Namespace:
    """Options, with the models' folders."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", required=True, help="folder of gpu_memory.json")
    add("--work", help="folder for model configurations; a temporary one if not given")
    add("--tiny", action="store_true", help="tiny models on the CPU, everything small")
    add("--sections", type=_names, default=NAMES, help=f"of {','.join(NAMES)}")
    add("--flag", action="append", default=[], metavar="NAME=VALUE", help="a worker's flag more")
    add("--agent-flag", action="append", default=[], help="an agent's flag more, dashes included")
    add("--device", default="cuda", help="the worker's --device")
    add("--dtype", default="bfloat16", help="the worker's --dtype")
    add("--shm-dir", default="/dev/shm", help="folder of the shared files")
    add("--block-size", type=int, default=16, help="tokens of a block")
    add("--block-bytes", type=int, default=917_504, help="of remap: a block of the 7B shape")
    add("--moved-bytes", type=int, default=1 << 30, help="of remap: the largest grant")
    add("--copy-bytes", type=int, default=2 << 30, help="size of the copy that gives bandwidth")
    add("--repeats", type=int, default=10, help="launches of a figure of remap")
    add("--death-bytes", type=int, default=8 << 30, help="of death: size of the arena")
    add("--rows", type=int, default=32, help="of reload: rows that decode")
    add("--context", type=int, default=512, help="of reload: tokens of a prompt")
    add("--steps", type=int, default=40, help="of reload: steps before the contraction")
    add("--reload-cycles", type=int, default=4, help="of reload: contractions that count")
    add("--drafting-cycles", type=int, default=2, help="of reload: those whose rows draft again")
    add("--full-cycles", type=int, default=2, help="of reload: those under a full head")
    add("--num-blocks", type=int, default=0, help="blocks of the capped head; 0: as the card gives")
    add("--card-bytes", type=float, default=24e9, help="of capped: memory of the card")
    add("--card-share", type=float, default=0.9, help="of capped: part of it that is used")
    add("--work-bytes", type=float, default=1.5e9, help="of capped: what forwards need of it")
    add("--max-num-seqs", type=int, default=256, help="most rows in a batch")
    add("--max-model-len", type=int, default=4096, help="tokens of the longest row")
    add("--batched-tokens", type=int, default=8192, help="most tokens in a step")
    add("--prompt", type=int, default=256, help="of capped: tokens of a prompt")
    add("--answer", type=int, default=512, help="of capped: tokens of an answer")
    add("--requests-per-row", type=int, default=2, help="of capped: requests for each row at once")
    add("--capped-gammas", type=_numbers, default=[0, 1], help="of the arm without elastic memory")
    add("--capped-tau", type=float, default=0.1, help="of capped: the agent's --tau-low")
    add("--capped-hold", type=float, default=1, help="of capped: the agent's --hold-s")
    add("--synthetic", type=float, default=0.7, help="acceptance of its drafts")
    add("--cycles", type=int, default=1000, help="expansions and contractions")
    add("--cycle-model", help="target of cycles; default: the shipped draft")
    add("--cycle-draft", help="draft of cycles; default: the shipped draft")
    add("--cycle-blocks", type=int, default=160, help="blocks of the head of cycles")
    add("--cycle-rows", type=int, default=12, help="requests at once, most")
    add("--distinct", type=int, default=120, help="of cycles: different requests")
    add("--longest", type=int, default=48, help="of cycles: tokens of an answer, most")
    add("--lengths", type=int, default=5, help="of cycles: kinds of prompt lengths, up to 260")
    add("--window", type=int, default=6, help="of cycles: turns after a reload for its acceptance")
    add("--between", type=int, default=10, help="of cycles: turns between transitions, most")
    if "--tiny" in argv:
        parser.set_defaults(**TINY)
    options = parser.parse_args(argv)
    if unknown := set(options.sections) - {*NAMES}:
        parser.error(f"unknown sections: {', '.join(sorted(unknown))}")
    if 0 not in options.capped_gammas:
        parser.error("--capped-gammas: 0 is what the other arms are compared with")
    for name, least in _LEAST.items():
        if getattr(options, name) < least:
            parser.error(f"--{name.replace('_', '-')}: at least {least}")
    if options.cycles < 4:
        parser.error("--cycles: at least 4, so that growth has a line")
    if options.device == "cuda" and not has_gpu():
        parser.error("no GPU is visible here; --tiny runs every section on a CPU")
    target, draft = shapes.TARGET, shapes.DRAFT
    if options.tiny:
        target, draft = shapes.TINY_TARGET, shapes.TINY_DRAFT
    root = Path(options.work or tempfile.mkdtemp(prefix="gpu-memory-"))
    options.shape, options.draft_shape, options.vocab = target, draft, target.vocab
    options.root, options.target, options.draft = root, target.write(root), draft.write(root)
    return options


def _names(text: str) -> list[str]:
    return text.split(",")


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]
