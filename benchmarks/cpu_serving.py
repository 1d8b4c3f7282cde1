"""CPU serving: Nightjar beside `transformers` generate and vLLM's CPU build, in one run.

    python benchmarks/cpu_serving.py --vllm-python VENV/bin/python --spec-bench FILE --out FILE

Arms are loaded once and take turns; every figure is the median over rounds with its spread, and
ratios are taken within a round. Run `nightjar compile` first (for both arithmetics). Without
--vllm-python or --spec-bench what needs them is left out, and the output says so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import served
from arms import FOLDER, Arm

from worker.model.fetch import cache_folder, resolve_model
from worker.text.chat_template import Chat, Message
from worker.text.tokenizer import Tokenizer

QUESTIONS = (
    "Describe how a lighthouse works and who looks after one.",
    "Why does the sky turn red in the evening?",
    "How do I bake a simple loaf of bread at home?",
    "Which habits help a student to prepare for an exam?",
)
BATCHES = (1, 4, 16)
NUM_TOKENS = 96
MODEL = "smollm2-135m"
SECTIONS = ("plain", "speculation", "served")


def main() -> None:
    """Run the chosen sections and write one JSON file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm-python", help="Python of an environment with vLLM's CPU build")
    parser.add_argument("--spec-bench", help="Spec-Bench's question.jsonl")
    parser.add_argument("--sections", default=",".join(SECTIONS), help="which parts to run")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gammas", default="1,2,3,4,5", help="gammas to compare with 0")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--out", help="where to write the raw JSON")
    options = parser.parse_args()
    sections = options.sections.split(",")
    if unknown := set(sections) - set(SECTIONS):
        parser.error(f"unknown sections: {', '.join(sorted(unknown))}")
    folder = resolve_model(MODEL, cache_folder(""), say)
    tokenizer = Tokenizer.load(folder)
    result: dict[str, Any] = {"machine": machine(), "dtype": options.dtype}
    if "plain" in sections:
        result["plain"] = plain(folder, tokenizer, options)
    if "speculation" in sections:
        result["speculation"] = speculation(tokenizer, options)
    if "served" in sections:
        result["served"] = asyncio.run(served.run(options.rounds))
    text = json.dumps(result, indent=1)
    if options.out:
        Path(options.out).write_text(text + "\n")
    print(text)


def plain(folder: Path, tokenizer: Tokenizer, options: argparse.Namespace) -> dict[str, Any]:
    """Greedy decoding without drafts: tok/s of the whole call, prefill included, by batch."""
    prompts = [tokenizer.encode_chat(Chat([Message("user", question)])) for question in QUESTIONS]
    with ExitStack() as stack:
        arms = [
            stack.enter_context(arm)
            for arm in (
                engine_arm("exact compiled", options.dtype, "exact", "compiled"),
                engine_arm("free compiled", options.dtype, "free", "compiled"),
                engine_arm("exact eager", options.dtype, "exact", "eager"),
            )
        ]
        command = [sys.executable, str(FOLDER / "generate.py"), str(folder), options.dtype]
        arms.append(stack.enter_context(Arm("generate", command)))
        if options.vllm_python:
            command = [options.vllm_python, str(FOLDER / "vllm_cpu.py"), str(folder), options.dtype]
            arms.append(stack.enter_context(Arm("vllm", command)))
        rates: dict[str, dict[int, list[float]]] = {arm.name: defaultdict(list) for arm in arms}
        for arm in arms:  # warm up
            if arm.name != "generate":
                arm.run(prompts=prompts * 4, max_tokens=8)
            arm.run(prompts=prompts[:1], max_tokens=8)
        for number in range(options.rounds):
            for batch in BATCHES:
                chosen = [prompts[(number + i) % len(prompts)] for i in range(batch)]
                for arm in arms:
                    if arm.name == "generate" and batch > 1:
                        continue  # its batches need padding; the floor is at batch 1
                    answer = arm.run(prompts=chosen, max_tokens=NUM_TOKENS)
                    count = sum(map(len, answer["tokens"]))
                    assert count == batch * NUM_TOKENS, (arm.name, count)
                    rates[arm.name][batch].append(count / answer["seconds"])
                    say(f"plain {arm.name} batch {batch}: {rates[arm.name][batch][-1]:.1f} tok/s")
    return {
        "facts": {arm.name: arm.facts for arm in arms},
        "tok_s": {name: {b: spread(r) for b, r in by.items()} for name, by in rates.items()},
        "ratio_to_vllm": ratios(rates, "vllm"),
        "ratio_to_generate": ratios(rates, "generate"),
    }


def speculation(tokenizer: Tokenizer, options: argparse.Namespace) -> dict[str, Any] | str:
    """The default draft, exact, greedy: time at gamma 0 over time at each gamma, by prompt."""
    if not options.spec_bench:
        return "left out: --spec-bench was not given"
    rows = [json.loads(line) for line in Path(options.spec_bench).read_text().splitlines()]
    taken: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        if len(taken[row["category"]]) < 2:
            taken[row["category"]].append(row["turns"][0])
    named = [(category, text) for category, texts in sorted(taken.items()) for text in texts]
    prompts = [tokenizer.encode_chat(Chat([Message("user", text)])) for _, text in named]
    result: dict[str, Any] = {"num_prompts": len(prompts), "num_tokens": NUM_TOKENS}
    with engine_arm("exact compiled", options.dtype, "exact", "compiled", gamma=5) as arm:
        result["facts"] = arm.facts
        arm.run(prompts=prompts[:4], max_tokens=16)
        for batch in (1, 4):
            gammas = (0, *map(int, options.gammas.split(",")))
            by_gamma: dict[int, list[float]] = defaultdict(list)
            accepted_length: dict[int, list[float]] = defaultdict(list)
            for at in range(0, len(prompts) - batch + 1, batch):
                group = prompts[at : at + batch]
                seconds, tokens = {}, {}
                for gamma in gammas:
                    job = {"prompts": group, "max_tokens": NUM_TOKENS, "max_gamma": gamma}
                    answer = arm.run(**job)
                    seconds[gamma], tokens[gamma] = answer["seconds"], answer["tokens"]
                    steps = sum(answer["gamma_histogram"])
                    accepted_length[gamma].append(batch * NUM_TOKENS / max(steps, 1))
                assert all(ids == tokens[0] for ids in tokens.values()), "answers differ"
                for gamma in gammas[1:]:
                    by_gamma[gamma].append(seconds[0] / seconds[gamma])
                say(
                    f"speculation batch {batch} {named[at][0]}: "
                    + " ".join(f"gamma {g} {r[-1]:.2f}x" for g, r in by_gamma.items())
                )
            result[f"batch {batch}"] = {
                gamma: {
                    "mean_of_ratios": round(statistics.mean(found), 3),
                    "min": round(min(found), 3),
                    "max": round(max(found), 3),
                    "mean_tokens_per_step": round(statistics.mean(accepted_length[gamma]), 2),
                }
                for gamma, found in by_gamma.items()
            }
        steady: dict[int, list[float]] = defaultdict(list)
        for _ in range(options.rounds):
            job = {"prompts": prompts, "max_tokens": NUM_TOKENS, "at_once": 4}
            plain_s = arm.run(**job, max_gamma=0)["seconds"]
            for gamma in gammas[1:]:
                steady[gamma].append(plain_s / arm.run(**job, max_gamma=gamma)["seconds"])
        result["four at a time, all prompts"] = {g: spread(r) for g, r in steady.items()}
    return result


def engine_arm(name: str, dtype: str, arithmetic: str, build: str, gamma: int = 0) -> Arm:
    """An engine in its own process; without drafts none is loaded."""
    proposer = "draft_model" if gamma else "none"
    flags = [f"--model={MODEL}", f"--dtype={dtype}", f"--arithmetic={arithmetic}"]
    flags += [f"--build={build}", f"--proposer={proposer}", f"--gamma={gamma}"]
    flags += ["--prefix-cache=false"]
    return Arm(name, [sys.executable, str(FOLDER / "engine.py"), *flags])


def ratios(rates: dict[str, dict[int, list[float]]], base: str) -> dict[str, Any]:
    """Each arm over `base`, round by round: median and spread."""
    if base not in rates:
        return {}
    return {
        name: {
            batch: spread([a / b for a, b in zip(found, rates[base][batch], strict=True)])
            for batch, found in by.items()
            if batch in rates[base]
        }
        for name, by in rates.items()
        if name != base
    }


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and greatest."""
    digits = 3 if max(values) < 10 else 1
    named = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: round(value, digits) for name, value in named.items()}


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    model = next(
        (ln for ln in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in ln), "?"
    )
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return {
        "cpu": model.partition(":")[2].strip(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "commit": commit.stdout.strip(),
    }


def say(*words: str) -> None:
    """Progress."""
    print(*words, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
