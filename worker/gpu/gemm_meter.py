"""Compiling and timing candidates for a matrix product on a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # x [M, K], weight [N, K]: [M, N]

_COLD_BYTES = 150_000_000  # weights that are read before one comes again: L2 holds 60 MB
_MAX_COPIES = 64
_REPLAY_US = 1500.0
_MAX_CALLS = 64
_NUM_REPLAYS = 3
_MAX_THREADS = 16
_MODE = "thread_local"  # of captures: other threads may allocate meanwhile


class Meter(Protocol):
    """Where candidates become fast or slow: the seam that tests put a fake in."""

    def compile(self, jobs: Sequence[Callable[[], None]]) -> list[Exception | None]:
        """Run the jobs, many at once; what each one raised."""

    def us(self, product: Product, x: torch.Tensor, weight: torch.Tensor) -> float:
        """Microseconds of one product, its weight read from memory; raises what it raises."""


class CudaMeter:
    """Times products inside CUDA graphs, over copies of the weight that L2 cannot hold.

    Use within one thread, and no longer than it takes: it keeps copies of the last weight.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._weight: torch.Tensor | None = None
        self._copies: list[torch.Tensor] = []
        # Graphs come and go; one that stays keeps the pool of their memory in use.
        with torch.cuda.stream(self._stream):
            scratch = torch.zeros(1, device=device)
            scratch.add_(1)
            self._stream.synchronize()
            self._keeper = torch.cuda.CUDAGraph()
            self._keeper.capture_begin(capture_error_mode=_MODE)
            scratch.add_(1)
            self._keeper.capture_end()

    def compile(self, jobs: Sequence[Callable[[], None]]) -> list[Exception | None]:
        """Run the jobs, many at once: a compiler leaves the interpreter lock to others."""

        def run(job: Callable[[], None]) -> Exception | None:
            try:
                with torch.cuda.device(self._device):
                    job()
            except Exception as error:
                return error
            return None

        # The first alone: it sets up what all share.
        first = [run(job) for job in jobs[:1]]
        with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
            return [*first, *pool.map(run, jobs[1:])]

    def us(self, product: Product, x: torch.Tensor, weight: torch.Tensor) -> float:
        """Best of a few replays of a graph of calls."""
        copies = self._copies_of(weight)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            product(x, copies[0])  # loads the kernel, which a capture must not
            once = self._elapsed_us(lambda: product(x, copies[0]))
            calls = max(2, len(copies), min(_MAX_CALLS, int(_REPLAY_US / once)))
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(self._keeper.pool(), capture_error_mode=_MODE)
            try:
                for call in range(calls):
                    product(x, copies[call % len(copies)])
            finally:
                graph.capture_end()
            graph.replay()
            return min(self._elapsed_us(graph.replay) for _ in range(_NUM_REPLAYS)) / calls

    def _elapsed_us(self, work: Callable[[], object]) -> float:
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record(self._stream)
        work()
        end.record(self._stream)
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3

    def _copies_of(self, weight: torch.Tensor) -> list[torch.Tensor]:
        if self._weight is not weight:
            number = min(_MAX_COPIES, -(-_COLD_BYTES // weight.nbytes))
            self._copies = []
            more = weight.new_empty(number - 1, *weight.shape).copy_(weight)
            torch.cuda.synchronize(self._device)
            self._weight, self._copies = weight, [weight, *more]
        return self._copies
