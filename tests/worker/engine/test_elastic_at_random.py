"""Elastic memory against the real block manager: random events over real bytes."""

from __future__ import annotations

import random
from collections.abc import Callable

from elastic_world import World

from worker.engine.elastic import SETTLE_S
from worker.messages import (
    AgentLink,
    Grant,
    RequestRefused,
    ToFront,
    TransitionRequest,
)


class Chaos:
    """Rows, an agent that works, fails, stalls and dies, and time, in random order.

    A grant that was sent stays with the agent that got it: it may write what the grant allows
    until it has answered, or has died and a second has passed, or, stopped, until it is gone.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.world = World()
        self.num_requests = 0
        self.held: list[Grant] = []  # that some agent may still work on
        self.num_done = 0  # blocks of it
        self.connected = True
        self.lost_at = 0.0
        self.world.tell(AgentLink(connected=True))
        self.events: list[tuple[Callable[[], None], int]] = [
            (self.start, 8), (self.step, 10), (self.finish, 5), (self.request, 6),
            (self.turn, 10), (self.work, 8), (self.answer, 4), (self.lose, 2),
            (self.attach, 5), (self.die, 5), (self.wait, 2),
        ]  # fmt: skip

    def run(self, num_events: int) -> None:
        """Let things happen, and check what must hold after each."""
        calls, weights = zip(*self.events, strict=True)
        for call in self.rng.choices(calls, weights, k=num_events):
            call()
            self.world.check()

    def take(self, messages: list[ToFront]) -> None:
        """Deliver grants if there is a stream."""
        grants = [m for m in messages if isinstance(m, Grant)]
        assert not (grants and self.held), "two grants are open"
        if self.connected and grants:
            self.held, self.num_done = grants, 0

    def start(self) -> None:
        """Admit a row; sometimes of a prefix seen before."""
        if self.world.elastic.launch_allowed:
            self.world.start(self.rng.randrange(8), self.rng.randint(1, 14))

    def step(self) -> None:
        """Rows advance; one without room is preempted."""
        for row in list(self.world.rows):
            if self.world.elastic.launch_allowed and not self.world.write(row, 1):
                self.world.finish(row)

    def finish(self) -> None:
        """Rows end, whatever goes on; old ones first, and now and then many at once."""
        for row in self.world.rows[: self.rng.choice([1, 1, 1, 4])]:
            self.world.finish(row)

    def request(self) -> None:
        """The agent asks for what the residency calls for."""
        usable, blocks = self.world.elastic.draft_usable, self.world.blocks
        timely = blocks.num_free <= 4 if usable else blocks.live_tail_blocks()
        if not timely and self.rng.random() < 0.95:
            return
        kind = "expand" if usable else "contract"
        self.num_requests += 1
        self.take(self.world.tell(TransitionRequest(request_id=self.num_requests, kind=kind)))

    def turn(self) -> None:
        """The loop comes round."""
        self.take(self.world.turn())

    def work(self) -> None:
        """The agent does part of what it holds; its stream may be lost."""
        if self.held:
            num_blocks = self.rng.randint(0, 3)
            self.world.perform(self.held[0], self.num_done, num_blocks)
            self.num_done += num_blocks

    def answer(self) -> None:
        """The agent ends its grant; now and then it failed."""
        if self.held and self.connected:
            ok = self.rng.random() < 0.85
            self.take(self.world.answer(self.held.pop(), ok, self.num_done))

    def lose(self) -> None:
        """The stream is lost: the agent died, or only stopped."""
        if self.connected:
            self.world.gone = self.rng.random() < 0.5
            self.connected, self.lost_at = False, self.world.now
            self.take(self.world.tell(AgentLink(connected=False)))

    def die(self) -> None:
        """A stopped agent goes at last."""
        if not self.connected and not self.world.gone:
            self.world.gone, self.held = True, []

    def attach(self) -> None:
        """A new agent; the arena's lock lets it in only once the old one writes no more."""
        if not self.connected and self.world.gone:
            self.connected, self.held = True, []
            self.take(self.world.tell(AgentLink(connected=True)))

    def wait(self) -> None:
        """Time passes; a dead agent's last write ends within a second."""
        self.world.now += self.rng.choice([0.1, 0.6, 1.0, 4.0])
        if not self.connected and self.world.gone and self.world.now >= self.lost_at + SETTLE_S:
            self.held = []

    def settle(self) -> None:
        """Left alone with a good agent, every transition ends and nothing stays granted."""
        world = self.world
        self.die()
        self.attach()
        for _ in range(20):
            world.now += 40
            self.turn()
            if self.held:
                self.take(world.answer(self.held.pop(), True, self.num_done))
        assert world.elastic.residency in ("resident", "offloaded")
        assert world.elastic.launch_allowed
        assert world.elastic.counters.num_granted_blocks == 0


def test_random_events() -> None:
    """Bytes, owners and tables agree after every event, and what can happen did happen."""
    num_moved = num_contractions = num_given_up = 0
    for seed in range(120):
        chaos = Chaos(seed)
        chaos.run(300)
        chaos.settle()
        world = chaos.world
        num_moved += world.num_moved
        num_contractions += world.elastic.counters.num_contractions
        num_given_up += sum(
            isinstance(m, RequestRefused) and "gone" in m.reason for m in world.sent
        )
    assert min(num_moved, num_contractions, num_given_up) >= 30
