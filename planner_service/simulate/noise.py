"""Random numbers of a run, drawn in large pieces: numpy's price per call would dominate a step."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_PIECE = 1 << 16


class Noise:
    """Streams of their own for acceptance, timing and the rest, so that policies meet equals."""

    def __init__(self, seed: int, *, jitter: float) -> None:
        """Start the streams.

        Args:
            seed: Of this run.
            jitter: Sigma of the lognormal noise on each step's time; 0: none.
        """
        self._acceptance, self._timing, self._rest = (
            np.random.default_rng([seed, stream]) for stream in range(3)
        )
        self._sigma = jitter
        self._uniforms: Floats = np.empty(0)
        self._at = 0
        self._jitters: list[float] = []

    def uniforms(self, number: int) -> Floats:
        """[number]: uniform in [0, 1), for acceptance."""
        end = self._at + number
        if end > len(self._uniforms):
            self._uniforms = self._acceptance.random(_PIECE)
            self._at, end = 0, number
        drawn = self._uniforms[self._at : end]
        self._at = end
        return drawn

    def confidences(self, mean: Floats, concentration: float) -> Floats:
        """Beta-distributed chances around their means, in the open interval (0, 1)."""
        mean = np.clip(mean, 1e-6, 1 - 1e-6)
        drawn = self._acceptance.beta(concentration * mean, concentration * (1 - mean))
        return np.clip(drawn, 1e-12, 1 - 1e-12)

    def jitter(self) -> float:
        """Factor on the time of a step, of mean 1."""
        if not self._sigma:
            return 1.0
        if not self._jitters:
            normal = self._timing.standard_normal(_PIECE >> 4)
            self._jitters = np.exp(self._sigma * normal - self._sigma**2 / 2).tolist()
        return self._jitters.pop()

    def uniform(self) -> float:
        """Uniform in [0, 1), for classes and progress."""
        return float(self._rest.random())
