"""Where a step's time goes on the device: what covers it, what does not, and which kernels."""

from __future__ import annotations

import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Span = tuple[float, float, str]  # start and duration in microseconds, name
_DEVICE_WORK = {"kernel", "gpu_memcpy", "gpu_memset"}
WAIT_US = 10.0  # a gap this long is no gap between kernels of a graph: the device waits


class Recording:
    """torch's profiler around steps, on a device with nothing left to do at both ends."""

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"
        kind = torch.profiler.ProfilerActivity
        self._profiler = torch.profiler.profile(activities=[kind.CUDA if self._cuda else kind.CPU])

    def start(self) -> None:
        """Begin, once what was launched has run."""
        self._settle()
        self._profiler.start()

    def stop(self) -> None:
        """End, once what was launched has run."""
        self._settle()
        self._profiler.stop()

    def spans(self) -> list[Span]:
        """Kernels and copies in order of time; on a CPU the operators that ran."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profiler.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
        wanted = _DEVICE_WORK if self._cuda else {"cpu_op"}
        return sorted(
            (float(event["ts"]), float(event["dur"]), str(event["name"]))
            for event in events
            if event.get("cat") in wanted and "dur" in event
        )

    def _settle(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()


def summarise(spans: list[Span], num_steps: int, *, most: int = 20) -> dict[str, Any]:
    """Per step: time that some work covers, gaps by length, and the kernels that took longest."""
    covered = short_gaps = waits = 0.0
    end = spans[0][0] if spans else 0.0
    calls: dict[str, list[float]] = defaultdict(list)
    for start, duration, name in spans:
        calls[name].append(duration)
        gap = start - end
        if gap >= WAIT_US:
            waits += gap
        elif gap > 0:
            short_gaps += gap
        covered += max(0.0, start + duration - max(start, end))
        end = max(end, start + duration)
    ranked = sorted(calls.items(), key=lambda item: -sum(item[1]))
    return {
        "covered_us": round(covered / num_steps, 1),
        "short_gaps_us": round(short_gaps / num_steps, 1),
        "waits_us": round(waits / num_steps, 1),
        "num_kernels": round(len(spans) / num_steps, 1),
        "kernels": [
            {
                "name": name,
                "us_per_step": round(sum(found) / num_steps, 2),
                "calls_per_step": round(len(found) / num_steps, 2),
            }
            for name, found in ranked[:most]
        ],
    }


def copy_rate(device: str, num_bytes: int) -> float:
    """Bytes a second, read and written, of a large copy on the device: median of ten."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    times = sorted(_seconds(lambda: target.copy_(source), device) for _ in range(10))
    return 2 * num_bytes / times[len(times) // 2]


def _seconds(work: Callable[[], object], device: str) -> float:
    if device != "cuda":
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
