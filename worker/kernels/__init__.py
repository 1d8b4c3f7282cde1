"""Triton kernels, each beside its torch reference; they know tensors, and nothing of engines."""
