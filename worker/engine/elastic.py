"""The worker's side of elastic memory: the draft's tail becomes KV blocks and back.

A grant ends with the agent's answer or its death, never with a time-out. An agent that is
merely silent keeps its destinations; no step waits for it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import msgspec

from memory_agent import failpoint
from memory_agent.remap import plan_moves
from nightjar import log
from nightjar.errors import NightjarError
from worker.engine.block_manager import BlockManager
from worker.engine.transition import PAUSED, Draft, ElasticCounters, Phase, Tables
from worker.messages import (
    AgentLink,
    Grant,
    GrantAnswer,
    RequestRefused,
    ToFront,
    TransitionDone,
    TransitionRequest,
)

SETTLE_S = 1.0  # from the loss of the agent's stream until its last write has ended
RELOAD_BACKOFF_S = 1.0  # after a failed load; doubles up to 32 times that


class ElasticMemory:
    """Answers the memory agent, as messages in and messages out.

    Args:
        scheduler: Owner of the rows' tables.
        blocks: The block manager.
        draft: The draft model; None if nothing can be given back.
        copy: Copies blocks within the pool, sources to destinations, and returns once they are
            there; called with nothing in flight.
        clock: Monotonic seconds.
        agent_gone: Whether no agent maps the arena any more; asked once its stream has been
            lost for `SETTLE_S`, so that a stopped process does not count as dead.
    """

    def __init__(
        self,
        scheduler: Tables,
        blocks: BlockManager,
        draft: Draft | None,
        *,
        copy: Callable[[dict[int, int]], None],
        clock: Callable[[], float] = time.monotonic,
        agent_gone: Callable[[], bool] = lambda: True,
    ) -> None:
        self.residency = "none" if draft is None else "resident"
        self._scheduler, self._blocks, self._draft = scheduler, blocks, draft
        self._copy, self._clock, self._agent_gone = copy, clock, agent_gone
        self._phase = Phase.IDLE
        self._connected, self._stream = False, 0
        self._request_id = 0
        self._moves: dict[int, int] = {}  # tail block -> reserved head block
        self._copied: set[int] = set()  # sources whose bytes are at their destination
        self._grant: Grant | None = None  # the open one
        self._num_grants = 0
        self._lost_at_s: float | None = None  # when the open grant's stream was lost
        self._load_at_s = -math.inf
        self._num_failed_loads = 0
        self._num_expansions = 0
        self._num_contractions = 0

    @property
    def draft_usable(self) -> bool:
        """False while there is a draft model whose weights are not, or soon not, in place."""
        return self.residency in ("none", "resident")

    @property
    def launch_allowed(self) -> bool:
        """False while no step may be launched, nor be in flight when `after_retire` is called."""
        return self._phase not in PAUSED

    @property
    def counters(self) -> ElasticCounters:
        """Counts for the status."""
        loading = self._grant is not None and self._grant.kind == "load"
        return ElasticCounters(
            num_expansions=self._num_expansions,
            num_contractions=self._num_contractions,
            num_granted_blocks=self._blocks.num_granted
            + (self._blocks.num_extra_blocks if loading else 0),
        )

    def on_message(self, message: TransitionRequest | GrantAnswer | AgentLink) -> list[ToFront]:
        """Take one message of the agent; allowed while a step is in flight."""
        if isinstance(message, AgentLink):
            return self._on_link(message)
        if isinstance(message, GrantAnswer):
            if self._grant is None or self._grant.grant_id != message.grant_id:
                return []  # ended before, by the death of the stream that carried it
            return self._end_grant(message.ok, message.error)
        refusal = self._refusal(message.kind)
        if refusal:
            return [RequestRefused(request_id=message.request_id, reason=refusal)]
        self._request_id = message.request_id
        if message.kind == "expand":
            self.residency = "offloading"
            self._phase = Phase.EXPANDING
            return []
        return self._contract()

    def after_retire(self) -> list[ToFront]:
        """Go on where that needs nothing in flight; called in every turn of the loop."""
        messages = self._settle()
        if self._phase is Phase.EXPANDING:
            messages += self._expand()
        elif self._phase is Phase.FREEZING:
            messages += self._freeze()
        elif self._phase is Phase.LOADING:
            messages += self._load()
        elif self._phase is Phase.RESTORING:
            messages += self._restore()
        return messages

    def _refusal(self, kind: str) -> str:
        if self._draft is None:
            return "there is no draft model"
        if not self._connected:
            return "the stream of this request was lost"
        if self._phase is not Phase.IDLE:
            return f"a transition is running: {self._phase.name.lower()}"
        if self._grant is not None:
            return f"grant {self._grant.grant_id} of an earlier transition is still open"
        needed = {"expand": "resident", "contract": "offloaded"}.get(kind)
        if needed is None:
            return f"unknown kind {kind!r}"
        return "" if self.residency == needed else f"the draft is {self.residency}, not {needed}"

    # ---- expansion ----

    def _expand(self) -> list[ToFront]:
        assert self._draft is not None
        self._draft.drop()
        failpoint.reached("worker.mid_expand")
        self._blocks.expand()
        self._num_expansions += 1
        return self._finish("offloaded")

    # ---- contraction, up to the rename ----

    def _contract(self) -> list[ToFront]:
        self._blocks.close_tail()
        live = self._blocks.live_tail_blocks()
        destinations = self._blocks.reserve(len(live))
        if destinations is None:
            return self._abandon(f"too few free head blocks for {len(live)} live tail blocks")
        self._moves, self._copied = plan_moves(live, destinations), set()
        self.residency = "reloading"
        failpoint.reached("worker.before_copy")
        filling = self._scheduler.blocks_being_filled()
        full = [block for block in live if block not in filling]
        self._phase = Phase.COPYING if full else Phase.FREEZING
        return [self._grant_copy(full)] if full else []

    def _freeze(self) -> list[ToFront]:
        if not self._connected:
            return self._abort("the agent is gone")
        live = self._blocks.live_tail_blocks()
        assert self._moves.keys() >= set(live), "a closed tail block was handed out"
        if rest := {b: self._moves[b] for b in live if b not in self._copied}:
            self._copy(rest)
        failpoint.reached("worker.before_rename")
        # Sources without a row any more give their destinations back.
        self._scheduler.rename(self._moves)
        self._moves = {}
        failpoint.reached("worker.after_rename")
        self._blocks.give_tail_to_draft()
        self._phase = Phase.LOADING
        return self._load()

    def _abort(self, reason: str) -> list[ToFront]:
        """Give up before the rename, with no grant open."""
        self._release_destinations()
        return self._abandon(reason)

    def _abandon(self, reason: str) -> list[ToFront]:
        """Give up before the rename; destinations of an open grant stay quarantined."""
        log.get().warning("contraction given up", reason=reason)
        self._blocks.reopen_tail()
        self.residency = "offloaded"
        self._phase = Phase.IDLE
        return [RequestRefused(request_id=self._request_id, reason=reason)]

    def _release_destinations(self) -> None:
        self._blocks.release_reserved(self._moves.values())
        self._moves = {}

    # ---- contraction, from the rename on ----

    def _load(self) -> list[ToFront]:
        waiting = self._clock() < self._load_at_s
        if self._grant is not None or not self._connected or waiting:
            return []
        return [self._open(Grant(grant_id=self._num_grants + 1, kind="load"))]

    def _on_failed_load(self, reason: str) -> None:
        log.get().warning("the draft could not be reloaded; trying again", reason=reason)
        self._phase = Phase.LOADING
        self._load_at_s = self._clock() + RELOAD_BACKOFF_S * 2 ** min(self._num_failed_loads, 5)
        self._num_failed_loads += 1

    def _restore(self) -> list[ToFront]:
        assert self._draft is not None
        failpoint.reached("worker.before_restore")
        try:
            self._draft.restore()
        except NightjarError as error:
            self._on_failed_load(str(error))
            return []
        self._num_failed_loads = 0
        self._num_contractions += 1
        return self._finish("resident")

    def _finish(self, residency: str) -> list[ToFront]:
        log.get().info("transition finished", draft=residency)
        self.residency = residency
        self._phase = Phase.IDLE
        return [TransitionDone(request_id=self._request_id, residency=residency)]

    # ---- grants ----

    def _grant_copy(self, sources: list[int]) -> Grant:
        return self._open(
            Grant(
                grant_id=self._num_grants + 1,
                kind="copy",
                source_ids=sources,
                destination_ids=[self._moves[source] for source in sources],
            )
        )

    def _open(self, grant: Grant) -> Grant:
        assert self._grant is None
        self._num_grants += 1
        self._grant = msgspec.structs.replace(grant, stream=self._stream)
        return self._grant

    def _end_grant(self, ok: bool, error: str) -> list[ToFront]:
        grant, self._grant, self._lost_at_s = self._grant, None, None
        assert grant is not None
        if self._phase is Phase.LOADING:
            if ok:
                self._phase = Phase.RESTORING
            else:
                self._on_failed_load(error)
            return []
        if self._phase is Phase.IDLE:  # abandoned before
            self._release_destinations()
            return []
        if not ok:
            return self._abort(error)
        self._copied.update(grant.source_ids)
        self._phase = Phase.FREEZING
        return []

    def _on_link(self, link: AgentLink) -> list[ToFront]:
        # Any change of the link means that the stream which carried an open grant is gone.
        if self._grant is not None and self._lost_at_s is None:
            self._lost_at_s = self._clock()
        self._connected, self._stream = link.connected, link.stream
        self._load_at_s = -math.inf  # a new agent need not wait for what the old one did
        return []

    def _settle(self) -> list[ToFront]:
        if self._lost_at_s is None or self._clock() < self._lost_at_s + SETTLE_S:
            return []
        # The arena's lock lets a new agent attach only once the old one has unmapped.
        if self._connected or self._agent_gone():
            return self._end_grant(False, "the agent is gone")
        if self._phase is Phase.COPYING:
            return self._abandon("the agent's stream is lost, but the agent is not gone")
        return []
