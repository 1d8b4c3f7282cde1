"""The arms by name: which engine, with which flags, and how it is started."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from arms import Arm

from gpu.served import environment

NIGHTJAR = ("exact", "exact+draft", "free", "free+draft")
PEERS = ("vllm", "vllm-own", "vllm-invariant")
PAIR = "pair"  # the default model with its draft, real weights
BLOCK_SIZE = 16
FOLDERS = (str(Path(__file__).parents[2]), str(Path(__file__).parents[1]))


class Engine(Protocol):
    """What takes jobs."""

    facts: dict[str, Any]

    def run(self, **job: Any) -> dict[str, Any]:
        """Do one job."""
        ...


class Child:
    """An arm in a process of its own, whose failed jobs are errors here."""

    def __init__(self, arm: Arm) -> None:
        self._arm = arm
        self.facts = arm.facts

    def run(self, **job: Any) -> dict[str, Any]:
        """Do one job.

        Raises:
            SystemExit: The job failed, with its reason, or the process is gone.
        """
        answer = self._arm.run(**job)
        if "error" in answer:
            raise SystemExit(answer["error"])
        return answer


def nightjar_flags(name: str, options: argparse.Namespace) -> list[str]:
    """The worker's flags of an arm."""
    flags = [f"--device={options.device}", f"--dtype={options.dtype}"]
    flags += [f"--max-num-seqs={options.max_num_seqs}", f"--max-gamma={max(options.gammas)}"]
    if name == PAIR:
        # The best prompts of a real pair are short; its pool takes what the worker gives it.
        return [*flags, *gamma_flag(options), *own_flags(options)]
    flags += [f"--model={options.target}", "--load-format=dummy"]
    flags += [f"--arithmetic={name.removesuffix('+draft')}"]
    flags += [f"--max-model-len={options.max_model_len}", f"--block-size={BLOCK_SIZE}"]
    flags += [f"--num-blocks={options.kv_tokens // BLOCK_SIZE}"]
    if not options.tiny:
        flags += [f"--max-num-batched-tokens={options.batched_tokens}"]
    if name.endswith("+draft"):
        flags += [f"--draft={options.draft}", *gamma_flag(options)]
    else:
        flags += ["--proposer=none"]
    return [*flags, *own_flags(options)]


def serving_arm(options: argparse.Namespace) -> str | None:
    """The arm that `serve` takes; without a draft the worker starts sooner, and decodes alike."""
    return next((name for name in ("exact+draft", "exact") if name in options.arms), None)


def gamma_flag(options: argparse.Namespace) -> list[str]:
    """The engine drafts as many as it may; each job caps its own requests."""
    return [f"--gamma={max(options.gammas)}"]


def own_flags(options: argparse.Namespace) -> list[str]:
    """What --flag adds."""
    return [f"--{flag}" for flag in options.flag]


@contextmanager
def opened(name: str, options: argparse.Namespace, say: Callable[[str], None]) -> Iterator[Engine]:
    """Start an arm, and end it with the block.

    Raises:
        SystemExit: It could not start.
    """
    if name in PEERS:
        settings = {
            "model": str(options.target),
            "max_model_len": options.max_model_len,
            "max_num_seqs": options.max_num_seqs,
            "max_num_batched_tokens": options.batched_tokens,
            "gpu_memory_utilization": 0.85,
            "num_gpu_blocks_override": options.kv_tokens // BLOCK_SIZE,
        }
        environ = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(options.vllm_site), FOLDERS[1]]),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if name == "vllm" else "1",
            "VLLM_BATCH_INVARIANT": "1" if name == "vllm-invariant" else "0",
        }
        command = [sys.executable, "-m", "gpu.vllm_arm", json.dumps(settings)]
        with Arm(name, command, environ) as arm:
            yield Child(arm)
    elif options.tiny:  # in this process: the test of this benchmark imports torch once
        from gpu.nightjar_arm import NightjarArm

        local = NightjarArm(nightjar_flags(name, options), say)
        try:
            yield local
        finally:
            local.close()
    else:
        command = [sys.executable, "-m", "gpu.nightjar_arm", *nightjar_flags(name, options)]
        environ = {**environment(*FOLDERS), "PYTHONUNBUFFERED": "1"}
        with Arm(name, command, environ) as arm:
            yield Child(arm)


def has_gpu() -> bool:
    """Whether a CUDA device seems to be there, without loading torch."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return False
    return any(Path("/dev").glob("nvidia[0-9]*")) or shutil.which("nvidia-smi") is not None
