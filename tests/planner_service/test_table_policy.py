"""Policy `table`: presets as documented, custom ranges, and texts that are refused."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightjar.errors import InvalidRequest
from planner_service.context import Context
from planner_service.policies import BUILT_IN
from planner_service.policies.policy import Choice, Policy, check_choice, check_table
from planner_service.policies.table import PRESETS, Range, parse
from planner_service.session import Session, pack, unpack
from planner_service.sums import NOTHING
from planner_service.trial import try_out


def made(**parameters: str) -> Policy:
    """The policy with some parameters."""
    return BUILT_IN["table"].build(parameters)[0]


def chosen(policy: Policy, batch_size: int, **fields: Any) -> Choice:
    """The choice for a batch size."""
    at = Context(batch_size, **{"max_batch_size": 600, **fields})
    return policy.select(at, NOTHING, Session(), random.Random(0))[0]


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        # [[1, 64, 3], [65, 128, 1], [129, 512, 0]]
        ("vllm", {1: 3, 64: 3, 65: 1, 128: 1, 129: 0, 512: 0, 513: 0}),
        # the middle candidate of {1, 3, 5, 7}, {0, 1, 3}, {0, 1}, {0} from 1, 8, 32, 64 on
        ("sglang", {1: 5, 7: 5, 8: 1, 31: 1, 32: 1, 63: 1, 64: 0, 600: 0}),
        # {4: 4, 8: 2, 32: 1}, each up to that many rows
        ("tensorrt_llm", {1: 4, 4: 4, 5: 2, 8: 2, 9: 1, 32: 1, 33: 0}),
        ("tensorrt_llm_ngram", {1: 5, 4: 5, 5: 3, 32: 3, 33: 0}),
    ],
)
def test_presets_are_the_shipped_tables(preset: str, expected: dict[int, int]) -> None:
    """Each preset answers as its engine's table at the ends of all ranges."""
    policy = made(preset=preset)
    assert {size: chosen(policy, size).gamma for size in expected} == expected


def test_every_preset_is_tested_and_well_formed() -> None:
    """All presets parse, and pass the trial of a policy before it is activated."""
    for preset, text in PRESETS.items():
        assert parse(text)[0].first == 1
        assert not try_out(made(preset=preset), [NOTHING])


def test_the_table_holds_every_batch_size_so_that_workers_need_not_ask() -> None:
    """One answer tells all batch sizes, cut to what the worker ever runs, and is made once."""
    policy = made(preset="custom", ranges="1-2:5, 3-8:2")
    choice = chosen(policy, 1, max_gamma=4, feasible_max_gamma=3, max_batch_size=10)
    assert choice.table == {
        **dict.fromkeys((1, 2), (4, 4)),
        **dict.fromkeys(range(3, 9), (2, 2)),
    } | {
        9: (0, 0),
        10: (0, 0),
    }
    assert (choice.gamma, choice.exploit_gamma) == (3, 4)
    again = chosen(policy, 7, max_gamma=4, max_batch_size=10)
    assert again.gamma == 2
    assert again.table is choice.table


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("1-64:3,66-128:1", "leaves a gap"),
        ("1-64:3,64-128:1", "overlaps"),
        ("1-64:3,1-64:3", "overlaps"),
        ("2-64:3", "does not start at batch size 1"),
        ("0-64:3", "does not start at batch size 1"),
        ("1-64:3,65-60:1", "does not end in"),
        ("1-4097:3", "does not end in"),
        ("1-64:9", "exceeds 8"),
        ("1-64:3,", "not of the form"),
        ("1-64:-1", "not of the form"),
        ("1-64:1.5", "not of the form"),
        ("[[1,64,3]]", "not of the form"),
        ("1-9999999999:3", "not of the form"),
        ("\N{FULLWIDTH DIGIT ONE}-64:3", "not of the form"),
        ("1-64:3\n", "not of the form"),
        ("1-1:0," * 200, "at most 1024 characters"),
    ],
)
def test_bad_ranges_are_refused_naming_the_field(text: str, problem: str) -> None:
    """Gaps, overlaps, limits and form are refused in words, with the parameter's name."""
    with pytest.raises(InvalidRequest, match=problem) as refused:
        made(preset="custom", ranges=text)
    assert "parameters.ranges" in str(refused.value)


def test_ranges_and_preset_must_agree() -> None:
    """A table that would be ignored is refused, and so is a custom one that is missing."""
    with pytest.raises(InvalidRequest, match="only where preset is custom"):
        made(preset="sglang", ranges="1-64:3")
    with pytest.raises(InvalidRequest, match="only where preset is custom"):
        made(ranges="1-64:3")
    with pytest.raises(InvalidRequest, match="must be given"):
        made(preset="custom")
    with pytest.raises(InvalidRequest, match=r"parameters\.preset"):
        made(preset="tgi")


def test_parameters_filled_in_build_the_same_policy() -> None:
    """What a version stores can be built again."""
    for given_ in ({}, {"preset": "custom", "ranges": "1-8:2"}):
        policy, parameters = BUILT_IN["table"].build(given_)
        again = BUILT_IN["table"].build(parameters)[0]
        assert [chosen(again, b).gamma for b in (1, 8, 9)] == [
            chosen(policy, b).gamma for b in (1, 8, 9)
        ]


@given(
    gammas=st.lists(st.integers(0, 8), min_size=1, max_size=12),
    widths=st.lists(st.integers(1, 200), min_size=12, max_size=12),
    batch_size=st.integers(0, 2500),
    feasible=st.integers(0, 8),
    max_gamma=st.integers(0, 8),
    numbers=st.lists(st.floats(-9, 9), max_size=16),
)
def test_answers_are_feasible_whatever_the_session(
    gammas: list[int],
    widths: list[int],
    batch_size: int,
    feasible: int,
    max_gamma: int,
    numbers: list[float],
) -> None:
    """Any table answers within limits, and as its ranges say."""
    ranges, first = [], 1
    for gamma, width in zip(gammas, widths, strict=False):
        ranges.append(Range(first, first + width - 1, gamma))
        first += width
    text = ",".join(f"{r.first}-{r.last}:{r.gamma}" for r in ranges)
    assert parse(text) == tuple(ranges)
    policy = made(preset="custom", ranges=text)
    at = Context(batch_size, feasible_max_gamma=feasible, max_gamma=max_gamma, max_batch_size=2500)
    foreign = unpack(pack(Session(1, {1: tuple(numbers)}), "v", 1, 1), "v")
    choice, _ = policy.select(at, NOTHING, foreign, random.Random(0))
    assert not check_choice(choice, at)
    assert not check_table(choice.table, max_gamma)
    wanted = next((r.gamma for r in ranges if r.first <= batch_size <= r.last), 0)
    assert choice.gamma == min(wanted, feasible, max_gamma)
