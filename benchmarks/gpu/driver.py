"""Drives Nightjar's engine in this process: closed loops, steady steps, arrivals in real time."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gpu.load import Arrival, Latencies, prompts
from worker.engine.engine import Engine
from worker.engine.plan import StepResult
from worker.messages import Abort, Progress, SamplingParams, StepOutput, Submit, ToEngine, ToFront

NUM_SETTLING = 4  # steady steps that pass before those that are timed
MAX_STEADY_TURNS = 20_000


class JobFailed(Exception):
    """A job could not be done; the engine is ready for the next one."""


class Feed:
    """The channel's place: messages that are due go to the engine, outputs are kept."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._begun = say, time.perf_counter()
        self.inbox: list[ToEngine] = []
        self.due: deque[tuple[float, Submit]] = deque()
        self.outputs: list[StepOutput] = []

    def poll(self, timeout_s: float) -> list[ToEngine]:
        """What is due; waits only where something will be due within `timeout_s`."""
        now = time.perf_counter()
        if self.due and not self.inbox and 0 < self.due[0][0] - now <= timeout_s:
            time.sleep(self.due[0][0] - now)
            now = time.perf_counter()
        while self.due and self.due[0][0] <= now:
            self.inbox.append(self.due.popleft()[1])
        messages, self.inbox = self.inbox, []
        return messages

    def send(self, message: ToFront) -> None:
        """Keep outputs, show progress."""
        if isinstance(message, StepOutput):
            self.outputs.append(message)
        elif isinstance(message, Progress):
            elapsed = time.perf_counter() - self._begun
            self._say(f"{elapsed:6.1f} s: {message.stage} {message.detail}".rstrip())


@dataclass(frozen=True)
class Retired:
    """A step that has retired, and when."""

    at: float
    done: StepResult


class Driver:
    """One engine, one job at a time."""

    def __init__(self, engine: Engine, feed: Feed) -> None:
        self.engine, self.feed = engine, feed
        self.retired: list[Retired] = []
        self._ids = itertools.count()
        self._open: set[int] = set()
        report = engine.planner.report

        def noted(done: StepResult) -> None:
            self.retired.append(Retired(time.perf_counter(), done))
            report(done)

        setattr(engine.planner, "report", noted)  # noqa: B010

    def closed(
        self,
        asked: Sequence[list[int]],
        max_tokens: int,
        *,
        at_once: int = 0,
        max_gamma: int | None = None,
        temperature: float = 0.0,
    ) -> dict[str, Any]:
        """Answer prompts, all at once or at most so many; seconds, and ids by request."""
        self.retired.clear()
        pending = deque(
            self._request(ids, max_tokens, max_gamma=max_gamma, temperature=temperature, seed=seed)
            for seed, ids in enumerate(asked)
        )
        answers: dict[int, list[int]] = {request.request_id: [] for request in pending}
        begin = time.perf_counter()
        for _ in range(at_once or len(pending)):
            if pending:
                self._submit(pending.popleft())
        while self._open:
            for request_id, ids in self._turn():
                answers[request_id] += ids
            while pending and at_once and len(self._open) < at_once:
                self._submit(pending.popleft())
        seconds = time.perf_counter() - begin
        assert all(len(ids) == max_tokens for ids in answers.values()), "an answer is too short"
        return {"seconds": seconds, "tokens": list(answers.values())}

    def steady(
        self,
        asked: Sequence[list[int]],
        *,
        gamma: int,
        num_steps: int,
        acceptance: float | None = None,
        on_start: Callable[[], None] | None = None,
        on_end: Callable[[], None] | None = None,
    ) -> dict[str, Any]:
        """Time steps in which every row decodes with `gamma` drafts and nothing else happens.

        Args:
            asked: A prompt for each row.
            gamma: Drafts of each row; the engine's own gamma must not be below it.
            num_steps: Steps that count.
            acceptance: Chance of a draft to be accepted, given those before it were; None takes
                what the models agree on.
            on_start: Called when the first step that counts is about to run.
            on_end: Called after the last one.

        Raises:
            JobFailed: The engine never reached such steps, or cannot pretend an acceptance.
        """
        self._pretend(acceptance)
        self.retired.clear()
        for seed, ids in enumerate(asked):
            room = self.engine.max_model_len - len(ids)
            self._submit(self._request(ids, room, max_gamma=gamma, temperature=0.0, seed=seed))
        run: list[Retired] = []
        for _ in range(MAX_STEADY_TURNS):
            self._turn()
            for step in self.retired:
                run = [*run, step] if _is_steady(step.done, len(asked), gamma) else []
                if len(run) == NUM_SETTLING and on_start is not None:
                    on_start()
            self.retired.clear()
            if len(run) >= NUM_SETTLING + num_steps:
                break
            if len(self._open) < len(asked):
                raise JobFailed(f"gamma {gamma}: rows ended before every row drafted")
        else:
            raise JobFailed(f"gamma {gamma}: the engine never ran steady steps")
        if on_end is not None:
            on_end()
        self.reset()
        counted = run[NUM_SETTLING - 1 :]
        periods = [(b.at - a.at) * 1e3 for a, b in itertools.pairwise(counted)]
        emitted = [step.done.num_emitted for step in counted[1:]]
        total_s = counted[-1].at - counted[0].at
        context = [len(row.sequence.token_ids) for row in counted[-1].done.plan.rows]
        return {
            "gamma": gamma,
            "batch": len(asked),
            "num_steps": len(periods),
            "step_ms": round(statistics.mean(periods), 4),
            "median_ms": round(statistics.median(periods), 4),
            "max_ms": round(max(periods), 4),
            "reported_ms": round(statistics.mean(s.done.step_us for s in counted[1:]) / 1e3, 4),
            "tokens_per_row_step": round(sum(emitted) / len(emitted) / len(asked), 3),
            "tok_s": round(sum(emitted) / total_s, 1),
            "last_context": max(context),
        }

    def open(
        self, wanted: Sequence[Arrival], *, vocab: int, limit_s: float
    ) -> dict[str, float | bool | int]:
        """Submit requests when they are due; ends with the last first token, or once it failed."""
        self.retired.clear()
        begin = time.perf_counter() + 0.5
        times = Latencies([begin + due for due, _, _ in wanted], limit_s)
        index_of: dict[int, int] = {}
        for index, (due, prompt, answer) in enumerate(wanted):
            ids = prompts(1, prompt, vocab=vocab, seed=index)[0]
            request = self._request(ids, answer, max_gamma=None, temperature=0.0, seed=index)
            index_of[request.request_id] = index
            self._open.add(request.request_id)
            self.feed.due.append((begin + due, request))
        while True:
            found = self._turn()
            now = time.perf_counter()
            for request_id, ids in found:
                times.add(index_of[request_id], len(ids), now)
            if times.complete or times.failed(now):
                break
        summary = times.summary(now)
        self.reset()
        return summary

    def reset(self) -> None:
        """End whatever a job has left."""
        while self.feed.due:
            self._open.discard(self.feed.due.popleft()[1].request_id)
        self._abort_all()
        self._pretend(None)
        self.retired.clear()

    def _request(
        self,
        ids: list[int],
        max_tokens: int,
        *,
        max_gamma: int | None,
        temperature: float,
        seed: int,
    ) -> Submit:
        params = SamplingParams(
            temperature=temperature,
            seed=seed,
            max_tokens=max_tokens,
            ignore_eos=True,
            max_gamma=max_gamma,
        )
        return Submit(request_id=next(self._ids), prompt_token_ids=ids, sampling=params)

    def _submit(self, request: Submit) -> None:
        self._open.add(request.request_id)
        self.feed.inbox.append(request)

    def _turn(self) -> list[tuple[int, list[int]]]:
        """One turn of the engine's loop; the ids that came of it, by request."""
        self.engine.turn()
        found = []
        for output in self.feed.outputs:
            ids, at = memoryview(output.token_ids).cast("i"), 0
            for request_id, count in zip(output.request_ids, output.num_tokens, strict=True):
                found.append((request_id, ids[at : at + count].tolist()))
                at += count
            for finished in output.finished:
                if finished.reason == "error":
                    raise JobFailed(f"a request failed: {finished.error}")
                self._open.discard(finished.request_id)
        self.feed.outputs.clear()
        return found

    def _abort_all(self) -> None:
        self.feed.inbox += [Abort(request_id=request_id) for request_id in self._open]
        while self._open:
            self._turn()
        self._turn()  # a step in flight retires

    def _pretend(self, chance: float | None) -> None:
        """Accept drafts at random, in a benchmark alone; None goes back to comparing them."""
        runner = self.engine.runner
        if hasattr(runner, "synthetic_acceptance"):
            runner.synthetic_acceptance = chance
        elif chance is not None:
            raise JobFailed("this engine's runner has no synthetic_acceptance")


def _is_steady(done: StepResult, num_rows: int, gamma: int) -> bool:
    plan = done.plan
    return plan.num_decode_rows == len(plan.rows) == num_rows and all(
        row.gamma == gamma and row.num_catch_up == 0 for row in plan.rows
    )
