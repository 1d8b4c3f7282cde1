"""Choosing tokens: shared noise, and the sampler that draft and target both call."""

from worker.sampling.sampler import UNUSABLE, sample

__all__ = ["UNUSABLE", "sample"]
