"""One engine in this process, hot-swapped from arm to arm: slices of closed and open loops."""

from __future__ import annotations

import gc
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from gpu.driver import Driver, Feed, JobFailed
from gpu.load import percentile

from paper.arms import Arm
from paper.asks import Ask
from paper.design import Design
from paper.learned import Learned, of_arm
from paper.memory import MemoryLink
from paper.record import Recorder
from worker.engine.engine import Engine
from worker.messages import PlannerLink, Ready, Reports, SamplingParams, Submit, ToFront

Slice = dict[str, Any]


class ArmFeed(Feed):
    """The front's place: reports go to the arm whose turn it is, the agent's words to the agent."""

    def __init__(self, say: Callable[[str], None], agent: MemoryLink | None) -> None:
        super().__init__(say)
        self.arm: Arm | None = None
        self.agent = agent

    def poll(self, timeout_s: float) -> list[Any]:
        """As the driver's, and what the memory agent says."""
        if self.agent is not None:
            self.inbox += self.agent.messages()
        return super().poll(timeout_s)

    def send(self, message: ToFront) -> None:
        """Answers to questions arrive with the next turn, as over a stream."""
        if isinstance(message, Reports):
            if self.arm is not None and (answer := self.arm.take(message)) is not None:
                self.inbox.append(answer)
        elif self.agent is None or not self.agent.takes(message):
            super().send(message)


class Rig(Driver):
    """Runs slices."""

    feed: ArmFeed

    def __init__(
        self,
        engine: Engine,
        ready: Ready,
        feed: ArmFeed,
        design: Design,
        known: Sequence[Mapping[str, Learned]] = (),
    ) -> None:
        """Run nothing yet; `known` is what earlier runs taught the arms."""
        super().__init__(engine, feed)
        self._ready, self._design, self._known = ready, design, known
        self.recorder = Recorder()
        self._arms: dict[str, Arm] = {}
        self._category: dict[int, str] = {}
        self._prompt_tokens: dict[int, int] = {}
        self._cut: dict[int, int] = {}  # tokens at which an answer is cut short
        self._ended: list[int] = []
        self._asked_at: dict[int, float] = {}
        self._counts: Counter[int] = Counter()  # tokens of open requests
        feed.inbox.append(PlannerLink(connected=True))

    def arm(self, name: str) -> Arm:
        """The arm of that name, which keeps what it has learned."""
        if name not in self._arms:
            known = of_arm(self._known, name)
            self._arms[name] = Arm(name, self._ready, self._design.seed, known)
        return self._arms[name]

    @property
    def arms(self) -> Mapping[str, Arm]:
        """All arms that have had a turn."""
        return self._arms

    def closed_slice(self, name: str, num_rows: int, asks: Iterator[Ask]) -> Slice:
        """A closed loop: from when all rows have come to decode, for a slice's length.

        Raises:
            JobFailed: They did not in time.
        """
        arm = self._begin(name, num_rows)
        first = {self._ask(next(asks)) for _ in range(num_rows)}
        begin = time.perf_counter()
        while not self._has_settled(first):
            self._step(lambda: self._ask(next(asks)))
            if time.perf_counter() - begin > self._design.settle_s:
                self.reset()
                raise JobFailed(f"{num_rows} rows did not come to decode in time")
        self.retired.clear()
        settled_s = time.perf_counter() - begin
        planner_s, latencies, tokens = arm.planner_s, [], 0
        begin = now = time.perf_counter()
        while now - begin < self._design.slice_s:
            count, ended = self._step(lambda: self._ask(next(asks)))
            tokens += count
            latencies += ended
            now = time.perf_counter()
        seconds = now - begin
        return {
            **self._figures(arm, seconds, planner_s),
            "tok_s": tokens / seconds,
            "num_answers": len(latencies),
            "settled_s": round(settled_s, 3),
            **self._end(f"closed {num_rows}", is_busy=True),
        }

    def trace_slice(self, name: str, asks: Sequence[Ask], place: str) -> Slice:
        """A whole trace, to its last answer, and drained; `place` is its name in the record."""
        arm = self._begin(name, 1)
        planner_s, tokens, answers = arm.planner_s, 0, 0
        latencies: list[float] = []
        first: dict[int, float] = {}
        begin = time.perf_counter() + 0.05
        for ask in asks:
            self._ask(ask, begin + ask.due_s)
        now = begin
        while answers < len(asks):
            count, ended = self._step(lambda: None, first)
            tokens += count
            answers += len(ended)
            latencies += ended
            now = time.perf_counter()
            if now - begin > asks[-1].due_s + self._design.drain_s:
                self.reset()
                raise JobFailed(f"{len(asks) - answers} answers of a trace did not end in time")
        ttft, ordered = sorted(first.values()), sorted(latencies)
        seconds = now - begin
        return {
            **self._figures(arm, seconds, planner_s),
            "tok_s": tokens / seconds,
            "num_answers": answers,
            "latency_s": statistics.mean(latencies),
            "latency_p99_s": percentile(ordered, 99),
            "ttft_s": statistics.mean(ttft),
            "ttft_p99_s": percentile(ttft, 99),
            **self._end(place, is_busy=False),
        }

    def _begin(self, name: str, num_rows: int) -> Arm:
        """The arm's turn: its word first, so that nothing runs under another's."""
        arm = self.arm(name)
        self.retired.clear()
        self.feed.arm = arm
        if self.feed.agent is not None:
            self.feed.agent.allow(arm.is_elastic)
        self.feed.inbox.append(arm.begin(num_rows))
        gc.collect()
        gc.disable()  # a collection in a slice would be the slice's
        return arm

    def _end(self, place: str, *, is_busy: bool) -> Slice:
        """Record what ran, end what runs, and get the draft back."""
        before: float | None = None
        for step in self.retired:
            done, gap_us = step.done, None
            if is_busy and before is not None:
                own_us = done.step_us + done.catch_up_us + done.draft_prefill_us
                gap_us = (step.at - before) * 1e6 - own_us
            before = step.at
            self.recorder.add(place, done, self._category, gap_us)
        for request_id in self._open:
            if self._counts[request_id]:
                self._note(place, request_id, ended=False)
        for request_id in self._ended:
            cut_at = self._cut.get(request_id)
            self._note(place, request_id, ended=self._counts[request_id] != cut_at)
        self.reset()
        gc.enable()
        self.feed.arm = None
        for table in (self._category, self._prompt_tokens, self._asked_at, self._counts):
            table.clear()
        self._cut.clear()
        self._ended.clear()
        counters = self.engine.memory.elastic.counters
        if self.feed.agent is not None:
            self._bring_back()
        return {"num_expansions": counters.num_expansions}  # since the start

    def _bring_back(self) -> None:
        """Idle until the draft is resident: the next arm must not begin without it."""
        assert self.feed.agent is not None
        elastic, until = self.engine.memory.elastic, time.perf_counter() + self._design.drain_s
        while elastic.residency != "resident":
            self._turn()
            if time.perf_counter() > until:
                raise JobFailed(f"the draft did not come back: it is {elastic.residency}")

    def _figures(self, arm: Arm, seconds: float, planner_s: float) -> Slice:
        steps = [step.done for step in self.retired if step.done.plan.num_decode_rows]
        gammas = Counter(step.plan.gamma for step in steps)
        drafts = accepted = 0
        for step in steps:
            drafts += sum(row.num_drafts for row in step.rows)
            accepted += sum(row.num_accepted for row in step.rows)
        emitted = sum(step.num_emitted for step in steps)
        return {
            "arm": arm.name,
            "seconds": seconds,
            "num_steps": len(steps),
            "decode_tok_s": emitted / seconds,
            "mean_rows": statistics.mean(s.plan.num_decode_rows for s in steps) if steps else 0,
            "gammas": {str(gamma): count for gamma, count in sorted(gammas.items())},
            "acceptance": accepted / drafts if drafts else None,
            "planner_share": (arm.planner_s - planner_s) / seconds,
        }

    def _note(self, place: str, request_id: int, *, ended: bool) -> None:
        category, num_prompt = self._category[request_id], self._prompt_tokens[request_id]
        num_answer = self._counts[request_id]
        self.recorder.asked(place, category, num_prompt, num_answer, ended=ended)

    def _has_settled(self, first: set[int]) -> bool:
        """Whether the rows that began have their first tokens, and the draft their prompts.

        Not whether all decode at once: with many rows, some row's prompt is always on its way.
        """
        if not self.retired or not all(self._counts[request_id] for request_id in first):
            return False
        plan = self.retired[-1].done.plan
        if plan.context is None or plan.choice is None:
            return False
        behind = plan.context.sum_stale_tokens - 2 * len(first)
        return plan.choice.gamma == 0 or behind <= self._design.max_prompt

    def _ask(self, ask: Ask, due: float | None = None) -> int:
        """Send a request, or have it sent when it is due; its id."""
        max_tokens = max(2, round(ask.share * self._design.max_tokens))
        params = SamplingParams(
            temperature=self._design.temperature,
            seed=ask.seed,
            max_tokens=max_tokens,
        )
        ids = list(ask.prompt.token_ids)
        request = Submit(request_id=next(self._ids), prompt_token_ids=ids, sampling=params)
        self._category[request.request_id] = ask.prompt.category
        if ask.share < 1:
            self._cut[request.request_id] = max_tokens
        self._prompt_tokens[request.request_id] = len(ids)
        self._asked_at[request.request_id] = time.perf_counter() if due is None else due
        if due is None:
            self._submit(request)
        else:
            self._open.add(request.request_id)
            self.feed.due.append((due, request))
        return request.request_id

    def _step(
        self, on_end: Callable[[], None], first: dict[int, float] | None = None
    ) -> tuple[int, list[float]]:
        """A turn: tokens that came, and the latency of each answer that ended."""
        before = set(self._open)
        found = self._turn()
        now = time.perf_counter()
        for request_id, ids in found:
            self._counts[request_id] += len(ids)
            if first is not None:
                first.setdefault(request_id, now - self._asked_at[request_id])
        ended = []
        for request_id in before - self._open:
            ended.append(now - self._asked_at[request_id])
            self._ended.append(request_id)
            on_end()
        return sum(len(ids) for _, ids in found), ended
