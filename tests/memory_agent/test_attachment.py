"""One worker's attachment over a pool that fails: what the worker hears, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from memory_agent.agent import Agent, Residency, Thresholds
from memory_agent.attachment import Attachment
from memory_agent.checksum import ChecksumMismatch
from memory_agent.pool_files import DeviceLost
from nightjar.v1 import memory_pb2

THRESHOLDS = Thresholds(tau_low=0.1, tau_high=0.2, t_persist=1, hold_s=0.0, backoff_s=1.0)


class FailingPool:
    """A pool on which all work fails in one way."""

    def __init__(self, error: Exception) -> None:
        self.error, self.closed = error, False

    def copy(
        self, sources: Sequence[int], destinations: Sequence[int], aborted: Callable[[], bool]
    ) -> int:
        """Fail."""
        raise self.error

    def load(self, aborted: Callable[[], bool]) -> int:
        """Fail."""
        raise self.error

    def close(self) -> None:
        """A lost device fails here, too."""
        self.closed = True
        if isinstance(self.error, DeviceLost):
            raise self.error


@pytest.mark.parametrize("work", ["copy", "load"])
@pytest.mark.parametrize(
    ("error", "sentence", "ends"),
    [
        (DeviceLost("an illegal address"), "the GPU failed: an illegal address", True),
        (ChecksumMismatch("other bytes"), "other bytes", False),
        (ZeroDivisionError("oops"), "internal error; see the agent's log", False),
    ],
)
async def test_every_failure_is_an_answer(
    error: Exception, sentence: str, ends: bool, work: str
) -> None:
    """A grant never stays open; only a lost GPU ends the stream, and then the process."""
    events: list[memory_pb2.MemoryEvent] = []
    pool = FailingPool(error)
    agent = Agent(THRESHOLDS, num_base_blocks=9, num_extra_blocks=5, residency=Residency.OFFLOADED)
    attachment = Attachment("worker-1", pool, agent, events.append)
    grant = memory_pb2.Grant(grant_id=3)
    getattr(grant, work).SetInParent()
    attachment.on_message(memory_pb2.AttachRequest(grant=grant))
    response = await attachment.outbox.get()
    assert response is not None
    assert (response.answer.grant_id, response.answer.ok) == (3, False)
    assert response.answer.error == sentence
    await attachment.close()
    assert pool.closed
    assert bool(attachment.device_lost) == ends
    assert await attachment.outbox.get() is None
    assert events[-1].reason == sentence
    assert attachment.grant is None
