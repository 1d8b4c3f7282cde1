"""Seeds of an answer's choices, derived alike by workers and by gateways that resume them."""

from __future__ import annotations

import hashlib


def choice_seed(seed: int, index: int) -> int:
    """Seed of choice `index` of a request with `seed`, both unsigned; choice 0 has the seed itself.

    A choice is the answer to the same request with n = 1 and this seed.
    """
    if index == 0:
        return seed
    digest = hashlib.sha256(f"nightjar choice {index} of {seed}".encode()).digest()
    return int.from_bytes(digest[:8], "little")
