"""Triton kernels, each beside its torch reference; they know tensors, and nothing of engines."""

import os

# Fused multiply-adds are part of the arithmetic: a later default must not change it.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
