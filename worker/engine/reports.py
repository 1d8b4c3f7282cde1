"""What the planner and the memory agent are told: sums of steps, and how full the pool is. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from worker.engine.plan import StepResult
from worker.messages import Context, Pressure, StepSums, SumsKey, sums_key

REPORT_S = 0.02
PRESSURE_S = 0.2
MIN_PRESSURE_S = 0.01  # a pool that changes with every step need not be told of more often


@dataclass(slots=True)
class _Sums:
    context: Context
    num_steps: int = 0
    num_timed_steps: int = 0
    step_us: int = 0
    num_timed_emitted: int = 0
    num_timed_rows: int = 0
    num_emitted: int = 0
    num_prefill_tokens: int = 0
    catch_up_us: int = 0
    num_catch_up_tokens: int = 0
    num_catch_up_steps: int = 0
    mixed_step_us: int = 0
    draft_prefill_us: int = 0
    reached: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)


class ReportSums:
    """Sums of decode steps that may be added up, kept until they are taken."""

    def __init__(self) -> None:
        self._sums: dict[SumsKey, _Sums] = {}
        self._sent_at = float("-inf")

    def add(self, done: StepResult, context: Context) -> None:
        """Add a step that had decode rows.

        A step in which no draft was feasible teaches neither time nor acceptance: it counts
        under no decision, with what its catch-up cost.
        """
        plan = done.plan
        choice = plan.choice
        assert choice is not None
        teaches = context.feasible_max_gamma > 0
        decision_id = choice.decision_id if teaches else ""
        key = sums_key(decision_id, plan.gamma, choice.grid, choice.bucket, context)
        sums = self._sums.get(key)
        if sums is None:
            sums = self._sums[key] = _Sums(context)
        sums.context = context
        sums.num_steps += 1
        sums.num_emitted += done.num_emitted
        sums.num_prefill_tokens += context.num_prefill_tokens
        sums.catch_up_us += done.catch_up_us
        sums.num_catch_up_tokens += done.num_catch_up_tokens
        sums.num_catch_up_steps += done.num_catch_up_tokens > 0
        sums.draft_prefill_us += done.draft_prefill_us
        _add(sums.reached, done.reached)
        _add(sums.accepted, done.accepted)
        if teaches and context.num_prefill_tokens:
            sums.mixed_step_us += done.step_us
        elif teaches:
            sums.num_timed_steps += 1
            sums.step_us += done.step_us
            sums.num_timed_emitted += done.num_emitted
            sums.num_timed_rows += plan.num_decode_rows

    def due(self, now: float) -> bool:
        """Whether sums have waited long enough."""
        return bool(self._sums) and now - self._sent_at >= REPORT_S

    def take(self, now: float) -> list[StepSums]:
        """All sums, which start again from nothing."""
        self._sent_at = now
        taken = [
            StepSums(
                grid=grid,
                bucket=bucket,
                context=sums.context,
                gamma=gamma,
                decision_id=decision_id,
                num_steps=sums.num_steps,
                num_timed_steps=sums.num_timed_steps,
                step_us=sums.step_us,
                num_timed_emitted=sums.num_timed_emitted,
                num_timed_rows=sums.num_timed_rows,
                num_emitted=sums.num_emitted,
                num_prefill_tokens=sums.num_prefill_tokens,
                catch_up_us=sums.catch_up_us,
                num_catch_up_tokens=sums.num_catch_up_tokens,
                num_catch_up_steps=sums.num_catch_up_steps,
                mixed_step_us=sums.mixed_step_us,
                draft_prefill_us=sums.draft_prefill_us,
                reached=tuple(sums.reached),
                accepted=tuple(sums.accepted),
            )
            for (decision_id, gamma, grid, bucket, _, _), sums in self._sums.items()
        ]
        self._sums.clear()
        return taken


def _add(total: list[int], counts: list[int]) -> None:
    total += [0] * (len(counts) - len(total))
    for index, count in enumerate(counts):
        total[index] += count


@dataclass(slots=True)
class PressureReports:
    """Numbered reports of the pool's state, as it changes and at least every 200 ms."""

    _sequence: int = 0
    _last: tuple[object, ...] = ()
    _sent_at: float = float("-inf")

    def report(
        self,
        now: float,
        *,
        num_free_blocks: int,
        num_total_blocks: int,
        num_waiting: int,
        num_running: int,
        exploit_gamma: int,
        residency: str,
    ) -> Pressure | None:
        """The next report, or None if there is nothing new to say yet."""
        state = (num_free_blocks, num_total_blocks, num_waiting, num_running, exploit_gamma)
        patience = MIN_PRESSURE_S if (*state, residency) != self._last else PRESSURE_S
        if now - self._sent_at < patience:
            return None
        self._sequence += 1
        self._last, self._sent_at = (*state, residency), now
        return Pressure(
            sequence=self._sequence,
            num_free_blocks=num_free_blocks,
            num_total_blocks=num_total_blocks,
            num_waiting=num_waiting,
            num_running=num_running,
            exploit_gamma=exploit_gamma,
            residency=residency,
        )
