"""Elastic memory against the real block manager: every path, over real bytes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from elastic_world import BASE, BLOCK, EXTRA, World

from worker.engine.elastic import RELOAD_BACKOFF_S, SETTLE_S, ElasticMemory
from worker.engine.owners import Owner
from worker.messages import (
    AgentLink,
    Grant,
    GrantAnswer,
    RequestRefused,
    ToFront,
    TransitionDone,
    TransitionRequest,
)


def only_grant(messages: list[ToFront]) -> Grant:
    """The single grant among the messages."""
    (grant,) = messages
    assert isinstance(grant, Grant)
    return grant


def only_refusal(messages: list[ToFront]) -> RequestRefused:
    """The single refusal among the messages."""
    (refusal,) = messages
    assert isinstance(refusal, RequestRefused)
    return refusal


@pytest.fixture
def world() -> World:
    """A resident draft with an agent attached."""
    world = World()
    world.tell(AgentLink(connected=True))
    return world


@pytest.fixture
def expanded(world: World) -> World:
    """An expanded pool: a long row with full and half-filled tail blocks, a short one beside it.

    The head was full of rows when the others were admitted; those have finished.
    """
    world.tell(TransitionRequest(request_id=1, kind="expand"))
    world.turn()
    filler = world.start(1, BASE * BLOCK)
    assert filler is not None
    assert world.start(2, 3 * BLOCK + 1) is not None
    assert world.start(3, BLOCK) is not None
    world.finish(filler)
    assert len(world.blocks.live_tail_blocks()) == 5
    return world


def contract(world: World, request_id: int = 2) -> list[ToFront]:
    """The agent asks to contract."""
    return world.tell(TransitionRequest(request_id=request_id, kind="contract"))


def test_expansion_waits_for_the_last_step_that_used_the_draft(world: World) -> None:
    """Gamma is clamped at once; the tail is handed out only with nothing in flight."""
    assert (world.elastic.residency, world.elastic.draft_usable) == ("resident", True)
    assert world.tell(TransitionRequest(request_id=7, kind="expand")) == []
    assert (world.elastic.residency, world.elastic.draft_usable) == ("offloading", False)
    assert (world.blocks.num_total, world.draft_calls) == (BASE, [])
    epoch = world.blocks.draft.epoch
    assert world.turn() == [TransitionDone(request_id=7, residency="offloaded")]
    assert (world.blocks.num_total, world.draft_calls) == (BASE + EXTRA, ["drop"])
    assert world.blocks.draft.epoch == epoch + 1
    assert world.elastic.launch_allowed
    assert world.elastic.counters.num_expansions == 1


def test_expansion_needs_no_agent(world: World) -> None:
    """An agent that dies after it asked changes nothing."""
    world.tell(TransitionRequest(request_id=7, kind="expand"))
    world.tell(AgentLink(connected=False))
    assert world.turn() == [TransitionDone(request_id=7, residency="offloaded")]
    assert world.start(1, (BASE + EXTRA) * BLOCK) is not None


def test_a_whole_contraction(expanded: World) -> None:
    """Full blocks by the agent while steps run, the rest in a pause, one rename, then the load."""
    world, elastic = expanded, expanded.elastic
    row = world.rows[0]
    half_filled = row.table[-1]
    copy = only_grant(contract(world))
    assert elastic.residency == "reloading"
    assert elastic.launch_allowed
    assert half_filled not in copy.source_ids
    assert len(copy.source_ids) == 4
    assert set(copy.source_ids) <= set(world.tail)
    assert all(world.blocks.owner(b) is Owner.GRANTED for b in copy.destination_ids)
    assert elastic.counters.num_granted_blocks == 5
    assert world.write(row, 2)
    assert world.turn() == []
    assert world.answer(copy) == []
    assert not elastic.launch_allowed
    before = list(row.table)
    assert world.num_copied == 0
    load = only_grant(world.turn())
    assert world.num_copied == 1
    assert (load.kind, load.source_ids, load.destination_ids) == ("load", [], [])
    assert world.num_renames == 1
    assert elastic.launch_allowed
    assert max(row.table) < BASE <= max(before)
    assert elastic.counters.num_granted_blocks == EXTRA
    assert world.write(row, 2)
    assert not elastic.draft_usable
    assert world.answer(load) == []
    assert world.turn() == [TransitionDone(request_id=2, residency="resident")]
    assert elastic.draft_usable
    assert world.draft_calls == ["drop", "restore"]
    assert world.blocks.num_total == BASE
    assert elastic.counters.num_contractions == 1
    assert elastic.counters.num_granted_blocks == 0


def test_a_prefix_is_found_again_after_the_rename(expanded: World) -> None:
    """Hashes move with their blocks."""
    world = expanded
    copy = only_grant(contract(world))
    world.answer(copy)
    world.answer(only_grant(world.turn()))
    world.turn()
    twin = world.start(2, 3 * BLOCK + 1)
    assert twin is not None
    assert twin.table[:3] == world.rows[0].table[:3]
    world.check()


def test_an_empty_tail_needs_no_copy(world: World) -> None:
    """With no live tail block the load is granted at once."""
    world.tell(TransitionRequest(request_id=1, kind="expand"))
    world.turn()
    assert contract(world) == []
    assert only_grant(world.turn()).kind == "load"


def test_rows_that_end_while_they_are_copied(expanded: World) -> None:
    """Their destinations come back at the rename, and nothing waits for them."""
    world = expanded
    copy = only_grant(contract(world))
    for row in list(world.rows):
        world.finish(row)
    world.check()
    world.answer(copy)
    assert only_grant(world.turn()).kind == "load"
    assert world.blocks.num_free == BASE
    world.check()


def test_a_row_that_ends_while_steps_pause(expanded: World) -> None:
    """Its blocks come back, and what it was filling is not copied."""
    world = expanded
    world.answer(only_grant(contract(world)))
    assert not world.elastic.launch_allowed
    world.finish(world.rows[0])
    assert only_grant(world.turn()).kind == "load"
    assert world.num_copied == 0
    world.check()


def test_too_few_free_head_blocks(world: World) -> None:
    """A contraction that does not fit is refused and leaves the tail open."""
    world.tell(TransitionRequest(request_id=1, kind="expand"))
    world.turn()
    assert world.start(1, (BASE + 2) * BLOCK) is not None
    assert "too few free head blocks" in only_refusal(contract(world)).reason
    assert (world.elastic.residency, world.elastic.launch_allowed) == ("offloaded", True)
    assert world.blocks.num_free == EXTRA - 2
    assert world.start(2, BLOCK) is not None


def test_a_failed_copy_frees_the_destinations_and_nothing_else(expanded: World) -> None:
    """Not ok before the rename: tables as they were, tail open, steps allowed, one refusal."""
    world = expanded
    tables = [list(row.table) for row in world.rows]
    num_free = world.blocks.num_free
    grant = only_grant(contract(world))
    messages = world.answer(grant, ok=False)
    assert only_refusal(messages) == RequestRefused(request_id=2, reason="broken")
    assert (world.elastic.residency, world.elastic.launch_allowed) == ("offloaded", True)
    assert [row.table for row in world.rows] == tables
    assert world.blocks.num_free == num_free
    assert world.num_renames == 0
    assert only_grant(contract(world, 3)).kind == "copy"


def test_a_death_while_copying(expanded: World) -> None:
    """The grant ends a second after the stream; destinations are quarantined until then."""
    world = expanded
    grant = only_grant(contract(world))
    world.tell(AgentLink(connected=False))
    world.perform(grant, 0, 1)
    world.now += SETTLE_S - 0.01
    assert world.turn() == []
    assert world.elastic.counters.num_granted_blocks == 5
    assert world.elastic.launch_allowed
    world.now += 0.02
    assert only_refusal(world.turn()).reason == "the agent is gone"
    assert world.elastic.launch_allowed
    assert world.elastic.counters.num_granted_blocks == 0
    assert world.tell(GrantAnswer(grant_id=grant.grant_id, ok=True)) == []


def test_a_death_before_the_rename(expanded: World) -> None:
    """With no grant open there is nothing to wait for; nobody could load the draft."""
    world = expanded
    copy = only_grant(contract(world))
    world.answer(copy)
    world.tell(AgentLink(connected=False))
    assert only_refusal(world.turn()).reason == "the agent is gone"
    assert world.elastic.launch_allowed


def test_a_new_agent_does_not_end_the_settling_early(expanded: World) -> None:
    """A reconnect within the second waits out the second all the same."""
    world = expanded
    grant = only_grant(contract(world))
    world.tell(AgentLink(connected=False))
    world.tell(AgentLink(connected=True))
    world.perform(grant)
    assert world.turn() == []
    world.now += SETTLE_S
    assert only_refusal(world.turn()).reason == "the agent is gone"
    assert only_grant(contract(world, 3)).kind == "copy"


def test_a_lost_agent_that_lives_keeps_its_destinations(expanded: World) -> None:
    """Stream lost but process stopped: steps and tail go on, the destinations stay granted."""
    world = expanded
    grant = only_grant(contract(world))
    world.gone = False
    world.tell(AgentLink(connected=False))
    world.now += SETTLE_S
    assert "not gone" in only_refusal(world.turn()).reason
    assert world.elastic.launch_allowed
    world.now += 1000
    assert world.turn() == []
    assert world.elastic.counters.num_granted_blocks == 5
    world.perform(grant)
    world.check()
    world.gone = True
    assert world.turn() == []
    assert world.elastic.counters.num_granted_blocks == 0


def test_a_silent_agent_does_not_stop_steps(expanded: World) -> None:
    """Steps run meanwhile, no time-out ends the grant, and nothing new begins."""
    world = expanded
    copy = only_grant(contract(world))
    world.now += 3600
    assert world.turn() == []
    assert world.elastic.counters.num_granted_blocks == 5
    assert world.write(world.rows[0], 1)
    assert "a transition is running" in only_refusal(contract(world, 3)).reason
    world.answer(copy)
    assert only_grant(world.turn()).kind == "load"


def to_load(world: World) -> Grant:
    """Contract up to the load's grant."""
    world.answer(only_grant(contract(world)))
    load = only_grant(world.turn())
    assert load.kind == "load"
    return load


def test_a_failed_load_is_tried_again_later(expanded: World) -> None:
    """The draft is unusable until a load is verified; the waits double."""
    world = expanded
    load = to_load(world)
    for factor in (1, 2, 4):
        assert world.answer(load, ok=False) == []
        assert (world.elastic.residency, world.elastic.draft_usable) == ("reloading", False)
        assert world.elastic.launch_allowed
        world.now += RELOAD_BACKOFF_S * factor - 0.01
        assert world.turn() == []
        world.now += 0.02
        load = only_grant(world.turn())
    world.answer(load)
    assert world.turn() == [TransitionDone(request_id=2, residency="resident")]


def test_a_new_agent_finishes_the_reload(expanded: World) -> None:
    """A death while loading waits for the next agent; the tail stays the draft's meanwhile."""
    world = expanded
    load = to_load(world)
    world.tell(AgentLink(connected=False))
    world.perform(load, 0, 2)
    world.now += 1000
    assert world.turn() == []
    assert world.turn() == []
    assert (world.elastic.residency, world.elastic.launch_allowed) == ("reloading", True)
    assert world.blocks.num_total == BASE
    assert world.write(world.rows[0], 5)
    world.tell(AgentLink(connected=True))
    again = only_grant(world.turn())
    assert again.grant_id > load.grant_id
    assert world.tell(GrantAnswer(grant_id=load.grant_id, ok=True)) == []
    assert world.turn() == []
    world.answer(again)
    assert world.turn() == [TransitionDone(request_id=2, residency="resident")]


def test_a_draft_that_cannot_be_restored_is_loaded_again(expanded: World) -> None:
    """Bytes that pass the checksum but give no draft do not make it resident."""
    world = expanded
    load = to_load(world)
    world.restore_error = "the draft's own check failed"
    world.answer(load)
    assert world.turn() == []
    assert not world.elastic.draft_usable
    world.restore_error = ""
    world.now += RELOAD_BACKOFF_S
    world.answer(only_grant(world.turn()))
    assert world.turn() == [TransitionDone(request_id=2, residency="resident")]


@pytest.mark.parametrize(
    ("prepare", "kind", "sentence"),
    [
        (lambda w: None, "contract", "the draft is resident, not offloaded"),
        (lambda w: None, "shrink", "unknown kind 'shrink'"),
        (lambda w: w.tell(AgentLink(connected=False)), "expand", "stream of this request was lost"),
        (
            lambda w: w.tell(TransitionRequest(request_id=1, kind="expand")),
            "expand",
            "a transition is running",
        ),
    ],
)
def test_refused_requests(
    world: World, prepare: Callable[[World], object], kind: str, sentence: str
) -> None:
    """What cannot be done now is refused with a sentence and changes nothing."""
    prepare(world)
    residency = world.elastic.residency
    refusal = only_refusal(world.tell(TransitionRequest(request_id=9, kind=kind)))
    assert refusal.request_id == 9
    assert sentence in refusal.reason
    assert world.elastic.residency == residency


def test_without_a_draft_model() -> None:
    """Nothing can be given back: requests are refused, and n-gram drafts are not clamped."""
    world = World()
    elastic = ElasticMemory(world, world.blocks, None, copy=world.copy, clock=lambda: 0.0)
    elastic.on_message(AgentLink(connected=True))
    refusal = only_refusal(elastic.on_message(TransitionRequest(request_id=1, kind="expand")))
    assert refusal.reason == "there is no draft model"
    assert (elastic.residency, elastic.draft_usable, elastic.launch_allowed) == ("none", True, True)


def test_answers_to_unknown_grants_are_ignored(expanded: World) -> None:
    """An answer to no open grant moves nothing."""
    world = expanded
    assert world.tell(GrantAnswer(grant_id=99, ok=True)) == []
    copy = only_grant(contract(world))
    assert world.tell(GrantAnswer(grant_id=copy.grant_id + 1, ok=True)) == []
    assert world.turn() == []
