"""Prompts that begin alike go to one worker, whose prefix cache then holds their beginning.

Stateless: workers are ranked by a hash of the prompt's beginning (rendezvous hashing, Thaler and
Ravishankar 1998), so gateways agree without talking, and a worker that comes or goes moves no
prompts but its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from gateway.routing.facts import RequestFacts, WorkerLoad, within_bound
from gateway.routing.least_loaded import least_loaded

# In bytes. A token id is 4 bytes, and English text has about 4 bytes a token: 64, 256 and 1024
# tokens, which are whole KV blocks of 16, 32 and 64 tokens.
KEY_BYTES = (256, 1024, 4096)


class PrefixAffinity:
    """The worker of the prompt's beginning, while that has no more than its bounded share.

    The shortest key comes first: it is the same for all that share a system prompt and for
    every turn of a conversation. Where its worker is full, longer keys decide, so that
    what spills over stays together too, by what it shares beyond the shortest key.

    Args:
        factor: Most requests of a worker, over its share of all; at least 1.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def choose(self, request: RequestFacts, workers: Sequence[WorkerLoad]) -> WorkerLoad:
        """The first worker with room by the prompt's keys; least loaded if it is too short."""
        keys = [
            hashlib.blake2b(request.beginning[:length], digest_size=16).digest()
            for length in KEY_BYTES
            if length <= len(request.beginning)
        ]
        if not keys:
            return least_loaded(workers)
        open_to_one_more = within_bound(workers, self._factor)
        left = list(workers)  # without those that shorter keys have found full
        for key in keys:
            home = _highest(key, left)
            if home in open_to_one_more:
                return home
            left.remove(home)
        return _highest(keys[-1], open_to_one_more)


def _highest(key: bytes, workers: Sequence[WorkerLoad]) -> WorkerLoad:
    """The worker whose hash with `key` is the highest."""
    return max(workers, key=lambda w: hashlib.blake2b(w.address.encode(), key=key).digest())
