"""Parts of `benchmarks/paper.py`."""
