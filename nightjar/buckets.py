"""How contexts are grouped: worker and planner must agree, so the rule stands once."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass


@dataclass(frozen=True)
class BucketGrid:
    """Ascending edges over batch size and over the batch's KV tokens."""

    batch_size_edges: tuple[int, ...]
    kv_token_edges: tuple[int, ...] = ()

    def bucket(self, batch_size: int, num_kv_tokens: int) -> int:
        """Bucket of a context, in [0, num_buckets)."""
        row = bisect_right(self.batch_size_edges, batch_size)
        return row * (len(self.kv_token_edges) + 1) + bisect_right(
            self.kv_token_edges, num_kv_tokens
        )

    @property
    def num_buckets(self) -> int:
        """Buckets of the grid."""
        return (len(self.batch_size_edges) + 1) * (len(self.kv_token_edges) + 1)
