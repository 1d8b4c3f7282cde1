"""How long a step took: device events on a GPU, a clock where steps run as they are launched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(slots=True)
class Marks:
    """Moments of one step."""

    begun: float | torch.cuda.Event
    caught_up: float | torch.cuda.Event
    ended: float | torch.cuda.Event


class Timer:
    """Marks moments in the order of the device's work."""

    def __init__(self, device: torch.device, clock: Callable[[], float]) -> None:
        """Events on a GPU; `clock` (seconds, monotonic) elsewhere."""
        self._events, self._clock = device.type == "cuda", clock

    def mark(self) -> float | torch.cuda.Event:
        """Now, behind all that was launched."""
        if not self._events:
            return self._clock()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def wait(moment: float | torch.cuda.Event) -> None:
    """Return once the device has come there."""
    if not isinstance(moment, float):
        moment.synchronize()


def elapsed_us(start: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    """Microseconds between two moments that have passed."""
    if isinstance(start, float) or isinstance(end, float):
        assert isinstance(start, float)
        assert isinstance(end, float)
        return (end - start) * 1e6
    return float(start.elapsed_time(end)) * 1e3
