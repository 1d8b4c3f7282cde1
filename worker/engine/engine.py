"""The step loop: one thread that owns models, pool and sequences, and talks to the front alone."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

import psutil

from nightjar import log
from nightjar.errors import EngineFailure
from worker.engine.links import Clock, Memory, Planner
from worker.engine.plan import Plan
from worker.engine.runner import Launched, StepRunner
from worker.engine.scheduler import Scheduler
from worker.engine.sequence import Sequence, StopDetector
from worker.messages import (
    Abort,
    AgentLink,
    Decision,
    Finished,
    GrantAnswer,
    PlannerLink,
    PoolMapRequest,
    Shutdown,
    Status,
    StepOutput,
    Submit,
    ToEngine,
    ToFront,
    TransitionRequest,
)

IDLE_POLL_S = 0.1
STALLED_POLL_S = 0.005  # requests are there, but nothing may or can be launched
STATUS_S = 0.05
IDLE_STATUS_S = 0.2
MAX_FAILED_STEPS = 3  # in a row


class Channel(Protocol):
    """The way to the front and back."""

    def poll(self, timeout_s: float) -> list[ToEngine]:
        """Messages that arrived; waits up to `timeout_s` for the first."""
        ...

    def send(self, message: ToFront) -> None:
        """Hand a message over, without waiting for the front."""
        ...


class Engine:
    """Everything between two processes' messages and two models' forwards."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        planner: Planner,
        memory: Memory,
        channel: Channel,
        *,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        stop_detector: Callable[[tuple[str, ...], int], StopDetector],
        clock: Clock = time.monotonic,
    ) -> None:
        """Put the parts together.

        Args:
            scheduler: Owner of sequences and blocks.
            runner: Owner of the models.
            planner: Says which gamma to use.
            memory: Elastic memory.
            channel: To the front.
            max_model_len: Most tokens of prompt and answer.
            vocab_size: Ids that may appear.
            eos_token_ids: Ids that end an answer.
            stop_detector: Makes what finds stop strings from a minimum of tokens on.
            clock: Seconds, monotonic.
        """
        self.scheduler = scheduler
        self.runner = runner
        self.planner = planner
        self.memory = memory
        self.channel = channel
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._stop_detector = stop_detector
        self._clock = clock
        self._plans: deque[Plan] = deque()  # in flight, oldest first, and what they became
        self._flights: deque[Launched] = deque()
        self._poll_s = IDLE_POLL_S
        self._num_failed_steps = 0
        self._status_at = float("-inf")
        self._rss_at = float("-inf")
        self._rss_bytes = 0
        self._process = psutil.Process()

    def run(self) -> None:
        """Serve until the front says `Shutdown` or is gone.

        Raises:
            EngineFailure: Several steps in a row have failed.
        """
        while self.turn():
            pass

    def turn(self) -> bool:
        """Take messages, then run a step if there is one; False after `Shutdown`."""
        for message in self.channel.poll(self._poll_s):
            if isinstance(message, Shutdown):
                self._retire_all()
                self._deliver(_ends(self.scheduler.abort_all()))
                return False
            self._receive(message)
        if not self.memory.elastic.launch_allowed:
            self._retire_all()
        self.memory.advance()
        if not self.scheduler.has_work:
            self._retire_all()
            self._poll_s = IDLE_POLL_S
        elif self.memory.elastic.launch_allowed and self.step():
            self._poll_s = 0
        else:
            self._poll_s = STALLED_POLL_S
        if self._poll_s:
            self.planner.flush()
            self.memory.report(self.planner.last.exploit_gamma)
        self._report_status(IDLE_STATUS_S if self._poll_s else STATUS_S)
        return True

    def step(self) -> bool:
        """One step's life; False if nothing could be launched and nothing was in flight.

        At depth zero the step that retires here is the one launched; at depth one it is the one
        before. Its results apply only to the row epoch that it was launched with.
        """
        decision = self.planner.decision()
        plan = self.scheduler.schedule(decision)
        if not plan.rows:
            return self._retire_all()
        self._plans.append(plan)
        try:
            self._flights.append(self.runner.launch(plan))
        except Exception as error:
            self._steps_failed(error)
        while len(self._flights) > self.runner.depth:
            self._retire()
        return True

    def _retire(self) -> None:
        """Wait for the oldest step in flight, and hand on what it did."""
        try:
            done = self._flights[0].retire()
        except Exception as error:
            self._steps_failed(error)
            return
        self._flights.popleft()
        self._plans.popleft()
        self._num_failed_steps = 0
        self._deliver(self.scheduler.commit(done))
        self.planner.report(done)
        self.memory.report(self.planner.last.exploit_gamma)

    def _retire_all(self) -> bool:
        """Leave nothing in flight; False if nothing was."""
        found = bool(self._flights)
        while self._flights:
            self._retire()
        return found

    def _receive(self, message: ToEngine) -> None:
        match message:
            case Submit():
                self._submit(message)
            case Abort():
                finished = self.scheduler.abort(message.request_id)
                if finished is not None:
                    self._deliver(_ends([finished]))
            case Decision() | PlannerLink():
                self.planner.on_message(message)
            case TransitionRequest() | GrantAnswer() | AgentLink() | PoolMapRequest():
                self.memory.on_message(message)

    def _submit(self, message: Submit) -> None:
        prompt, prior = message.prompt_token_ids, message.prior_token_ids
        params = message.sampling
        sequence = Sequence(
            message.request_id,
            prompt,
            params,
            max_model_len=self.max_model_len,
            max_gamma=self.scheduler.drafting.max_gamma,
            eos_token_ids=self._eos_token_ids,
        )
        try:
            for name, token_ids in (("prompt", prompt), ("prior", prior)):
                if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self.vocab_size:
                    raise ValueError(f"{name} token ids must lie in [0, {self.vocab_size})")
            if params.stop:
                sequence.stop_detector = self._stop_detector(params.stop, params.min_tokens)
            refused = self.scheduler.submit(sequence, prior)
        except Exception as error:  # of one request: the others are not to notice
            refused = sequence.ended("error", str(error))
        if refused is not None:
            self._deliver(_ends([refused]))

    def _steps_failed(self, error: Exception) -> None:
        """End the rows of a step that raised, and of one in flight with it; none can be blamed."""
        log.get().error("a step failed", num_rows=len(self._plans[-1].rows), exc_info=error)
        self._num_failed_steps += 1
        while self._flights:
            # Whatever comes of it: its blocks change hands only when it has ended.
            with contextlib.suppress(Exception):
                self._flights.popleft().retire()
        while self._plans:
            plan = self._plans.popleft()
            self._deliver(self.scheduler.fail(plan, f"the engine failed in a step: {error}"))
        if self._num_failed_steps >= MAX_FAILED_STEPS:
            raise EngineFailure(f"{MAX_FAILED_STEPS} steps in a row failed: {error}") from error

    def _deliver(self, output: StepOutput) -> None:
        if output.request_ids or output.finished or output.prompt_logprobs:
            self.channel.send(output)

    def _report_status(self, every_s: float) -> None:
        now = self._clock()
        if now - self._status_at < every_s:
            return
        self._status_at = now
        if now - self._rss_at >= IDLE_STATUS_S:
            self._rss_at, self._rss_bytes = now, self._process.memory_info().rss
        scheduler, elastic = self.scheduler, self.memory.elastic
        counters = elastic.counters
        self.channel.send(
            Status(
                num_waiting=scheduler.num_waiting,
                num_running=scheduler.num_running,
                num_free_blocks=scheduler.blocks.num_free,
                num_total_blocks=scheduler.blocks.num_total,
                gamma=self.planner.gamma,
                policy_version=self.planner.last.policy_version,
                num_steps=scheduler.num_steps,
                num_generated_tokens=scheduler.num_generated_tokens,
                num_draft_tokens=scheduler.num_draft_tokens,
                num_accepted_tokens=scheduler.num_accepted_tokens,
                num_preemptions=scheduler.num_preemptions,
                residency=elastic.residency,
                draft_epoch=scheduler.blocks.draft.epoch,
                expanded=scheduler.blocks.expanded,
                num_expansions=counters.num_expansions,
                num_contractions=counters.num_contractions,
                num_granted_blocks=counters.num_granted_blocks,
                rss_bytes=self._rss_bytes,
            )
        )


def _ends(finished: list[Finished]) -> StepOutput:
    return StepOutput(request_ids=[], num_tokens=[], token_ids=b"", finished=finished)
