"""The step on a GPU: static buffers, one graph per bucket of tokens, and what launches them."""
