"""Which version has a worker's next steps, and where probes of plain decoding lie. Pure.

A worker's steps come in slices of 200: a canary has a slice or it has not, so that it pays for
switching to it, and seldom. Probes are runs of 8 steps, one in each frame of 8 / share steps.
Both are placed by hashing what every replica knows, never by chance.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache

SLICE_STEPS = 200
PROBE_STEPS = 8  # the first step after a probe catches up no more than this many tokens a row


@lru_cache(maxsize=16_384)
def _unit(*parts: str | int) -> float:
    """A number in [0, 1) that depends on the parts alone."""
    text = "\0".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest()) / 2**56


def has_slice(share: float, worker_id: str, num_steps: int, version_number: int) -> bool:
    """Whether a canary has the slice that a worker's step after `num_steps` lies in."""
    return _unit("slice", worker_id, num_steps // SLICE_STEPS, version_number) < share


def steps_left_of_slice(num_steps: int) -> int:
    """Steps until the slice ends, at least 1."""
    return SLICE_STEPS - num_steps % SLICE_STEPS


@dataclass(frozen=True)
class Probes:
    """Where plain decoding is measured, whatever the policy says."""

    share: float  # of all steps, [0, 0.5]; 0 means nowhere

    @property
    def frame_steps(self) -> int:
        """Steps of a frame, which holds one probe."""
        return max(PROBE_STEPS, round(PROBE_STEPS / self.share))

    def at(self, worker_id: str, num_steps: int) -> tuple[bool, int]:
        """Whether a worker's step after `num_steps` is a probe, and steps until that changes."""
        frame, position = divmod(num_steps, self.frame_steps)
        start = self._start(worker_id, frame)
        if position < start:
            return False, start - position
        if position < start + PROBE_STEPS:
            return True, start + PROBE_STEPS - position
        return False, self.frame_steps - position + self._start(worker_id, frame + 1)

    def _start(self, worker_id: str, frame: int) -> int:
        room = self.frame_steps - PROBE_STEPS + 1
        return int(_unit("probe", worker_id, frame) * room)
