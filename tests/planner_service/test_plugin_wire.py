"""What crosses to plug-ins and back: nothing is lost one way, nothing is trusted the other way."""

from __future__ import annotations

import json
import math
import random
import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightjar.buckets import BucketGrid
from planner_service.context import Context, Outcome
from planner_service.own_sums import OwnSums
from planner_service.plugins.wire import (
    MAX_MESSAGE_BYTES,
    Closed,
    Link,
    Nonsense,
    read_answer,
    read_outcome,
    read_question,
    read_update,
    sent_answer,
    sent_session,
    sent_stats,
    sent_update,
)
from planner_service.policies.policy import Choice
from planner_service.session import Session
from planner_service.sums import ArmSums, Stats, Totals
from planner_service.switching import COST

STATS = Stats(
    {size: {0: ArmSums(1, 2.5, 3, 4, 5, 6), 5: ArmSums(size)} for size in range(1, 100)},
    Totals(7, 6, 5, 4, 3, 2),
    (5.0, 3.0),
    (4.0, 1.0),
    {
        "mine/a": OwnSums((1.5, 2.0), 500.0, 9.0),
        "mine/b": OwnSums((1.0,)),
        "other/a": OwnSums((1.0,)),
        COST: OwnSums((1.0,)),
    },
    {"mine/z": (1.0,), "minefield/z": (2.0,)},
    (2.0,),
    (1.0,),
    3.0,
)
CHOICE = Choice(2, 3, 16, True, 0.25, {1: (2, 3), 7: (0, 3)}, BucketGrid((1, 4), (100,)), 1)
SESSION = Session(2, {3: (1.0, 2.5), 4: ()}, {3: 7}, foreign=True)


def over_json(value: Any) -> Any:
    """As it arrives."""
    return json.loads(json.dumps(value))


def test_a_question_arrives_as_it_was_asked() -> None:
    """Context, session and randomness whole; of the sums what a plug-in may see."""
    context = Context(50, 7, cpu_utilization=0.5)
    message = {
        "context": context,
        "stats": sent_stats(STATS, 50, "mine"),
        "session": sent_session(SESSION),
        "seed": 12,
    }
    got, stats, session, rng = read_question(over_json(message))
    assert (got, session) == (context, SESSION)
    assert rng.random() == random.Random(12).random()
    assert list(stats.buckets) == list(range(46, 55))
    assert all(stats.buckets[size] == STATS.buckets[size] for size in stats.buckets)
    assert set(stats.own) == {"mine/a", "mine/b", COST}
    assert all(stats.own[name] == STATS.own[name] for name in stats.own)
    assert stats.latest == {"mine/z": (1.0,)}
    rest = ("totals", "reached", "accepted", "prior_reached", "prior_accepted", "num_prior_steps")
    assert all(getattr(stats, name) == getattr(STATS, name) for name in rest)


def test_an_answer_arrives_as_it_was_given() -> None:
    """A choice with everything in it, a session, an outcome and an update."""
    choice, session = read_answer(over_json(sent_answer(CHOICE, SESSION)))
    assert choice == CHOICE
    assert session == Session(SESSION.previous_gamma, SESSION.numbers)
    outcome = Outcome(3, reached=(1, 2), accepted=(1, 1), propensity=0.5)
    assert read_outcome(over_json(outcome)) == outcome
    own, latest = read_update(over_json(sent_update(STATS, "mine")), "mine")
    assert own == {name: STATS.own[name] for name in ("mine/a", "mine/b")}
    assert latest == {"mine/z": (1.0,)}


def spoilt(path: tuple[int, ...], value: Any) -> Any:
    """A good answer with one thing in it replaced."""
    answer = over_json(sent_answer(CHOICE, SESSION))
    inner = answer
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    return answer


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, "answer: not a list of 2"),
        ([[], []], "choice: not a list of 8"),
        (spoilt((0, 3), 1), "explored 1 is neither"),
        (spoilt((0, 4), "1"), "propensity, '1', is no number"),
        (spoilt((0, 4), math.nan), "propensity, nan, is no number"),
        (spoilt((0, 5), [[-5, 1, 1]]), "a bucket, -5, is not"),
        (spoilt((0, 5), [[True, 1, 1]]), "a bucket, True, is not"),
        (spoilt((0, 5), [[2**31, 1, 1]]), "a bucket, 2147483648, is not"),
        (spoilt((0, 5), [[1, 1]]), "a row of the table"),
        (spoilt((0, 5), [[i, 1, 1] for i in range(9000)]), "table: not a list of at most"),
        (spoilt((0, 6), [[3, 1], []]), "the grid's edges do not ascend"),
        (spoilt((0, 6), [[1.5], []]), "an edge of the grid, 1.5, is not"),
        (spoilt((1, 0), 9), "the session's previous gamma, 9, is not"),
        (spoilt((1, 1), [[1, [math.inf]]]), "a number of the session, inf, is no number"),
        (spoilt((1, 1), [[1, [1e16]]]), "lies beyond 1e15"),
        (spoilt((1, 1), [[1, ["x"]]]), "a number of the session, 'x', is no number"),
        (spoilt((1, 1), [[1, [0] * 17]]), "numbers of the session: not a list of at most 16"),
        (spoilt((1, 1), [[-1, []]]), "a key of the session, -1, is not"),
        (spoilt((1, 1), [[i, []] for i in range(300)]), "session: not a list of at most 256"),
    ],
)
def test_nonsense_is_refused_in_words(answer: Any, words: str) -> None:
    """Whatever could break a message to a worker, or a session, never gets there."""
    with pytest.raises(Nonsense, match=words.replace("(", r"\(")):
        read_answer(answer)


@pytest.mark.parametrize(
    ("update", "words"),
    [
        ([], "update: not a list of 2"),
        ([[["off/x", [1.0], math.inf, 0]], []], "cannot be named 'off/x'"),
        ([[["mine/x y", [1.0], math.inf, 0]], []], "cannot be named"),
        ([[["mine/" + "x" * 99, [1.0], math.inf, 0]], []], "cannot be named"),
        ([[["mine/x", [math.nan], math.inf, 0]], []], "a value of own sums, nan"),
        ([[["mine/x", [], math.inf, 0]], []], "without a value"),
        ([[["mine/x", [1.0] * 257, math.inf, 0]], []], "own sums: not a list of at most 256"),
        ([[["mine/x", [1.0], 0, 0]], []], "a half-life above 0"),
        ([[["mine/x", [1.0], 5, -1]], []], "a half-life above 0"),
        ([[], [["off/z", [1.0]]]], "cannot be named 'off/z'"),
        ([[[f"mine/{i}", [1.0], 5, 0] for i in range(65)], []], "at most 64"),
    ],
)
def test_an_update_reaches_only_its_own_sums(update: Any, words: str) -> None:
    """Names, values, half-lives and how many there are."""
    with pytest.raises(Nonsense, match=words):
        read_update(update, "mine")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=30,
)


@given(JSON)
def test_any_json_is_an_answer_or_nonsense(sent: Any) -> None:
    """Nothing else is raised."""
    for read in (read_answer, lambda value: read_update(value, "mine")):
        try:
            read(sent)
        except Nonsense:
            continue


def test_a_link_keeps_what_came_of_a_message_that_is_late() -> None:
    """A deadline in mid-message loses nothing; an end or rubbish is said."""
    ours, theirs = socket.socketpair()
    link = Link(ours)
    with theirs:
        body = b'{"a":[1,2]}'
        whole = len(body).to_bytes(4) + body
        for part in (whole[:2], whole[2:9]):
            theirs.sendall(part)
            with pytest.raises(TimeoutError):
                link.receive(0.01)
        theirs.sendall(whole[9:] + whole)
        assert [link.receive(1), link.receive(1)] == [{"a": [1, 2]}] * 2
        with pytest.raises(Nonsense, match="at most"):
            link.send("x" * (MAX_MESSAGE_BYTES + 1))
        theirs.sendall((3).to_bytes(4) + b"{{{")
        with pytest.raises(Closed):
            link.receive(1)
        theirs.sendall((2**31).to_bytes(4))
        with pytest.raises(Closed):
            link.receive(1)
    with pytest.raises(Closed):
        Link(ours).receive(1)
    link.close()
