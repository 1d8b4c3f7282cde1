"""Sessions: any replica can go on with one, and hostile bytes give a fresh one."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner_service.session import MAX_BUCKETS, MAX_BYTES, Session, pack, steps_of, unpack


def test_another_replica_takes_the_hold_as_run() -> None:
    """A session that comes back has its numbers, and its decision's steps count as run."""
    sent = Session(3, {4: (5, 2, 0, 3, 1, 0.25), 9: (1, 1, 0, -1, 0, 1.0)})
    back = unpack(pack(sent, "7-nightjar", 4, 6), "7-nightjar")
    assert (back.previous_gamma, back.numbers, back.ran) == (3, sent.numbers, {4: 6})
    assert back.foreign


def test_of_another_version_only_the_previous_gamma_remains() -> None:
    """Bins of one version say nothing to another."""
    packed = pack(Session(3, {4: (1.0,)}), "7-nightjar", 4, 6)
    assert unpack(packed, "8-fixed") == Session(3)


def test_a_session_keeps_the_buckets_decided_last() -> None:
    """Its size is bounded whatever batch sizes occur."""
    numbers = dict.fromkeys(range(4096), (100000000000000.0 + 0.5,) * 6)
    packed = pack(Session(0, numbers), "v", 1, 1)
    assert len(packed) <= MAX_BYTES
    assert list(unpack(packed, "v").numbers) == list(range(4096 - MAX_BUCKETS, 4096))


HOSTILE = [
    b"",
    b"null",
    b"[1,2",
    b"\xff\x00",
    b"[" * 50_000,
    b'["v",0,1,1,{}]' + b" " * MAX_BYTES,
    *(
        json.dumps(body).encode()
        for body in (
            ["v", 9, 1, 1, 0, []],
            ["v", True, 1, 1, 0, []],
            ["v", 0, -1, 1, 0, []],
            ["v", 0, 1, 2**40, 0, []],
            ["v", 0, 1, 1, -1, []],
            ["v", 0, 1, 1, 2**60, []],
            ["v", 0, 1, 1, 1.5, []],
            ["v", 0, 1, 1, 0, [[1, [float("nan")]]]],
            ["v", 0, 1, 1, 0, [[1, [float("inf")]]]],
            ["v", 0, 1, 1, 0, [[1, ["x"]]]],
            ["v", 0, 1, 1, 0, [[1, [0] * 17]]],
            ["v", 0, 1, 1, 0, [[-1, []]]],
            ["v", 0, 1, 1, 0, [[[], []]]],
            ["v", 0, 1, 1, 0, [[i, []] for i in range(MAX_BUCKETS + 1)]],
            ["v", 0, 1, 1, 0, 7],
            ["v", 0, 1, 1, 0],
            ["v", 3, 4, 6, [[4, [1.0]]]],  # as it was before steps were counted
            {"v": 1},
        )
    ),
]


@pytest.mark.parametrize("data", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_bytes_give_a_fresh_session(data: bytes) -> None:
    """Nothing that comes back raises or reaches a policy unless we could have sent it."""
    assert unpack(data, "v") == Session()


@given(st.binary(max_size=200))
def test_random_bytes_never_raise(data: bytes) -> None:
    """Whatever comes back, there is a session."""
    assert isinstance(unpack(data, "v"), Session)
    assert steps_of(data) >= 0


def test_the_count_of_steps_travels_whatever_the_version() -> None:
    """It belongs to the stream: slices and probes lie by it."""
    packed = pack(Session(3, {4: (1.0,)}), "7-nightjar", 4, 6, 12_345)
    assert steps_of(packed) == 12_345
    for data in HOSTILE:
        assert steps_of(data) >= 0


def test_a_hold_of_none_counts_as_not_run() -> None:
    """During a probe the policy's bin stands still, also for another replica."""
    packed = pack(Session(0, {4: (1.0,)}), "7-nightjar", 4, 0)
    assert unpack(packed, "7-nightjar").ran == {}
