"""Elastic memory on one GPU: what it costs the steps that run, and what it gains.

    python benchmarks/gpu_memory.py --out DIR
    python benchmarks/gpu_memory.py --out DIR --sections reload,capped
    python benchmarks/gpu_memory.py --out DIR --tiny       # everything, small, on a CPU

Sections:

    remap    speed of moving blocks in another process's arena, beside the device's copy: of the
             kernel alone, and of all that the agent does for a grant
    death    what becomes of a killed process's memory while another one maps it (on a GPU alone)
    reload   steps while the draft comes back, beside steps before; every row's longest wait for
             a token meanwhile; the catch-up of rows that draft again; rows under a full head
    capped   a small card's pool, 1.5 x the rows that fill it: tok/s and preemptions of six arms
    cycles   expansions and contractions by the hundred under random load, answers compared

About so long each takes on an H200, 45 s for the engine's start included: remap 8 s, death 25 s,
reload 65 s, capped 210 s, cycles 150 s for 1,000 of them.

The agent is a process of its own, over the worker's own client; the engine runs in this one, on
the configuration-only models of `gpu_decode.py`; `cycles` runs on the default draft, which is its
own draft too, so that every draft of a row that has caught up is accepted. Figures go to
DIR/gpu_memory.json. Sections that need different engines run in processes of their own. Every
bound that a figure must keep is printed as met or missed. The exit status is 1 if a section could
not run (`left_out` says why), missed a bound, or found what must not be (its `failed`). With
`--tiny` bounds of time count for nothing, since they say nothing of a GPU there; all others do.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gpu import shapes
from gpu.arm_list import FOLDERS
from gpu.machine import machine, say
from gpu.memory_options import GROUPS, parsed
from gpu.served import environment

INTERRUPTED = 130
DRAIN_S = 20.0


def main(argv: list[str] | None = None) -> int:
    """Measure and print; the exit status."""
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED


def _run(argv: list[str]) -> int:
    if FOLDERS[0] not in sys.path:  # Nightjar itself, installed or not
        sys.path.insert(0, FOLDERS[0])
    options = parsed(argv, __doc__)
    out = Path(options.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SystemExit(f"--out={options.out!r}: {error.strerror}") from None
    groups = [[s for s in group if s in options.sections] for group in GROUPS]
    groups = [group for group in groups if group]
    if len(groups) > 1 and not options.tiny:
        # An engine that has ended leaves nothing on the device.
        codes = [_child([*argv, f"--sections={','.join(group)}"]) for group in groups]
        return int(any(codes))
    failed = False
    for group in groups:
        failed |= _measured(group, options, out / "gpu_memory.json")
    return int(failed)


def _child(argv: list[str]) -> int:
    """Run some sections in a process of their own; its exit status."""
    command = [sys.executable, __file__, *argv]
    with subprocess.Popen(command, env=environment(*FOLDERS)) as child:
        try:
            code = child.wait()
        except KeyboardInterrupt:  # a terminal has told the child too
            with suppress(subprocess.TimeoutExpired):
                child.wait(1)
            child.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                child.wait(DRAIN_S)
            child.kill()
            raise
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    return code


def _measured(group: list[str], options: argparse.Namespace, file: Path) -> bool:
    """Measure sections that share an engine; whether one failed, after which it is a new one."""
    from gpu.driver import JobFailed

    from nightjar.errors import NightjarError

    results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    results["machine"] = machine()
    left: dict[str, str] = results.setdefault("left_out", {})
    failed = False
    todo = list(group)
    while todo:
        try:
            for name, found, text in _sections(list(todo), options):
                todo.remove(name)
                results[name] = found
                left.pop(name, None)
                failed |= bool(found.get("failed"))
                print(text, flush=True)
                file.write_text(json.dumps(results, indent=1) + "\n")
        except (SystemExit, Exception) as error:
            name = todo.pop(0)
            results.pop(name, None)
            left[name] = str(error) or repr(error)
            if not isinstance(error, SystemExit | OSError | NightjarError | JobFailed):
                left[name] = repr(error)
                traceback.print_exc()
            say(f"{name} failed: {left[name]}")
            file.write_text(json.dumps(results, indent=1) + "\n")
            failed |= not (options.tiny and name == "death")
    return failed


Found = tuple[str, dict[str, Any], str]


def _sections(group: list[str], options: argparse.Namespace) -> Iterator[Found]:
    """Each section's figures and their text, as they come."""
    if group == ["remap"] or group == ["death"]:
        from gpu import memory_remap

        if group == ["death"]:
            found = memory_remap.died(options)
            yield "death", found, f"\na killed process's arena: {found}"
            return
        found = memory_remap.measure(options)
        yield "remap", found, memory_remap.show(found)
        return
    from gpu import memory_capped, memory_cycles, memory_steps

    sections = {"reload": memory_steps, "capped": memory_capped, "cycles": memory_cycles}
    flags = _cycle_flags(options) if group == ["cycles"] else _flags(options)
    with _bench(flags) as bench:
        # Prompts of a sweep are equal on purpose; a hit would hide what they take.
        bench.blocks.prefix_cache = group == ["cycles"]
        for name in group:
            module = sections[name]
            found = module.measure(bench, options)
            yield name, {**found, "start_s": bench.start_s}, module.show(found)


@contextmanager
def _bench(flags: list[str]) -> Iterator[Any]:
    from gpu.memory_link import Bench

    bench = Bench(flags, say)
    try:
        yield bench
    finally:
        bench.close()


def _flags(options: argparse.Namespace) -> list[str]:
    """The worker's flags of the capped pool."""
    from gpu.memory_capped import num_base_blocks

    num_blocks = options.num_blocks or num_base_blocks(options)
    gamma = max(options.capped_gammas)
    flags = [f"--model={options.target}", f"--draft={options.draft}", "--load-format=dummy"]
    flags += [f"--device={options.device}", f"--dtype={options.dtype}", "--arithmetic=exact"]
    flags += [f"--max-num-seqs={options.max_num_seqs}", f"--max-model-len={options.max_model_len}"]
    flags += [f"--num-blocks={num_blocks}", f"--block-size={options.block_size}"]
    flags += [f"--max-gamma={max(1, gamma)}", "--gamma=0", f"--shm-dir={options.shm_dir}"]
    if not options.tiny:
        flags += [f"--max-num-batched-tokens={options.batched_tokens}"]
    return [*flags, *(f"--{flag}" for flag in options.flag)]


def _cycle_flags(options: argparse.Namespace) -> list[str]:
    """The worker's flags of the small pair."""
    from worker.model.fetch import default_draft

    own = default_draft("smollm2-135m")
    assert own is not None
    model = options.cycle_model or _with_tokenizer(own, options.root)
    draft = options.cycle_draft or own
    flags = [f"--model={model}", f"--draft={draft}", "--arithmetic=exact"]
    flags += [f"--device={options.device}", f"--dtype={options.dtype}", "--max-gamma=5"]
    flags += ["--max-num-seqs=16", "--max-model-len=512", "--max-num-batched-tokens=192"]
    flags += [f"--num-blocks={options.cycle_blocks}", "--max-catchup-tokens=64", "--gamma=0"]
    flags += [f"--shm-dir={options.shm_dir}"]
    return [*flags, *(f"--{flag}" for flag in options.flag)]


def _with_tokenizer(folder: Path, root: Path) -> Path:
    """The folder's model with a tokenizer of as many tokens: a draft is shipped without one."""
    made = root / "own"
    made.mkdir(exist_ok=True)
    for file in folder.iterdir():
        link = made / file.name
        if not link.exists():
            link.symlink_to(file)
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    (made / "tokenizer.json").write_text(json.dumps(shapes.tokenizer(vocab)))
    return made


if __name__ == "__main__":
    sys.exit(main())
