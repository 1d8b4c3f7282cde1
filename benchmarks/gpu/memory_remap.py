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

from gpu import memory_floors
from gpu.arm_list import FOLDERS
from gpu.served import environment
from memory_agent import cuda_memory
from memory_agent.arena import SharedFile
from memory_agent.device_pool import DeviceWork
from memory_agent.layout import ArenaLayout
from memory_agent.remap_kernel import move_blocks, reference_move_blocks

Answer = dict[str, Any]


def measure(options: argparse.Namespace) -> Answer:
    """Rates of the kernel and of the agent's own way, in a process that maps this one's arena."""
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
    found = {**answer, "one_gb": one_gb}
    memory_floors.check(
        found, options, "the kernel's rate for 1 GB of blocks, over the device's copy's",
        answer["rates"][str(one_gb)]["kernel"]["share"], least=0.85, of_time=True,
    )  # fmt: skip
    return found


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
        mapped: Any = cuda_memory.open_handle(0, bytes.fromhex(job["handle"]), num_bytes)
        arena = mapped.tensor()
    else:
        mapped = SharedFile(job["path"], num_bytes, create=False)
        arena = torch.frombuffer(mapped.memory, dtype=torch.uint8)
    copy = _figures(_copy_times(job), 2 * job["copy_bytes"])
    rates: dict[str, dict[str, Answer]] = {}
    work = _work(arena, job)
    for count in job["counts"]:
        half = job["num_blocks"] // 2
        order = torch.randperm(half, generator=torch.Generator().manual_seed(1))[:count]
        sources, destinations = (order + half).tolist(), order.tolist()
        moves = torch.stack([order + half, order], 1)
        moves = moves.to(torch.int32).to(arena.device).contiguous()
        kernel = functools.partial(move_blocks, arena, moves, size)
        grant = functools.partial(work.copy, sources, destinations, lambda: False)
        cells = rates.setdefault(str(count), {})
        for name, run, timed in (("kernel", kernel, _times), ("grant", grant, _wall_times)):
            arena[: half * size].zero_()
            expected = arena.clone()
            reference_move_blocks(expected, moves, size)
            cell = cells[name] = _figures(timed(run, job), 2 * count * size)
            copies = count * size / job["copy_bytes"]
            cell["share"] = round(copies * copy["ms"] / cell["ms"], 4)
            cell["share_of_bests"] = round(copies * copy["best_ms"] / cell["best_ms"], 4)
            assert torch.equal(arena, expected), f"blocks did not arrive: {name}"
            del expected
    work.close()
    return {"copy": copy, "rates": rates}


def _work(arena: torch.Tensor, job: Answer) -> DeviceWork:
    """What the agent's process has of an arena with a head and a tail alike; no image is loaded."""
    half, size = job["num_blocks"] // 2, job["block_bytes"]
    layout = ArenaLayout(
        block_bytes=size, draft_block_bytes=0, image_bytes=half * size, num_base_blocks=half
    )
    return DeviceWork(layout, arena, torch.empty(0, dtype=torch.uint8), 1.0)


def _figures(times: list[float], num_bytes: int) -> Answer:
    """Figures of runs that read and wrote so many bytes, together."""
    median, best = statistics.median(times), min(times)
    return {
        "ms": round(median * 1e3, 4),
        "best_ms": round(best * 1e3, 4),
        "worst_ms": round(max(times) * 1e3, 4),
        "gb_s": round(num_bytes / median / 1e9, 1),
        "best_gb_s": round(num_bytes / best / 1e9, 1),
        "all_ms": [round(span * 1e3, 4) for span in times],
    }


def _copy_times(job: Answer) -> list[float]:
    source = torch.empty(job["copy_bytes"], dtype=torch.uint8, device=job["device"]).fill_(1)
    target = torch.empty_like(source)
    return _times(lambda: target.copy_(source), job)


def _times(run: Callable[[], object], job: Answer) -> list[float]:
    """Seconds of each launch but the first, on the device's own clock."""
    if job["device"] != "cuda":
        return _wall_times(run, job)
    run()
    times = []
    for _ in range(job["repeats"]):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return times


def _wall_times(run: Callable[[], object], job: Answer) -> list[float]:
    """Seconds of each run but the first, which must wait for its own end."""
    if job["device"] == "cuda":
        torch.cuda.synchronize()  # a stream of its own does not wait for what fills the arena
    run()
    times = []
    for _ in range(job["repeats"]):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return times


def show(found: Answer) -> str:
    """Lines for each number of moves, then what is asked of the largest."""
    lines = [
        f"\nmoving blocks over IPC, {len(found['copy']['all_ms'])} times each, medians [least, "
        f"greatest]; the device copies {found['copy']['gb_s']} GB/s, {found['copy']['best_gb_s']} "
        "at best"
    ]
    for count, cells in found["rates"].items():
        for name, cell in cells.items():
            what = "the kernel alone" if name == "kernel" else "the agent's copy of a grant"
            lines.append(
                f"  {count} blocks, {what}: {cell['ms']} ms [{cell['best_ms']}, "
                f"{cell['worst_ms']}], {cell['share']:.1%} of the copy rate; best of each "
                f"{cell['share_of_bests']:.1%}"
            )
    lines.append(
        "  the agent's copy checks the list, takes it to the device, launches and waits, by the "
        "host's clock; no floor"
    )
    return "\n".join([*lines, *memory_floors.lines(found)])


if __name__ == "__main__":
    if sys.argv[1] == "hold":
        _hold(json.loads(sys.argv[2]))
    else:
        print(json.dumps(_move(json.loads(sys.argv[2]))), flush=True)
