"""Throughput of a pool that is too small for its load, at equal total device memory.

One engine runs every arm, so that nothing but blocks differs: the arena is the same bytes. What an
arm may not use is set aside in the head.

    resident          the draft stays; no agent, so its context's bytes are blocks here
    resident, gamma   the same while it drafts, with the acceptance made up
    elastic           an agent is attached, and the bytes of its context are no blocks
    weights alone     elastic, but the draft's KV does not become blocks
    draft KV alone    elastic, but the draft's weights do not
    no draft          the whole arena is KV from the start; no agent

Every arm runs twice, the second time in the opposite order, after half a loop at full concurrency
for every gamma: what changes evenly with time falls out of the arms' means.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gpu import memory_floors
from gpu.driver import JobFailed
from gpu.load import prompts
from gpu.memory_link import Bench, device_used
from gpu.shapes import Shape


def _agent_flags(options: argparse.Namespace) -> list[str]:
    """The agent's flags; its default of `--hold-s` is longer, and a run here takes seconds."""
    own = ["--t-persist=3", f"--hold-s={options.capped_hold:g}"]
    return [*own, f"--tau-low={options.capped_tau:g}", *options.agent_flag]


def num_base_blocks(options: argparse.Namespace) -> int:
    """Blocks of a pool that gets what a small card has left beside the target and its work."""
    size = options.block_size
    block, draft_block = (2 * s.kv_values * size for s in (options.shape, options.draft_shape))
    room = options.card_bytes * options.card_share - _weights(options.shape) - options.work_bytes
    return int((room - _weights(options.draft_shape)) // (block + draft_block))


def _weights(shape: Shape) -> int:
    """Bytes of a model in bfloat16."""
    return 2 * (shape.step_params + (0 if shape.tied else shape.vocab * shape.hidden))


def measure(bench: Bench, options: argparse.Namespace) -> dict[str, Any]:
    """Every arm on the same requests."""
    blocks, layout = bench.blocks, bench.models.layout
    base, extra, block = blocks.num_base_blocks, blocks.num_extra_blocks, layout.block_bytes
    rows = base // -(-(options.prompt + options.answer) // blocks.block_size)
    at_once = int(1.5 * rows)
    if at_once > bench.config.max_num_seqs:
        raise SystemExit(f"{at_once} rows at once; --max-num-seqs={bench.config.max_num_seqs}")
    asked = prompts(
        options.requests_per_row * at_once, options.prompt, vocab=options.vocab, seed=99
    )
    found: dict[str, Any] = {
        "num_base_blocks": base,
        "num_extra_blocks": extra,
        "rows_that_fill_it": rows,
        "at_once": at_once,
        "num_requests": len(asked),
        "prompt": options.prompt,
        "answer": options.answer,
        "agent_flags": _agent_flags(options),
        "memory": _shares(bench, options),
    }
    failed: list[str] = found.setdefault("failed", [])
    runs: dict[str, list[dict[str, Any]]] = {}

    def run(name: str, residency: str, *, gamma: int = 0) -> None:
        try:
            if bench.elastic.residency != residency:
                raise JobFailed(f"begins with the draft {bench.elastic.residency}, not {residency}")
            done = _run(bench, options, asked, at_once, gamma=gamma)
            runs.setdefault(name, []).append(done)
            if name == "elastic" and not done["num_expansions"]:
                raise JobFailed("the pool never grew")
        except JobFailed as error:
            failed.append(f"{name}: {error}")
            bench.driver.reset()
        bench.say(f"capped, {name}: {failed[-1] if name not in runs else runs[name][-1]}")

    def resident(gammas: list[int]) -> None:
        for gamma in gammas:
            run("resident" if gamma == 0 else f"resident, gamma {gamma}", "resident", gamma=gamma)

    def in_part(name: str, num_aside: int) -> None:
        _expand(bench)
        with _set_aside(bench, num_aside):
            run(name, "offloaded")

    _warm_up(bench, options, asked[:at_once])
    weights = -(-layout.image_bytes // block)
    parts = (("weights alone", extra - weights), ("draft KV alone", weights))
    resident(options.capped_gammas)
    used = device_used(bench.ready.device)
    with bench.agent(*_agent_flags(options)):
        context = device_used(bench.ready.device) - used
        lost = -(-context // block)
        found["agent_context_bytes"], found["agent_context_blocks"] = context, lost
        with _set_aside(bench, lost):
            run("elastic", "resident")
            for name, num_aside in parts:
                in_part(name, num_aside)
        _expand(bench)
    for _ in range(2):
        run("no draft", "offloaded")
    with bench.agent(*_agent_flags(options)):
        with _set_aside(bench, lost):
            for name, num_aside in reversed(parts):
                in_part(name, num_aside)
            _contract(bench)
            run("elastic", "resident")
        _contract(bench)
    resident(options.capped_gammas[::-1])
    return _compared(found, runs, options)


def _compared(
    found: dict[str, Any], runs: dict[str, list[dict[str, Any]]], options: argparse.Namespace
) -> dict[str, Any]:
    """Each arm's runs, their mean, and that beside the mean of the baseline's."""
    means = {name: statistics.mean(done["tok_s"] for done in all_) for name, all_ in runs.items()}
    arms = found["arms"] = {
        name: {
            "tok_s": round(means[name], 1),
            "spread": _spread([done["tok_s"] for done in all_]),
            "over_resident": round(means[name] / means["resident"], 4),
            "num_preemptions": statistics.mean(done["num_preemptions"] for done in all_),
            "mean_rows": round(statistics.mean(done["mean_rows"] for done in all_), 1),
            "runs": all_,
        }
        for name, all_ in runs.items()
        if "resident" in means
    }
    drafting = [name for name in arms if "gamma" in name]
    elastic, resident = arms.get("elastic"), arms.get("resident")
    found["elastic_over"] = {
        name: round(means["elastic"] / means[name], 4) for name in drafting if elastic
    }
    # Whose acceptance is made up has answers of its own.
    compared = [name for name in runs if name not in drafting or options.device != "cuda"]
    digests = {done["answers"] for name in compared for done in runs[name]}
    found["answers_compared"], found["answers_are_equal"] = compared, len(digests) == 1
    memory_floors.check(found, options, "different answers to the same", len(digests), most=1)
    memory_floors.check(
        found, options, "tok/s of elastic over resident",
        elastic and elastic["over_resident"], least=1.05, of_time=True,
    )  # fmt: skip
    memory_floors.check(
        found, options, "preemptions that elastic saves a run",
        resident["num_preemptions"] - elastic["num_preemptions"] if resident and elastic else None,
        least=0.5,  # one in either of the two runs
    )  # fmt: skip
    return found


def _spread(rates: list[float]) -> float:
    """From the slowest run to the fastest, as a share of their mean."""
    return round((max(rates) - min(rates)) / statistics.mean(rates), 4)


def _warm_up(bench: Bench, options: argparse.Namespace, asked: list[list[int]]) -> None:
    """A loop at full concurrency for each gamma; without drafts in the larger pool, in full."""
    with bench.agent(*_agent_flags(options)):
        _run(bench, options, asked, len(asked))
        _contract(bench)
    for gamma in options.capped_gammas:
        if gamma:
            _run(bench, options, asked, len(asked), gamma=gamma)
    bench.say("capped: warm")


def _expand(bench: Bench) -> None:
    """Send the draft away just now, so that the agent holds its return off until the arm runs."""
    _contract(bench)
    driver = bench.driver
    driver._submit(driver._request([300] * 4, 200, max_gamma=0, temperature=0.0, seed=0))
    with _set_aside(bench, bench.num_free_head() - 2):
        bench.until(lambda: bench.elastic.residency == "offloaded", "the pool grew")
    driver.reset()


def _contract(bench: Bench) -> None:
    """Wait until the draft is back, which the agent sees to while nothing runs."""
    bench.until(lambda: bench.elastic.residency == "resident", "the draft came back")


@contextmanager
def _set_aside(bench: Bench, num_blocks: int) -> Iterator[None]:
    """Take head blocks out of use."""
    taken = bench.blocks.reserve(max(0, num_blocks))
    if taken is None:
        raise SystemExit(f"the head has no {num_blocks} free blocks")
    try:
        yield
    finally:
        bench.release(taken)


def _run(
    bench: Bench,
    options: argparse.Namespace,
    asked: list[list[int]],
    at_once: int,
    gamma: int = 0,
) -> dict[str, Any]:
    """Answer everything, so many at once."""
    scheduler, driver = bench.scheduler, bench.driver
    num_preemptions, most, away = scheduler.num_preemptions, 0, list[bool]()
    num_expansions = bench.elastic.counters.num_expansions
    driver._pretend(options.synthetic if gamma and bench.ready.device == "cuda" else None)
    bench.set_gamma(gamma)
    turn: Callable[[], Any] = driver._turn

    def counted() -> Any:
        nonlocal most
        most = max(most, scheduler.num_running)
        away.append(bench.elastic.residency == "offloaded")
        return turn()

    setattr(driver, "_turn", counted)  # noqa: B010
    try:
        done = driver.closed(asked, options.answer, at_once=at_once, max_gamma=gamma)
    finally:
        setattr(driver, "_turn", turn)  # noqa: B010
        driver._pretend(None)
        bench.set_gamma(0)
    steps = driver.retired
    rows = [len(step.done.plan.rows) for step in steps]
    return {
        "tok_s": round(len(asked) * options.answer / done["seconds"], 1),
        "seconds": round(done["seconds"], 3),
        "num_preemptions": scheduler.num_preemptions - num_preemptions,
        "most_rows": most,
        "mean_rows": round(sum(rows) / len(rows), 1),
        "num_steps": len(steps),
        "num_turns": len(away),
        "num_turns_offloaded": sum(away),
        "num_turns_before": away.index(True) if any(away) else len(away),
        "num_turns_after": away[::-1].index(True) if any(away) else 0,
        "num_expansions": bench.elastic.counters.num_expansions - num_expansions,
        "answers": hashlib.sha256(repr(done["tokens"]).encode()).hexdigest()[:16],
    }


def _shares(bench: Bench, options: argparse.Namespace) -> dict[str, Any]:
    """Who has which part of the memory: the paper's table, for this card."""
    layout = bench.models.layout
    target = _weights(options.shape)
    parts = {
        "target weights": target,
        "target KV": layout.tail_offset,
        "draft KV": layout.num_base_blocks * layout.draft_block_bytes,
        "draft weights": layout.image_bytes,
    }
    total = sum(parts.values())
    kv = parts["target KV"]
    return {
        name: {"bytes": size, "share": round(size / total, 4), "of_the_kv": round(size / kv, 4)}
        for name, size in parts.items()
    }


def show(found: dict[str, Any]) -> str:
    """The memory's table, then a line for each arm."""
    lines = ["\nwho has which part of the capped memory"]
    for name, part in found["memory"].items():
        mb, share, kv = part["bytes"] / 1e6, part["share"], part["of_the_kv"]
        lines.append(f"  {name:15} {mb:10.1f} MB  {share:6.1%} of all, {kv:6.1%} of the KV")
    lines.append(
        f"closed loop of {found['at_once']} rows, 1.5 x the {found['rows_that_fill_it']} that fill "
        f"{found['num_base_blocks']} blocks (+{found['num_extra_blocks']}); the agent's context: "
        f"{found['agent_context_blocks']} blocks; the agent's flags: "
        f"{' '.join(found['agent_flags'])}"
    )
    for name, arm in found["arms"].items():
        lines.append(
            f"  {name:18} {arm['tok_s']:9.1f} tok/s (+-{arm['spread'] / 2:.1%})  "
            f"{arm['over_resident']:.3f}  {arm['num_preemptions']:7.1f} preemptions  "
            f"{arm['mean_rows']:.1f} rows"
        )
    lines += [
        f"  elastic, of {done['num_turns']} turns: {done['num_turns_before']} before the draft "
        f"left, {done['num_turns_after']} after it had last been away"
        for done in found["arms"].get("elastic", {}).get("runs", ())
    ]
    lines += [
        f"  elastic over {name} (no floor): {share:.3f}"
        for name, share in found["elastic_over"].items()
    ]
    return "\n".join([*lines, *memory_floors.lines(found)])
