"""Captured CUDA graphs by key, of one memory pool; elsewhere the functions themselves."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

import torch


class Graphs:
    """Functions over static tensors, captured the first time they are asked for.

    A function runs once before it is captured, so that kernels are compiled: `quiet` must have
    made its inputs ones that change nothing.
    """

    def __init__(self, device: torch.device, quiet: Callable[[], None]) -> None:
        """Capture for `device`; on a CPU nothing is captured."""
        self._captures = device.type == "cuda"
        self._quiet = quiet
        self._replays: dict[Hashable, Callable[[], None]] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._captures else None
        stream = torch.cuda.Stream
        self._stream = stream(device) if self._captures else None  # type: ignore[no-untyped-call]
        self.capture_s = 0.0  # spent so far

    def __len__(self) -> int:
        return len(self._replays)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._replays

    def get(self, key: Hashable, make: Callable[[], Callable[[], None]]) -> Callable[[], None]:
        """What runs `make()`'s function; the key's first call captures it."""
        replay = self._replays.get(key)
        if replay is None:
            began = time.monotonic()
            replay = self._replays[key] = self._capture(make())
            self.capture_s += time.monotonic() - began
        return replay

    def _capture(self, function: Callable[[], None]) -> Callable[[], None]:
        if not self._captures:
            return function
        assert self._stream is not None
        with torch.inference_mode():
            self._quiet()
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                function()
            torch.cuda.current_stream().wait_stream(self._stream)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            # By hand: `torch.cuda.graph` would give cached memory back before each of hundreds of
            # captures, only for the next function to ask for it again.
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool)
                try:
                    function()
                finally:
                    graph.capture_end()
        return graph.replay

    def trim(self) -> None:
        """Give memory back that only functions before their capture used."""
        if self._captures:
            torch.cuda.empty_cache()
