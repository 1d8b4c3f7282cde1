"""Speed of moving blocks in another process's arena, and what becomes of a dead process's."""

from __future__ import annotations

import argparse
import functools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

from gpu.arm_list import FOLDERS
from gpu.served import environment
from memory_agent import cuda_memory
from memory_agent.arena import SharedFile
from memory_agent.remap_kernel import CHUNK_WORDS, NUM_WARPS, move_blocks, reference_move_blocks

CUTS = ((CHUNK_WORDS, NUM_WARPS), (2048, 4), (4096, 8), (8192, 8), (16384, 16), (16384, 32))
Answer = dict[str, Any]


def measure(options: argparse.Namespace) -> Answer:
    """Rates by number of moves and cut of the work, in a process that maps this one's arena."""
    size = options.block_bytes
    one_gb = -(-options.moved_bytes // size)
    job = {
        "device": options.device,
        "block_bytes": size,
        "num_blocks": 2 * one_gb + 4,
        "counts": sorted({min(64, one_gb), min(600, one_gb), one_gb}),
        "copy_bytes": options.copy_bytes,
        "repeats": options.repeats,
    }
    num_bytes = job["num_blocks"] * size
    with tempfile.TemporaryDirectory() as folder:
        if options.device == "cuda":
            arena: Any = cuda_memory.allocate(0, num_bytes)
            arena.tensor().random_(0, 256)
            torch.cuda.synchronize()
            job["handle"] = arena.handle().hex()
        else:
            arena = SharedFile(os.path.join(folder, "arena"), num_bytes, create=True)
            job["path"] = arena.path
        try:
            answer = _child("move", job)
        finally:
            arena.close()
    best = max(answer["rates"][str(one_gb)].items(), key=lambda item: item[1]["share"])
    own = answer["rates"][str(one_gb)][f"{CHUNK_WORDS} words, {NUM_WARPS} warps"]
    return {**answer, "one_gb": one_gb, "default": own, "best": {"cut": best[0], **best[1]}}


def died(options: argparse.Namespace) -> Answer:
    """Whether memory of a killed process stays allocated and readable while this one maps it."""
    if options.device != "cuda":
        raise SystemExit("needs a GPU")
    torch.cuda.init()
    num_bytes, before = options.death_bytes, _free()
    holder = _start("hold", {"num_bytes": num_bytes})
    assert holder.stdout is not None
    handle = bytes.fromhex(holder.stdout.readline().strip())
    held = _free()
    mapped = cuda_memory.open_handle(0, handle, num_bytes)
    view = mapped.tensor()
    assert int(view[num_bytes - 1]) == 7
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    time.sleep(2.0)  # for the driver to clear up
    killed = _free()
    readable = bool((view[:: 1 << 20] == 7).all()) and int(view[num_bytes - 1]) == 7
    del view
    began = time.perf_counter()
    mapped.close()
    unmap_ms = (time.perf_counter() - began) * 1e3
    while _free() < killed + num_bytes // 2 and time.perf_counter() - began < 10:
        time.sleep(0.01)
    after = _free()
    return {
        "arena_bytes": num_bytes,
        "taken_by_the_holder": before - held,
        "given_back_by_its_death": killed - held,
        "given_back_by_unmapping": after - killed,
        "stays_allocated_while_mapped": killed - held < num_bytes // 2,
        "readable_after_its_death": readable,
        "unmap_ms": round(unmap_ms, 2),
    }


def _free() -> int:
    return int(torch.cuda.mem_get_info()[0])


def _start(what: str, job: Answer) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "gpu.memory_remap", what, json.dumps(job)]
    environ = environment(*FOLDERS)
    if job.get("device") == "cpu":
        environ["TRITON_INTERPRET"] = "1"  # kernels run there, slowly, for tests
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environ,
        start_new_session=True,  # a terminal's Ctrl-C is for the process that ends this one
    )


def _child(what: str, job: Answer) -> Answer:
    with _start(what, job) as child:
        try:
            out, _ = child.communicate()
        except BaseException:
            child.kill()
            raise
    if child.returncode:
        raise SystemExit(f"the process that maps the arena ended with {child.returncode}")
    answer: Answer = json.loads(out.splitlines()[-1])
    return answer


def _hold(job: Answer) -> None:
    """Own an allocation until killed."""
    memory = cuda_memory.allocate(0, job["num_bytes"])
    memory.tensor().fill_(7)
    torch.cuda.synchronize()
    print(memory.handle().hex(), flush=True)
    sys.stdin.read()


def _move(job: Answer) -> Answer:
    """Map the arena and measure."""
    num_bytes, size = job["num_blocks"] * job["block_bytes"], job["block_bytes"]
    if job["device"] == "cuda":
        torch.cuda.init()
        free = _free()
        mapped: Any = cuda_memory.open_handle(0, bytes.fromhex(job["handle"]), num_bytes)
        arena = mapped.tensor()
    else:
        free, mapped = 0, SharedFile(job["path"], num_bytes, create=False)
        arena = torch.frombuffer(mapped.memory, dtype=torch.uint8)
    copies = _copy_times(job["device"], job["copy_bytes"], max(10, job["repeats"]))
    copy, best_copy = (2 * job["copy_bytes"] / s for s in (statistics.median(copies), min(copies)))
    rates: dict[str, dict[str, Answer]] = {}
    for count in job["counts"]:
        order = torch.randperm(job["num_blocks"] // 2, generator=torch.Generator().manual_seed(1))
        moves = torch.stack([order[:count] + job["num_blocks"] // 2, order[:count]], 1)
        moves = moves.to(torch.int32).to(arena.device).contiguous()
        expected = arena.clone()
        reference_move_blocks(expected, moves, size)
        cells = rates.setdefault(str(count), {})
        for chunk, warps in CUTS:
            run = functools.partial(
                move_blocks, arena, moves, size, chunk_words=chunk, num_warps=warps
            )
            times = _times(run, job["device"], job["repeats"])
            moved, median, best = 2 * count * size, statistics.median(times), min(times)
            cells[f"{chunk} words, {warps} warps"] = {
                "ms": round(median * 1e3, 4),
                "best_ms": round(best * 1e3, 4),
                "gb_s": round(moved / median / 1e9, 1),
                "share": round(moved / median / copy, 4),
                "share_of_bests": round(moved / best / best_copy, 4),
            }
        assert torch.equal(arena, expected), "blocks did not arrive"
        del expected
    return {
        "copy_gb_s": round(copy / 1e9, 1),
        "best_copy_gb_s": round(best_copy / 1e9, 1),
        "rates": rates,
        "free_before_bytes": free,
    }


def _copy_times(device: str, num_bytes: int, repeats: int) -> list[float]:
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    return _times(lambda: target.copy_(source), device, repeats)


def _times(run: Callable[[], object], device: str, repeats: int) -> list[float]:
    """Seconds of each launch but the first, on the device's own clock."""
    run()
    times = []
    for _ in range(repeats):
        if device != "cuda":
            began = time.perf_counter()
            run()
            times.append(time.perf_counter() - began)
            continue
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return times


def show(found: Answer) -> str:
    """A line for each number of moves."""
    lines = [
        f"\nmoving blocks over IPC, medians; the device copies {found['copy_gb_s']} GB/s, "
        f"{found['best_copy_gb_s']} at best"
    ]
    for count, cells in found["rates"].items():
        cuts = ", ".join(f"{cut}: {c['ms']} ms {c['share']:.1%}" for cut, c in cells.items())
        lines.append(f"  {count} blocks: {cuts}")
    own = found["default"]
    lines.append(
        f"  1 GB as the agent does it: {own['share']:.1%} of the copy rate (at least 85 %), "
        f"best of each {own['share_of_bests']:.1%}"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    if sys.argv[1] == "hold":
        _hold(json.loads(sys.argv[2]))
    else:
        print(json.dumps(_move(json.loads(sys.argv[2]))), flush=True)
