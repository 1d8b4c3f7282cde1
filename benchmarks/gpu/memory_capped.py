"""Throughput of a pool that is too small for its load, at equal total device memory.

One engine runs every arm, so that nothing but blocks differs: the arena is the same bytes. What an
arm may not use is set aside in the head.

    resident          the draft stays; no agent, so its context's bytes are blocks here
    resident, gamma   the same while it drafts, with the acceptance made up
    elastic           an agent is attached, and the bytes of its context are no blocks
    weights alone     elastic, but the draft's KV does not become blocks
    draft KV alone    elastic, but the draft's weights do not
    no draft          the whole arena is KV from the start; no agent
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gpu.load import prompts
from gpu.memory_link import Bench, device_free
from gpu.shapes import Shape

AGENT = ("--tau-low=0.1", "--t-persist=3")


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
        "memory": _shares(bench, options),
    }
    arms: dict[str, Any] = found.setdefault("arms", {})
    _run(bench, options, asked[: at_once // 4 + 1], at_once)  # everything once

    def run(name: str, *, gamma: int = 0) -> None:
        arms[name] = _run(bench, options, asked, at_once, gamma=gamma)
        bench.say(f"capped, {name}: {arms[name]}")

    for gamma in options.capped_gammas:
        run("resident" if gamma == 0 else f"resident, gamma {gamma}", gamma=gamma)
    free = device_free(bench.ready.device)
    weights = -(-layout.image_bytes // block)
    with bench.agent(*AGENT, *options.agent_flag):
        context = free - device_free(bench.ready.device)
        lost = -(-context // block)
        found["agent_context_bytes"], found["agent_context_blocks"] = context, lost
        with _set_aside(bench, lost):
            run("elastic")
            arms["elastic"]["num_expansions"] = bench.elastic.counters.num_expansions
            _expand(bench)
            with _set_aside(bench, extra - weights):
                run("weights alone")
            with _set_aside(bench, weights):
                run("draft KV alone")
            _expand(bench)
    run("no draft")
    digests = {arm["answers"] for name, arm in arms.items() if "gamma" not in name}
    found["answers_are_equal"] = len(digests) == 1
    for arm in arms.values():
        arm["over_resident"] = round(arm["tok_s"] / arms["resident"]["tok_s"], 4)
    return found


def _expand(bench: Bench) -> None:
    """See to it that the draft is gone: the load's end may have brought it back."""
    if bench.elastic.residency == "offloaded":
        return
    bench.until(lambda: bench.elastic.residency in ("resident", "offloaded"), "no transition")
    driver = bench.driver
    driver._submit(driver._request([300] * 4, 200, max_gamma=0, temperature=0.0, seed=0))
    with _set_aside(bench, bench.num_free_head() - 2):
        bench.until(lambda: bench.elastic.residency == "offloaded", "the pool grew")
    driver.reset()


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
    num_preemptions, most = scheduler.num_preemptions, 0
    driver._pretend(options.synthetic if gamma and bench.ready.device == "cuda" else None)
    bench.set_gamma(gamma)
    turn: Callable[[], Any] = driver._turn

    def counted() -> Any:
        nonlocal most
        most = max(most, scheduler.num_running)
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
        f"{found['agent_context_blocks']} blocks; answers equal: {found['answers_are_equal']}"
    )
    for name, arm in found["arms"].items():
        lines.append(
            f"  {name:18} {arm['tok_s']:9.1f} tok/s  {arm['over_resident']:.3f}  "
            f"{arm['num_preemptions']:5} preemptions  {arm['mean_rows']:.1f} rows"
        )
    return "\n".join(lines)
