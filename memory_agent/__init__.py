"""The memory agent: turns the idle draft's memory into KV blocks and back."""
