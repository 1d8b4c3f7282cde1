"""What a policy remembers of one worker's stream; it travels in the decision as opaque bytes.

So any replica can go on with a bin. What comes back was out of our hands: bytes that are not
what we sent give a fresh session, never an error.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

from planner_service.context import MAX_BATCH_SIZE, MAX_GAMMA, MAX_SUM

MAX_BYTES = 64 * 1024
MAX_BUCKETS = 256  # most recently decided buckets that a session keeps
MAX_NUMBERS = 16  # a policy may keep per bucket
MAX_HOLD = 2**20

Numbers = tuple[float, ...]


class Session(NamedTuple):
    """State of one stream; the meaning of the numbers is the policy's own."""

    previous_gamma: int = 0
    numbers: Mapping[int, Numbers] = MappingProxyType({})  # by bucket
    ran: Mapping[int, int] = MappingProxyType({})  # steps by bucket since the last select
    foreign: bool = False  # came back from outside: the policy must check its numbers

    def after_steps(self, bucket: int, num_steps: int) -> Session:
        """The session once the worker ran these steps."""
        return self._replace(ran={**self.ran, bucket: self.ran.get(bucket, 0) + num_steps})


def pack(session: Session, version: str, bucket: int, hold_steps: int, num_steps: int = 0) -> bytes:
    """Bytes of a session that goes out with a decision for `bucket`.

    `num_steps` counts the stream's steps so far, whichever version they ran under.
    """
    kept = list(session.numbers.items())[-MAX_BUCKETS:]
    rows = ",".join([_row(at, numbers) for at, numbers in kept])
    head = f"{_quoted(version)},{session.previous_gamma},{bucket},{hold_steps},{num_steps}"
    return f"[{head},[{rows}]]".encode()


@lru_cache(maxsize=256)
def _quoted(text: str) -> str:
    return json.dumps(text)


@lru_cache(maxsize=16_384)
def _row(bucket: int, numbers: Numbers) -> str:
    """Text of one bucket; most of a session stays as it was from one decision to the next."""
    return f"[{bucket},[{','.join(map(str, numbers))}]]"


def unpack(data: bytes, version: str) -> Session:
    """Read a session back.

    Its worker asks because the hold is over, so the decision's steps count as run. Of another
    version only the previous gamma remains.
    """
    try:
        sent_version, previous, bucket, hold, _, rows = _parsed(data)
        if sent_version != version:
            return Session(previous)
        if len(rows) > MAX_BUCKETS:
            return Session()
        numbers = {_whole(at, MAX_BATCH_SIZE): _numbers(values) for at, values in rows}
    except (ValueError, TypeError, RecursionError):
        return Session()
    ran = {bucket: hold} if hold and bucket in numbers else {}
    return Session(previous, numbers, ran, foreign=True)


def steps_of(data: bytes) -> int:
    """Steps of the stream when the session was sent; 0 where the bytes are not ours."""
    try:
        return int(_parsed(data)[4])
    except (ValueError, TypeError, RecursionError):
        return 0


def _parsed(data: bytes) -> list[Any]:
    if not 0 < len(data) <= MAX_BYTES:
        raise ValueError
    head: list[Any] = json.loads(data)
    _, previous, bucket, hold, num_steps, _ = head
    _whole(previous, MAX_GAMMA)
    _whole(bucket, MAX_BATCH_SIZE)
    _whole(hold, MAX_HOLD)
    _whole(num_steps, MAX_SUM)
    return head


def _whole(value: object, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError
    return value


def _numbers(values: object) -> Numbers:
    if not isinstance(values, list) or len(values) > MAX_NUMBERS:
        raise ValueError
    for value in values:
        if type(value) not in (int, float) or not math.isfinite(value) or abs(value) > 1e15:
            raise ValueError
    return tuple(values)
