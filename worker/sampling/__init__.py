"""Choosing tokens: shared noise, and the sampler that draft and target both call."""

from worker.sampling.sampler import UNUSABLE, log_probabilities, sample

__all__ = ["UNUSABLE", "log_probabilities", "sample"]
