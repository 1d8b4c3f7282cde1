"""The step loop's planner and memory agent: what it asks of them never waits for either."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from worker.engine.decisions import Choice, Decisions
from worker.engine.elastic import ElasticMemory
from worker.engine.plan import StepResult
from worker.engine.reports import PressureReports, ReportSums
from worker.engine.scheduler import Chooser, Scheduler
from worker.messages import (
    AgentLink,
    Decision,
    GrantAnswer,
    PlannerLink,
    PoolMap,
    PoolMapRequest,
    Reports,
    ToFront,
    TransitionRequest,
)

CPU_SAMPLE_S = 0.1

Send = Callable[[ToFront], None]
Clock = Callable[[], float]


class CpuMeter:
    """Share of the engine's threads that is busy, sampled at most every 100 ms."""

    def __init__(self, num_threads: int, clock: Clock) -> None:
        self._num_threads, self._clock = num_threads, clock
        self._at, self._used = clock(), time.process_time()
        self._utilization = 0.0

    def __call__(self) -> float:
        """The newest sample, [0, 1]."""
        now = self._clock()
        if now - self._at >= CPU_SAMPLE_S:
            used = time.process_time()
            share = (used - self._used) / ((now - self._at) * self._num_threads)
            self._at, self._used, self._utilization = now, used, min(1.0, share)
        return self._utilization


class Planner:
    """Decisions in, sums of steps out. Without a planner a fixed gamma and no reports."""

    def __init__(
        self, *, planned: bool, fixed_gamma: int, send: Send, clock: Clock, cpu: CpuMeter
    ) -> None:
        self._planned, self._send, self._clock, self._cpu = planned, send, clock, cpu
        self._decisions = Decisions(planned=planned, fixed_gamma=fixed_gamma)
        self._sums = ReportSums()
        self.last = self._decisions.choose(0, 0, clock())  # choice of the last decode step
        self.gamma = 0  # that it ran with

    def on_message(self, message: Decision | PlannerLink) -> None:
        """Take what came from the planner's stream."""
        if isinstance(message, Decision):
            self._decisions.take(message, self._clock())
        else:
            self._decisions.link(message.connected, self._clock())

    def decision(self) -> Chooser:
        """The newest that arrived, to be looked up by the batch that is scheduled."""
        now = self._clock()

        def choose(batch_size: int, num_kv_tokens: int) -> Choice:
            return self._decisions.choose(batch_size, num_kv_tokens, now)

        return choose

    def report(self, done: StepResult) -> None:
        """Add a step up, hand over what is due, and ask where a decision is missing."""
        plan = done.plan
        if plan.choice is None or plan.context is None:
            return
        self.last, self.gamma = plan.choice, plan.gamma
        if not self._planned:
            return
        context = msgspec.structs.replace(plan.context, cpu_utilization=self._cpu())
        self._sums.add(done, context)
        hold_ended = context.feasible_max_gamma > 0 and self._decisions.ran(plan.choice)
        now = self._clock()
        asks = self._decisions.asks(context.batch_size, context.num_kv_tokens, now)
        if self._decisions.connected and (asks or hold_ended or self._sums.due(now)):
            # A question is about what could run, had the draft caught up: a decision that knew
            # of nothing else would never let it.
            ask = msgspec.structs.replace(context, feasible_max_gamma=plan.possible_gamma)
            self._send(
                Reports(
                    reports=self._sums.take(now),
                    ask=ask if asks else None,
                    session=self._decisions.session,
                )
            )

    def flush(self) -> None:
        """Hand over what is left when no steps follow."""
        now = self._clock()
        if self._decisions.connected and self._sums.due(now):
            session = self._decisions.session
            self._send(Reports(reports=self._sums.take(now), ask=None, session=session))


class Memory:
    """Elastic memory and the agent that drives it; without an agent the draft stays."""

    def __init__(
        self,
        scheduler: Scheduler,
        elastic: ElasticMemory,
        *,
        has_agent: bool,
        send: Send,
        clock: Clock,
    ) -> None:
        self.elastic = elastic
        self._scheduler, self._has_agent = scheduler, has_agent
        self._send, self._clock = send, clock
        self._pressure = PressureReports()

    def on_message(
        self, message: TransitionRequest | GrantAnswer | AgentLink | PoolMapRequest
    ) -> None:
        """Take what came from the agent's stream."""
        if isinstance(message, PoolMapRequest):
            blocks = self._scheduler.blocks
            ranges = [(first, count, owner.value) for first, count, owner in blocks.ranges()]
            base, extra = blocks.num_base_blocks, blocks.num_extra_blocks
            self._send(PoolMap(ranges=ranges, num_base_blocks=base, num_extra_blocks=extra))
            return
        self._send_all(self.elastic.on_message(message))

    def advance(self) -> None:
        """Let a transition go on; nothing is in flight unless steps may be launched."""
        self._send_all(self.elastic.after_retire())
        self._scheduler.drafting.set_resident(self.elastic.draft_usable)

    def report(self, exploit_gamma: int) -> None:
        """Tell how full the pool is, as it changes."""
        if not self._has_agent:
            return
        scheduler = self._scheduler
        report = self._pressure.report(
            self._clock(),
            num_free_blocks=scheduler.blocks.num_free,
            num_total_blocks=scheduler.blocks.num_total,
            num_waiting=scheduler.num_waiting,
            num_running=scheduler.num_running,
            exploit_gamma=exploit_gamma,
            residency=self.elastic.residency,
        )
        if report is not None:
            self._send(report)

    def _send_all(self, messages: list[ToFront]) -> None:
        for message in messages:
            self._send(message)
