"""An engine over a channel that records, with fake models behind it, at either depth."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from typing import Any, TypeVar

from engine_rig import BLOCK_SIZE, fakes, oracle, params, prompt
from fake_device import FakeDeviceRunner
from fake_forward import FakeForward

from worker.engine.block_manager import BlockManager
from worker.engine.drafting import Drafting
from worker.engine.elastic import ElasticMemory
from worker.engine.engine import Engine
from worker.engine.links import CpuMeter, Memory, Planner
from worker.engine.runner import Runner
from worker.engine.scheduler import Scheduler
from worker.messages import (
    Decision,
    Finished,
    SamplingParams,
    StepOutput,
    Submit,
    ToEngine,
    ToFront,
)
from worker.sampling import sample
from worker.speculative.draft_model import DraftModelProposer

MessageT = TypeVar("MessageT")


class FakeChannel:
    """Gives what was queued, records what is sent; time passes while it polls."""

    def __init__(self) -> None:
        self.now = 0.0
        self.queue: list[ToEngine] = []
        self.sent: list[ToFront] = []
        self.polls: list[float] = []

    def poll(self, timeout_s: float) -> list[ToEngine]:
        """What waits; without anything the time-out passes."""
        self.polls.append(timeout_s)
        messages, self.queue = self.queue, []
        self.now += 0.001 if messages else max(0.001, timeout_s)
        return messages

    def send(self, message: ToFront) -> None:
        """Record."""
        self.sent.append(message)

    def of(self, kind: type[MessageT]) -> list[MessageT]:
        """What was sent of that kind."""
        return [message for message in self.sent if isinstance(message, kind)]

    def tokens(self, request_id: int) -> list[int]:
        """A request's tokens so far."""
        found: list[int] = []
        for output in self.of(StepOutput):
            token_ids, start = array("i", output.token_ids), 0
            for other, count in zip(output.request_ids, output.num_tokens, strict=True):
                found += token_ids[start : start + count] if other == request_id else []
                start += count
        return found

    def end(self, request_id: int) -> Finished:
        """How a request ended."""
        ends = [f for o in self.of(StepOutput) for f in o.finished if f.request_id == request_id]
        assert len(ends) == 1
        return ends[0]


class FakeDraft(FakeForward):
    """A draft that can be dropped."""

    dropped = False

    def run(self, batch: Any) -> Any:
        """Refuses while dropped."""
        assert not self.dropped
        return super().run(batch)

    def drop(self) -> None:
        """Forget."""
        self.dropped = True
        self.poison(range(len(self.slots)))

    def restore(self) -> None:
        """Be back."""
        self.dropped = False


class Bench:
    """An engine, its channel and its models.

    At depth one a launch computes at once, or the step is computed when it retires.
    """

    mode = "depth 0"

    def __init__(
        self,
        *,
        planned: bool = False,
        fixed_gamma: int = 3,
        num_base_blocks: int = 24,
        num_extra_blocks: int = 4,
        has_agent: bool = True,
    ) -> None:
        self.channel = FakeChannel()
        self.target, _ = fakes(
            None, num_base_blocks=num_base_blocks, num_extra_blocks=num_extra_blocks
        )
        self.draft = FakeDraft("target", num_base_blocks * BLOCK_SIZE, BLOCK_SIZE)

        def clock() -> float:
            self.channel.now += 1e-5
            return self.channel.now

        sizes = {"vocab_size": 40, "block_size": BLOCK_SIZE}
        proposer = DraftModelProposer(self.draft, sample, **sizes, clock=clock)
        blocks = BlockManager(num_base_blocks, num_extra_blocks, BLOCK_SIZE)
        self.scheduler = Scheduler(
            blocks,
            Drafting(blocks, proposer, max_gamma=5, max_catchup_tokens=64),
            max_num_seqs=4,
            max_num_batched_tokens=64,
        )
        self.elastic = ElasticMemory(
            self.scheduler, blocks, self.draft, copy=self.target.copy_blocks, clock=clock
        )
        send = self.channel.send
        runner = Runner(self.target, proposer, sample, **sizes, clock=clock)
        if self.mode != "depth 0":
            device = FakeDeviceRunner(runner, eager=self.mode == "depth 1, eager")
        self.depth = int(self.mode != "depth 0")
        self.engine = Engine(
            self.scheduler,
            device if self.depth else runner,
            Planner(
                planned=planned,
                fixed_gamma=fixed_gamma,
                send=send,
                clock=clock,
                cpu=CpuMeter(1, clock),
            ),
            Memory(self.scheduler, self.elastic, has_agent=has_agent, send=send, clock=clock),
            self.channel,
            max_model_len=200,
            vocab_size=40,
            eos_token_ids=(),
            stop_detector=lambda stop, least: (_ for _ in ()).throw(ValueError("no detector here")),
            clock=clock,
        )

    def give(self, *messages: ToEngine) -> None:
        """Queue messages for the next turn."""
        self.channel.queue += messages

    def turn(self, count: int = 1) -> None:
        """Turns of the loop, each checked."""
        for _ in range(count):
            assert self.engine.turn()
            self.scheduler.check_integrity()

    def until(self, holds: Callable[[], bool], most: int = 500) -> None:
        """Turn until something holds."""
        for _ in range(most):
            if holds():
                return
            self.turn()
        raise AssertionError("it never came to hold")

    def finish(self) -> None:
        """Turn until no request is left."""
        self.until(lambda: not self.scheduler.has_work and not self.channel.queue)


def submit(request_id: int, text: list[int], **fields: object) -> Submit:
    """A greedy request."""
    return Submit(request_id=request_id, prompt_token_ids=text, sampling=params(**fields))


def decision(name: str, gamma: int, **fields: Any) -> Decision:
    """A decision for every batch size at once."""
    defaults: dict[str, Any] = {
        "decision_id": name,
        "policy_version": "1-fixed",
        "batch_size_edges": (),
        "kv_token_edges": (),
        "table": {0: (gamma, gamma)},
        "bucket": 0,
        "hold_steps": 5,
        "explored": False,
        "session": name.encode(),
    }
    return Decision(**{**defaults, **fields})


TEXT = prompt(random.Random(1), 20)


def answer(bench: Bench, sampling: SamplingParams, text: list[int] = TEXT) -> list[int]:
    """What plain decoding says."""
    return oracle(bench.target, text, sampling, max_model_len=200)[0]
