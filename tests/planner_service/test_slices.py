"""Slices and probes: shares hold, every replica agrees, and nothing depends on chance."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner_service.slices import (
    PROBE_STEPS,
    SLICE_STEPS,
    Probes,
    has_slice,
    steps_left_of_slice,
)


@pytest.mark.parametrize("share", [0.05, 0.25, 0.9])
def test_a_canary_gets_its_share_of_the_slices(share: float) -> None:
    """Over 2000 slices within 3.5 standard deviations, and whole slices only."""
    has = [
        has_slice(share, f"worker-{w}", SLICE_STEPS * i, 7) for w in range(20) for i in range(100)
    ]
    assert sum(has) / 2000 == pytest.approx(share, abs=3.5 * (share * (1 - share) / 2000) ** 0.5)
    for step in range(0, SLICE_STEPS, 13):
        assert has_slice(share, "worker-0", step, 7) == has[0]


def test_slices_of_two_versions_and_of_two_workers_are_independent() -> None:
    """Of two canaries of one half each, a quarter of the slices is both's."""
    both = sum(
        has_slice(0.5, "w", i * SLICE_STEPS, 1) and has_slice(0.5, "w", i * SLICE_STEPS, 2)
        for i in range(2000)
    )
    assert 420 < both < 580
    two = sum(
        has_slice(0.5, "w", i * SLICE_STEPS, 1) and has_slice(0.5, "v", i * SLICE_STEPS, 1)
        for i in range(2000)
    )
    assert 420 < two < 580


@given(st.integers(0, 10**15))
def test_a_slice_ends_where_the_next_begins(num_steps: int) -> None:
    """The steps left lead to the first step of the next slice."""
    left = steps_left_of_slice(num_steps)
    assert 1 <= left <= SLICE_STEPS
    assert (num_steps + left) % SLICE_STEPS == 0


@pytest.mark.parametrize("share", [0.01, 0.1, 0.3, 0.5])
def test_probes_get_their_share_of_the_steps(share: float) -> None:
    """Walked step by step: runs of 8, one a frame, within 5 % of the share."""
    probes = Probes(share)
    num = probes.frame_steps * 50
    at = [probes.at("worker", step)[0] for step in range(num)]
    assert sum(at) == 50 * PROBE_STEPS
    assert sum(at) / num == pytest.approx(share, rel=0.05)


@given(st.floats(0.001, 0.5), st.text(max_size=9), st.integers(0, 10**9))
def test_a_probe_changes_when_it_says(share: float, worker_id: str, num_steps: int) -> None:
    """Until then all steps are alike, so that a hold may last that long."""
    probes = Probes(share)
    now, left = probes.at(worker_id, num_steps)
    assert left >= 1
    assert probes.at(worker_id, num_steps + left - 1) == (now, 1)
    if now:
        assert left <= PROBE_STEPS
