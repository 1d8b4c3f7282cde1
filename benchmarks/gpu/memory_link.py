"""An engine in this process with a real memory agent in its own: the worker's client between."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from gpu import memory_marks
from gpu.arm_list import FOLDERS
from gpu.driver import Driver, Feed
from gpu.served import environment, service
from nightjar.config import parse
from worker.config import WorkerConfig
from worker.engine.decisions import NO_BUCKET, Choice, Decisions
from worker.engine.main import start
from worker.memory_client import MemoryClient
from worker.messages import (
    AgentLink,
    Grant,
    PoolInfo,
    PoolMap,
    Pressure,
    RequestRefused,
    StepOutput,
    ToEngine,
    ToFront,
    TransitionDone,
    TransitionRequest,
)
from worker.model.build import Models

_TALK = (Pressure, Grant, RequestRefused, TransitionDone, PoolMap)
ATTACH_S = 120.0


class AgentFeed(Feed):
    """A feed whose memory messages travel to an agent and back while one is attached."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(say)
        self.arrived: SimpleQueue[ToEngine] = SimpleQueue()
        self.client: MemoryClient | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.sent: list[tuple[float, ToFront]] = []  # of transitions, and when
        self.asked: list[tuple[float, TransitionRequest]] = []  # by the agent, and when
        self.tokens: list[tuple[float, int]] | None = None  # when a request got some, if watched
        self.on_map: Callable[[], None] = lambda: None  # called with each map that is sent

    def poll(self, timeout_s: float) -> list[ToEngine]:
        """What is due or has arrived; waits only while nothing has."""
        messages = super().poll(timeout_s)
        wait_s = 0.0 if messages else timeout_s
        try:
            while True:
                messages.append(self.arrived.get(timeout=wait_s) if wait_s else self._next())
                wait_s = 0.0
        except Empty:
            return messages

    def _next(self) -> ToEngine:
        return self.arrived.get_nowait()

    def send(self, message: ToFront) -> None:
        """Pass talk of memory on, the rest as a feed does."""
        if not isinstance(message, _TALK):
            if self.tokens is not None and isinstance(message, StepOutput):
                at = time.perf_counter()
                self.tokens += [(at, request_id) for request_id in message.request_ids]
            super().send(message)
            return
        if isinstance(message, PoolMap):
            self.on_map()
        if not isinstance(message, Pressure):
            self.sent.append((time.perf_counter(), message))
        if self.client is not None and self.loop is not None:
            self.loop.call_soon_threadsafe(self.client.forward, message)


class Bench:
    """An engine, its driver, and what the sections look at."""

    def __init__(self, flags: Sequence[str], say: Callable[[str], None]) -> None:
        """Load; `flags` are the worker's own."""
        # Any address will do: it makes the pool one that an agent may map.
        flags = [*flags, "--memory-agent=unix:/nowhere"]
        config = parse(WorkerConfig, flags, prog="arm", description=__doc__ or "", environ={})
        begin = time.perf_counter()
        self.say = lambda text: say(f"{time.perf_counter() - begin:6.1f} s: {text}")
        self.feed = AgentFeed(say)
        self.models: Models
        self.models, engine, ready = start(config, self.feed)  # type: ignore[arg-type]
        assert ready.pool is not None, "the pool is not shared"
        self.pool: PoolInfo = ready.pool
        self.config, self.ready = config, ready
        self.driver = Driver(engine, self.feed)
        self.engine, self.scheduler = engine, engine.scheduler
        self.blocks, self.elastic = engine.scheduler.blocks, engine.memory.elastic
        self.start_s = round(time.perf_counter() - begin, 1)
        self.phases: list[tuple[float, str]] = []  # that the engine came to, and when
        self.taken: list[int] = []  # blocks set aside by `press`
        self.num_moved = 0  # blocks that took the place of their sources
        self.rests: list[tuple[float, int]] = []  # blocks that the engine copied itself, and when
        advance, rename, copy = engine.memory.advance, self.blocks.rename, self.elastic._copy

        def noted() -> None:
            advance()
            phase = self.elastic._phase.name
            if not self.phases or self.phases[-1][1] != phase:
                self.phases.append((time.perf_counter(), phase))

        def renamed(moves: dict[int, int]) -> None:
            self.num_moved += sum(self.blocks._refs[source] > 0 for source in moves)
            rename(moves)

        def copied(moves: dict[int, int]) -> None:
            self.rests.append((time.perf_counter(), len(moves)))
            copy(moves)

        setattr(engine.memory, "advance", noted)  # noqa: B010
        setattr(self.elastic, "_copy", copied)  # noqa: B010
        setattr(self.blocks, "rename", renamed)  # noqa: B010

    @contextmanager
    def agent(self, *flags: str, marks: Path | None = None) -> Iterator[str]:
        """Attach an agent, a process of its own, until the end of the block; gives its address.

        With `marks` it notes there when it passes its failpoints.
        """
        environ, module = environment(*FOLDERS), "nightjar"
        if marks is not None:
            module, environ[memory_marks.MARKS] = "gpu.memory_marks", str(marks)
        own = [f"--shm-dir={self.config.shm_dir}", *flags]
        with service("memory-agent", own, environ, module) as address:
            loop, attached = clients_loop(), threading.Event()

            def arrived(message: Any) -> None:
                if isinstance(message, AgentLink) and message.connected:
                    attached.set()
                if isinstance(message, TransitionRequest):
                    self.feed.asked.append((time.perf_counter(), message))
                self.feed.arrived.put(message)

            client = MemoryClient(address, "bench", self.pool, arrived)
            client._residency = self.elastic.residency
            self.feed.client, self.feed.loop = client, loop
            running = asyncio.run_coroutine_threadsafe(client.run(), loop)
            try:
                if not attached.wait(ATTACH_S):
                    raise SystemExit(f"the agent did not attach within {ATTACH_S:g} s")
                yield address
            finally:
                running.cancel()
                wait([running])
                self.feed.client = self.feed.loop = None
            # Not after an interruption: amid a step, the engine could not go on.
            self.until(lambda: not self.elastic._connected, "the stream is gone")

    def until(self, holds: Callable[[], bool], what: str, timeout_s: float = 60) -> None:
        """Turn the engine until `holds()`; SystemExit if it does not come to that."""
        deadline = time.monotonic() + timeout_s
        while not holds():
            if time.monotonic() > deadline:
                residency, phase = self.elastic.residency, self.elastic._phase.name
                raise SystemExit(f"not within {timeout_s:g} s: {what}; {residency}, {phase}")
            self.driver._turn()

    def set_gamma(self, gamma: int) -> None:
        """Draft so many from the next step on."""
        decisions = Decisions(planned=False, fixed_gamma=gamma)
        decisions._fallback = Choice(gamma, gamma, NO_BUCKET)
        self.engine.planner._decisions = decisions
        self.engine.planner.last = decisions._fallback  # what reports go by while no step runs

    def squeeze(self, num_left: int) -> list[int]:
        """Set head blocks aside until `num_left` free ones are left; `release` takes it back."""
        count = max(0, self.blocks.num_free - num_left)
        taken = self.blocks.reserve(min(count, self.num_free_head()))
        assert taken is not None
        return taken

    def num_free_head(self) -> int:
        """Free blocks of the head."""
        base = self.blocks.num_base_blocks
        return sum(
            min(first + count, base) - first
            for first, count, owner in self.blocks.ranges()
            if first < base and owner.value in ("free", "cached")
        )

    def release(self, taken: list[int]) -> None:
        """Give blocks back that were set aside."""
        self.blocks.release_reserved(taken)

    def press(self, num_left: int) -> None:
        """`squeeze`, until `ease`."""
        self.taken += self.squeeze(num_left)

    def ease(self) -> None:
        """Take all of `press` back."""
        taken, self.taken = self.taken, []
        self.release(taken)

    def forget(self) -> None:
        """Drop what was noted of transitions, and begin anew."""
        self.feed.sent.clear()
        self.feed.asked.clear()
        self.phases.clear()
        self.rests.clear()

    def close(self) -> None:
        """Let go of the models."""
        self.models.close()


@functools.cache
def clients_loop() -> asyncio.AbstractEventLoop:
    """The loop of all clients, in a thread: gRPC's own events may outlive each of them."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def device_used(device: str) -> int:
    """Bytes of the GPU that anybody has; 0 on a CPU."""
    if device != "cuda":
        return 0
    import torch

    free, total = torch.cuda.mem_get_info()
    return int(total - free)
