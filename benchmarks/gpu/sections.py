"""What is measured on a loaded arm, section by section; results are plain JSON."""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu.arm_list import NIGHTJAR, PAIR, PEERS, Engine, serving_arm
from gpu.load import arrivals, highest_rate, read_trace
from gpu.shapes import Shape
from gpu.tables import computed, tokens_per_step

Say = Callable[[str], None]
Results = dict[str, Any]


def plain(arm: Engine, name: str, options: argparse.Namespace, results: Results, say: Say) -> None:
    """Decode rates: B x N tokens over the time for N + 1 tokens less the time for 1."""
    cells = results.setdefault("plain", {}).setdefault(name, {})
    ask = {"op": "closed", "length": options.context, "vocab": options.vocab}
    arm.run(**ask, count=2, seed=0, max_tokens=min(16, options.tokens))
    for batch in options.batches:
        arm.run(**ask, count=batch, seed=batch, max_tokens=min(8, options.tokens))
        rates, seconds = [], []
        for turn in range(options.repeats):
            job = {**ask, "count": batch, "seed": 1000 * batch + turn}
            first = arm.run(**job, max_tokens=1)["seconds"]
            whole = arm.run(**job, max_tokens=options.tokens + 1)["seconds"]
            rates.append(round(batch * options.tokens / (whole - first), 1))
            seconds.append([round(first, 4), round(whole, 4)])
        cells[str(batch)] = {"tok_s": rates, "seconds": seconds}
        say(f"plain {name} batch {batch}: {rates} tok/s")


def spec(arm: Engine, name: str, options: argparse.Namespace, results: Results, say: Say) -> None:
    """Step times by batch size and gamma, then the chosen cells with acceptance made up.

    Steps are those in the middle of an answer of the closed loop, as the peer's rates are.
    """
    cells = results.setdefault("spec", {}).setdefault(name, {})
    ask = {"op": "steady", "vocab": options.vocab, "prefix_cache": True}
    for batch in options.batches:
        own = cells.setdefault(str(batch), {})
        length = _centred(options, options.steps)
        for gamma in options.gammas:
            job = {**ask, "count": batch, "seed": batch, "length": length}
            own[str(gamma)] = arm.run(**job, gamma=gamma, num_steps=options.steps)
            say(f"spec {name} batch {batch} gamma {gamma}: {own[str(gamma)]['step_ms']} ms")
    if not arm.facts.get("can_pretend"):
        say(f"spec {name}: this engine cannot pretend an acceptance; no run checks the table")
        return
    alpha, num_steps = options.synthetic, 4 * options.steps
    for batch in options.cells:
        rates = {g: r for g, r in computed(cells, str(batch), alpha).items() if g}
        gamma = max(rates, key=rates.__getitem__)
        length = _centred(options, num_steps * tokens_per_step(alpha, gamma))
        job = {**ask, "count": batch, "length": length, "gamma": gamma, "acceptance": alpha}
        runs = [
            arm.run(**job, seed=1000 * turn + batch, num_steps=num_steps)
            for turn in range(options.repeats)
        ]
        rate = statistics.median(run["tok_s"] for run in runs)
        results.setdefault("synthetic", {})[f"{name} batch {batch}"] = {
            "arm": name,
            "batch": batch,
            "gamma": gamma,
            "acceptance": alpha,
            "tok_s": rate,
            "computed": round(rates[gamma], 1),
            "ratio": round(rate / rates[gamma], 3),
            "runs": runs,
        }
        say(f"synthetic {name} batch {batch} gamma {gamma}: {[run['tok_s'] for run in runs]} tok/s")


def _centred(options: argparse.Namespace, num_tokens: float) -> int:
    """The prompt's length with which so many tokens lie in the middle of the closed loop's."""
    return max(1, options.context + round((options.tokens - num_tokens) / 2))


def idle(arm: Engine, name: str, options: argparse.Namespace, results: Results, say: Say) -> None:
    """Time that no device work covers, kernels, and the share of the roofline."""
    shape: Shape = options.shape
    size = 2 if options.dtype == "bfloat16" else 4
    rate = arm.run(op="copy_rate", num_bytes=options.copy_bytes)["bytes_s"]
    results["copy_bytes_s"] = rate
    ask = {"op": "profile", "vocab": options.vocab, "num_steps": options.steps}
    ask |= {"prefix_cache": True, "length": _centred(options, options.steps)}
    for batch, gamma in itertools.product(options.profiled, options.profiled_gammas):
        if gamma and not name.endswith("+draft"):
            continue
        cell = arm.run(**ask, count=batch, seed=batch, gamma=gamma)
        step_us = cell["plain"]["step_ms"] * 1e3
        cell["idle_share"] = round(1 - cell["covered_us"] / step_us, 5)
        if gamma == 0:
            context = options.context + options.tokens / 2
            read = size * (shape.step_params + batch * context * shape.kv_values)
            cell["bytes_read"] = read
            cell["roofline"] = round(read / rate * 1e6 / step_us, 4)
        where = f"{batch}" if gamma == 0 else f"{batch} gamma {gamma}"
        results.setdefault("idle", {}).setdefault(name, {})[where] = cell
        say(f"idle {name} batch {where}: {cell['idle_share']:.2%} of {step_us:.0f} us")


def bits(arm: Engine, name: str, options: argparse.Namespace, results: Results, say: Say) -> None:
    """Answers that differ from those of one batch at gamma 0: none may, under exact arithmetic."""
    count = options.num_answers
    ask = {"op": "answers", "length": options.context, "vocab": options.vocab, "seed": 77}
    ask |= {"max_tokens": options.tokens}

    def answers(**job: Any) -> list[list[int]]:
        found: list[list[int]] = arm.run(**ask, **job)["tokens"]
        return found

    base = answers(count=count)
    variants = {
        "one at a time": answers(count=count, at_once=1),
        "three at a time, prefixes cached": answers(count=count, at_once=3, prefix_cache=True),
    }
    if name.endswith("+draft"):
        for gamma in options.gammas:
            if gamma:
                variants[f"gamma {gamma}"] = answers(count=count, max_gamma=gamma)
    found = {
        variant: sum(a != b for a, b in zip(base, other, strict=True))
        for variant, other in variants.items()
    }
    kept = results.setdefault("bits", {})
    kept[name] = {"num_answers": count, "differ": found, "answers": base}
    other = kept.get(name.removesuffix("+draft") if name.endswith("+draft") else f"{name}+draft")
    if other is not None:
        pairs = zip(base, other["answers"], strict=True)
        found["without or with a draft loaded"] = sum(a != b for a, b in pairs)
    say(f"bits {name}: of {count} answers differ {found}")


def openloop(
    arm: Engine, name: str, options: argparse.Namespace, results: Results, say: Say
) -> None:
    """The highest rate of the trace whose TTFT p99 stays within the limit; then a shared rate."""
    trace = read_trace(options.trace)
    runs: list[dict[str, Any]] = []

    def run(rate: float) -> dict[str, Any]:
        wanted = arrivals(
            trace, rate=rate, seconds=options.open_seconds, max_len=options.max_model_len
        )
        found = arm.run(op="open", arrivals=wanted, vocab=options.vocab, limit_s=options.ttft_limit)
        runs.append({"rate": round(rate, 3), **found})
        say(f"openloop {name}: {runs[-1]}")
        return found

    run(options.open_start / 4)  # warm up
    best = highest_rate(
        lambda rate: bool(run(rate)["passed"]), start=options.open_start, runs=options.open_runs
    )
    shared = results.get("shared_rate") or 0.7 * best
    results["shared_rate"] = shared
    results.setdefault("openloop", {})[name] = {
        "highest_rate": best,
        "shared_rate": shared,
        "at_shared_rate": run(shared) if shared else None,
        "runs": runs,
    }


def in_process(
    arm: Engine, name: str, options: argparse.Namespace, results: Results, say: Say
) -> None:
    """What `serve` compares with: such requests, as many at once, without drafts, prefill included.

    Neither side finds a prompt in the prefix cache.
    """
    if name != serving_arm(options):
        return
    count = options.clients * options.rounds
    ask = {"op": "closed", "length": options.context, "vocab": options.vocab, "seed": 0}
    ask |= {"max_tokens": options.tokens, "at_once": options.clients, "max_gamma": 0}
    arm.run(**ask, count=options.clients)
    rates = [
        count * options.tokens / arm.run(**ask, count=count)["seconds"]
        for _ in range(options.repeats)
    ]
    results.setdefault("serve", {})["in process"] = [round(rate, 1) for rate in rates]
    say(f"serve {name}, in process: {rates} tok/s")


def pair(arm: Engine, name: str, options: argparse.Namespace, results: Results, say: Say) -> None:
    """Acceptance of the shipped pair on Spec-Bench's prompts, greedy and at temperature 1."""
    taken: dict[str, list[str]] = defaultdict(list)
    for line in Path(options.spec_bench).read_text().splitlines():
        row = json.loads(line)
        if len(taken[row["category"]]) < options.per_category:
            taken[row["category"]].append(row["turns"][0])
    texts = [text for found in taken.values() for text in found]
    for temperature in (0.0, 1.0):
        found = arm.run(
            op="acceptance",
            texts=texts,
            max_tokens=options.tokens,
            gamma=max(options.gammas),
            temperature=temperature,
            at_once=32,
        )
        chances = [
            a / r if r else 0.0 for a, r in zip(found["accepted"], found["reached"], strict=True)
        ]
        tokens, reached = [1.0], 1.0
        for chance in chances:
            reached *= chance
            tokens.append(tokens[-1] + reached)
        found |= {"chances": chances, "tokens_per_step": tokens}
        results.setdefault("pair", {})[f"temperature {temperature:g}"] = found
        say(f"pair: temperature {temperature:g}, tokens per step by gamma {tokens}")


Section = Callable[[Engine, str, argparse.Namespace, Results, Say], None]

# Which arms a section runs on, in the order in which they run on a loaded arm.
BY_ARM: dict[str, tuple[Section, tuple[str, ...]]] = {
    "plain": (plain, (*PEERS, *NIGHTJAR)),
    "bits": (bits, NIGHTJAR),
    "spec": (spec, ("exact+draft", "free+draft")),
    "idle": (idle, ("exact", "exact+draft")),
    "openloop": (openloop, ("vllm", "vllm-own", "exact", "free")),
    "serve": (in_process, ("exact", "exact+draft")),
    "pair": (pair, (PAIR,)),
}
