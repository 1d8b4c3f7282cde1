"""GPU decoding: Nightjar's engine beside vLLM, on one GPU, in one call.

    python benchmarks/gpu_decode.py --out DIR --vllm-site SITE --trace TRACE.csv
    python benchmarks/gpu_decode.py --out DIR --sections plain,spec --arms exact+draft
    python benchmarks/gpu_decode.py --out DIR --tiny      # every section on a CPU, without vLLM

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
import json
import sys
import time
from pathlib import Path
from typing import Any

from gpu import sections, served, tables
from gpu.arm_list import FOLDERS, nightjar_flags, opened, serving_arm
from gpu.decode_options import parsed
from gpu.machine import machine, say


def main(argv: list[str] | None = None) -> int:
    """Measure and print; returns 1 if something could not run, or exact answers differ."""
    options = parsed(argv, __doc__)
    try:
        return measured(options, options.results)
    except KeyboardInterrupt:
        say("stopped; what was measured is kept")
        return 130


def measured(options: argparse.Namespace, results: dict[str, Any]) -> int:
    """Measure arm by arm, adding to `results`."""
    file = Path(options.out) / "gpu_decode.json"
    results["machine"] = machine()
    call = {"at": time.strftime("%Y-%m-%d %H:%M:%S"), "options": options.given}
    results.setdefault("calls", []).append(call)
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
                        if section == "bits" and (wrong := differing(results, name)):
                            raise SystemExit(wrong)
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
    return 1 if failures or options.missing or not options.sections else 0


def differing(results: dict[str, Any], name: str) -> str:
    """Say where exact answers differ, if they do."""
    if not name.startswith("exact"):
        return ""
    found = {variant: n for variant, n in results["bits"][name]["differ"].items() if n}
    return f"exact answers differ: {found}" if found else ""


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


if __name__ == "__main__":
    sys.exit(main())
