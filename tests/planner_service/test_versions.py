"""Versions: the newest whose scope holds a worker decides; rolling back uncovers what it hid."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightjar.errors import NotPossibleNow
from planner_service.versions import (
    EVERYONE,
    MAX_VERSIONS,
    Book,
    Floor,
    Scope,
    from_json,
    to_json,
)

P1, W1 = Scope(profile_key="p1"), Scope(worker_ids=("w1",))
CANARY = Scope(canary_share=0.25)


def book(*scopes: Scope) -> Book:
    """Versions for these scopes, in this order, of policy `fixed`."""
    made = Book()
    for scope in scopes:
        made = made.activate("fixed", {"gamma": "1"}, scope, 0, "operator")
    return made


def deciding(of: Book, profile_key: str = "p2", worker_id: str = "w2") -> str:
    """Id of the version that decides."""
    return next((v.id for v in of.deciding(profile_key, worker_id)), "")


def test_the_newest_version_whose_scope_holds_the_worker_decides() -> None:
    """A later version for everyone hides an earlier one for some."""
    made = book(EVERYONE, P1, W1)
    assert (deciding(made), deciding(made, "p1"), deciding(made, "p1", "w1")) == (
        "1-fixed",
        "2-fixed",
        "3-fixed",
    )
    assert [made.is_active(v) for v in made.versions] == [True, True, True]
    made = made.activate("off", {}, EVERYONE, 0, "operator")
    assert deciding(made, "p1", "w1") == "4-off"
    assert [made.is_active(v) for v in made.versions] == [False, False, False, True]


def test_rollback_uncovers_the_version_before() -> None:
    """Twice goes back twice, and the first version cannot be rolled back."""
    made = book(EVERYONE, EVERYONE, EVERYONE)
    made, restored = made.rollback(EVERYONE, 9)
    assert (restored.id, restored.reason, restored.activated_at_ms) == ("2-fixed", "rollback", 9)
    made, restored = made.rollback(EVERYONE, 9)
    assert restored.id == deciding(made) == "1-fixed"
    with pytest.raises(NotPossibleNow, match="no predecessor"):
        made.rollback(EVERYONE, 9)
    assert made.activate("off", {}, EVERYONE, 0, "operator").versions[-1].id == "4-off"


def test_rollback_of_a_scope_falls_to_the_wider_one() -> None:
    """Only a version of exactly this scope is taken away."""
    made, restored = book(EVERYONE, P1).rollback(P1, 9)
    assert restored.id == deciding(made, "p1") == "1-fixed"
    with pytest.raises(NotPossibleNow, match="exactly this scope"):
        made.rollback(P1, 9)
    with pytest.raises(NotPossibleNow, match="no predecessor"):
        book(P1).rollback(P1, 9)


def test_withdrawing_a_failed_version_can_be_repeated() -> None:
    """Each replica that sees the fault withdraws it; the second time changes nothing."""
    made = book(EVERYONE, EVERYONE).withdraw("2-fixed", "failed", 7)
    assert deciding(made) == "1-fixed"
    assert made.withdraw("2-fixed", "failed", 7) is made
    assert deciding(made.withdraw("1-fixed", "failed", 7)) == ""


def test_the_history_is_bounded_and_keeps_what_decides() -> None:
    """The version of a scope survives any number of later ones for other scopes."""
    made = book(P1, *([EVERYONE] * 5), *([W1] * 3 * MAX_VERSIONS))
    assert len(made.versions) == MAX_VERSIONS
    assert deciding(made) == "6-fixed"
    assert made.next_number == 6 + 3 * MAX_VERSIONS + 1


@given(st.lists(st.sampled_from([EVERYONE, P1, W1, CANARY]), max_size=6), st.booleans())
def test_text_reads_back_as_the_same_book(scopes: list[Scope], withdrawn: bool) -> None:
    """A book survives the store."""
    made = book(*scopes).marked("token")
    made = made.activate("off", {}, CANARY, 5, "operator", floor=Floor(min_net_benefit=0, for_s=2))
    if withdrawn:
        made = made.withdraw("1-fixed", "failed", 7)
    assert from_json(to_json(made)) == made


@pytest.mark.parametrize(
    "spoil",
    [
        lambda body: body.pop("versions"),
        lambda body: body["versions"].append(7),
        lambda body: body["versions"].append(body["versions"][0]),
        lambda body: body["versions"][0].update(number="1"),
        lambda body: body["versions"][0].update(parameters={"gamma": 1}),
        lambda body: body["versions"][0].update(reason="whim"),
        lambda body: body["versions"][0].update(scope=None),
        lambda body: body["versions"][0].update(live=1),
        lambda body: body["versions"][0].update(withdrawn_because=7),
        lambda body: body["versions"][0].update(withdrawn_at_ms="7"),
        lambda body: body["versions"][0].update(floor=7),
        lambda body: body["versions"][0].update(floor={"min_net_benefit": 0.0}),
        lambda body: body["versions"][0].update(floor={"min_net_benefit": 0.0, "for_s": -1}),
        lambda body: body["versions"][0]["scope"].update(canary_share=1.5),
        lambda body: body["versions"][0]["scope"].update(canary_share=True),
        lambda body: body["versions"][0]["scope"].update(canary_share=float("nan")),
        lambda body: body.update(next_number=1),
        lambda body: body.update(changes="no"),
    ],
    ids=range(18),
)
def test_text_that_is_no_book_is_refused(spoil: Any) -> None:
    """What another program wrote there raises ValueError and nothing else."""
    body = json.loads(to_json(book(EVERYONE)))
    spoil(body)
    with pytest.raises(ValueError, match="not a book"):
        from_json(json.dumps(body))


@pytest.mark.parametrize("text", ["", "[]", "null", "{", "[" * 50_000])
def test_text_that_is_no_json_object_is_refused(text: str) -> None:
    """Nor does any other text raise anything else."""
    with pytest.raises(ValueError, match="not a book"):
        from_json(text)


def test_a_book_from_before_canaries_and_floors_is_read() -> None:
    """What it does not hold has its default."""
    body = json.loads(to_json(book(EVERYONE, P1)))
    for row in body["versions"]:
        for name in ("floor", "withdrawn_because", "withdrawn_at_ms"):
            del row[name]
        del row["scope"]["canary_share"]
    assert from_json(json.dumps(body)) == book(EVERYONE, P1)


def test_a_canary_hides_nothing_but_older_canaries() -> None:
    """The whole version stays below it, and a worker has one canary at a time."""
    made = book(EVERYONE, CANARY)
    assert [v.id for v in made.deciding("p2", "w2")] == ["2-fixed", "1-fixed"]
    assert [made.is_active(v) for v in made.versions] == [True, True]
    made = made.activate("off", {}, Scope(canary_share=0.5), 0, "operator")
    assert [v.id for v in made.deciding("p2", "w2")] == ["3-off", "1-fixed"]
    assert [made.is_active(v) for v in made.versions] == [True, False, True]
    of_one = made.activate("off", {}, Scope(worker_ids=("w1",), canary_share=0.1), 0, "operator")
    assert [v.id for v in of_one.deciding("p2", "w1")] == ["4-off", "1-fixed"]
    assert [v.id for v in of_one.deciding("p2", "w2")] == ["3-off", "1-fixed"]
    whole = made.activate("nightjar", {}, EVERYONE, 0, "operator")
    assert [whole.is_active(v) for v in whole.versions] == [False, False, False, True]


def test_rollback_ends_the_canary_first() -> None:
    """Without a share it takes the newest of these workers; with one, exactly that canary."""
    made = book(EVERYONE, CANARY)
    back, restored = made.rollback(EVERYONE, 9)
    assert [v.live for v in back.versions] == [True, False]
    assert (restored.id, restored.reason) == ("1-fixed", "operator")  # it never stopped
    gone = back.versions[1]
    assert (gone.withdrawn_because, gone.withdrawn_at_ms) == ("rolled back by an operator", 9)
    two = book(EVERYONE, CANARY, EVERYONE)
    back, restored = two.rollback(CANARY, 9)
    assert ([v.live for v in back.versions], restored.id) == ([True, False, True], "3-fixed")
    with pytest.raises(NotPossibleNow, match="exactly this scope"):
        two.rollback(Scope(canary_share=0.5), 9)
    with pytest.raises(NotPossibleNow, match="no predecessor"):
        book(CANARY).rollback(EVERYONE, 9)


def test_a_withdrawn_version_says_why_and_when() -> None:
    """The history keeps both, and a reason of any length fits."""
    made = book(EVERYONE, EVERYONE).withdraw("2-fixed", "x" * 10_000, 77)
    gone = made.versions[1]
    assert (len(gone.withdrawn_because), gone.withdrawn_at_ms, gone.live) == (512, 77, False)
    assert from_json(to_json(made)) == made
