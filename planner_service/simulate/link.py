"""A simulated worker's side of the planner: which gamma it trusts, what it reports, when it asks.

The same order of trust as the worker's, with a stream that never breaks: the held decision of
the bucket for its steps; the newest table for 60 s; gamma 0.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple, Protocol

from nightjar.buckets import BucketGrid
from nightjar.errors import EngineFailure
from planner_service.context import MAX_GAMMA, Context, Outcome, Profile
from planner_service.ledger import Ledger
from planner_service.planner import Decision, Planner, Report, Stream
from planner_service.policies.policy import Policy, PolicySpec
from planner_service.versions import EVERYONE, Book

REPORT_S = 0.02
TABLE_S = 60.0
NO_BUCKET = -1
_NOTHING = (0, 0)  # where a table says nothing


class Word(NamedTuple):
    """A gamma for one step, and on whose word."""

    gamma: int
    bucket: int = NO_BUCKET
    decision_id: str = ""
    held: bool = False
    explored: bool = False
    num_extra_drafts: int = 0


class Ran(NamedTuple):
    """What a step did, as the worker measured it."""

    word: Word
    context: Context
    possible_gamma: int  # feasible once the draft has caught up: what a question is about
    gamma: int
    step_us: int
    catch_up_us: int
    num_catch_up_tokens: int
    draft_prefill_us: int
    num_emitted: int
    reached: list[int]
    accepted: list[int]


class Chooser(Protocol):
    """Whoever says which gamma runs."""

    def choose(self, batch_size: int, num_kv_tokens: int) -> Word:
        """The gamma for a batch, not yet clamped to what is feasible."""
        ...

    def ran(self, step: Ran) -> None:
        """A step ended."""
        ...


class _Held:
    __slots__ = ("num_steps_left", "word")

    def __init__(self, word: Word, num_steps_left: int) -> None:
        self.word, self.num_steps_left = word, num_steps_left


class _Sums:
    """Sums over steps with the same bucket, gamma and decision."""

    __slots__ = ("accepted", "context", "numbers", "reached")

    def __init__(self) -> None:
        self.context = Context(0)
        # num_steps to draft_prefill_us of `Outcome`, then num_catch_up_steps and mixed_step_us
        self.numbers = [0] * 12
        self.reached = [0] * MAX_GAMMA
        self.accepted = [0] * MAX_GAMMA

    def add(self, step: Ran) -> None:
        context, n = step.context, self.numbers
        self.context = context
        n[0] += 1
        if context.num_prefill_tokens and context.feasible_max_gamma > 0:
            n[11] += step.step_us
        elif context.feasible_max_gamma > 0:
            n[1] += 1
            n[2] += step.step_us
            n[3] += step.num_emitted
            n[4] += context.batch_size
        n[5] += step.num_emitted
        n[6] += context.num_prefill_tokens
        n[7] += step.catch_up_us
        n[8] += step.num_catch_up_tokens
        n[9] += step.draft_prefill_us
        n[10] += step.num_catch_up_tokens > 0
        for i, count in enumerate(step.reached):
            self.reached[i] += count
        for i, count in enumerate(step.accepted):
            self.accepted[i] += count

    def outcome(self) -> Outcome:
        n = self.numbers
        num = next((i for i, count in enumerate(self.reached) if not count), MAX_GAMMA)
        reached, accepted = tuple(self.reached[:num]), tuple(self.accepted[:num])
        return Outcome(
            n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], reached, accepted, *n[10:]
        )


class Planned:
    """Asks a real planner core that lives in this process."""

    def __init__(
        self, policy: Policy, *, seed: int, clock: Callable[[], float], answer_delay_steps: int = 1
    ) -> None:
        """Make a planner with one policy.

        Args:
            policy: Decides and learns.
            seed: Of the policy's randomness.
            clock: Simulated seconds.
            answer_delay_steps: Steps that run between a question and its answer.
        """
        spec = PolicySpec(name="policy", summary="", parameters=(), make=lambda values: policy)
        self._planner = Planner(
            registry={spec.name: spec},
            ledger=Ledger(stored=False),
            incarnation="simulated",
            rng=random.Random(seed),
            clock=clock,
        )
        self._planner.set_book(Book().activate(spec.name, {}, EVERYONE, 0, "operator"))
        profile = Profile(
            target="simulated",
            draft="simulated",
            proposer="draft_model",
            dtype="bfloat16",
            device="simulated",
            tensor_parallel_size=1,
            engine="simulated",
        )
        self._planner.register(profile)
        self._stream = Stream(profile, "simulated")
        self._clock, self._delay = clock, answer_delay_steps
        self._latest: Decision | None = None
        self._arrived_at = 0.0
        self._grid: BucketGrid | None = None
        self._held: dict[int, _Held] = {}  # by bucket of the grid
        self._answer: tuple[int, Decision] | None = None  # under way, with the steps it takes
        self._sums: dict[tuple[str, int, int, int, bool], _Sums] = {}
        self._sent_at = -1.0

    def choose(self, batch_size: int, num_kv_tokens: int) -> Word:
        """The gamma for a batch, by the order of trust; not yet clamped to what is feasible."""
        latest = self._latest
        if latest is None:
            return Word(0)
        bucket = self._bucket(batch_size, num_kv_tokens)
        held = self._held.get(bucket)
        if held is not None:
            return held.word
        choice, asked = latest.choice, latest.context
        if bucket == self._bucket(asked.batch_size, asked.num_kv_tokens):
            gamma = choice.gamma
        else:
            gamma = choice.table.get(bucket, _NOTHING)[0]
        if self._clock() - self._arrived_at > TABLE_S:
            gamma = 0
        extra = choice.num_extra_drafts
        return Word(gamma, bucket, latest.decision_id, num_extra_drafts=extra)

    def _bucket(self, batch_size: int, num_kv_tokens: int) -> int:
        if self._grid is None:
            return batch_size
        return self._grid.bucket(batch_size, num_kv_tokens)

    def ran(self, step: Ran) -> None:
        """Add a step up; hand over what is due, and ask where a decision is missing."""
        word, context = step.word, step.context
        teaches = context.feasible_max_gamma > 0
        decision_id = word.decision_id if teaches else ""
        key = (decision_id, step.gamma, word.bucket, context.batch_size, teaches)
        sums = self._sums.get(key)
        if sums is None:
            sums = self._sums[key] = _Sums()
        sums.add(step)
        hold_ended = False
        if teaches and word.held:
            held = self._held[word.bucket]
            held.num_steps_left -= 1
            if held.num_steps_left <= 0:
                del self._held[word.bucket]
                hold_ended = True
        if self._answer is not None:
            self._wait(*self._answer)
        bucket = self._bucket(context.batch_size, context.num_kv_tokens)
        asks = self._answer is None and bucket not in self._held
        if asks or hold_ended or self._clock() - self._sent_at >= REPORT_S:
            self._report()
        if asks:
            self._ask(step)

    def _report(self) -> None:
        self._sent_at = self._clock()
        for (decision_id, gamma, *_), sums in self._sums.items():
            report = Report(sums.context, gamma, decision_id, sums.outcome())
            self._planner.learn(self._stream, report)
        self._sums.clear()

    def _ask(self, step: Ran) -> None:
        question = step.context._replace(feasible_max_gamma=step.possible_gamma)
        decision = self._planner.decide(self._stream, question)
        if self._planner.num_policy_faults:
            raise EngineFailure("the policy failed and was withdrawn; the log says why")
        if self._delay:
            self._answer = (self._delay, decision)
        else:
            self._take(decision)

    def _wait(self, num_steps: int, decision: Decision) -> None:
        if num_steps > 1:
            self._answer = (num_steps - 1, decision)
        else:
            self._answer = None
            self._take(decision)

    def _take(self, decision: Decision) -> None:
        """A decision arrived; one of another grid ends all that was held."""
        choice, asked = decision.choice, decision.context
        if choice.grid != self._grid:
            self._grid = choice.grid
            self._held.clear()
        self._latest, self._arrived_at = decision, self._clock()
        bucket = self._bucket(asked.batch_size, asked.num_kv_tokens)
        word = Word(
            choice.gamma,
            bucket,
            decision.decision_id,
            True,
            choice.explored,
            choice.num_extra_drafts,
        )
        self._held[bucket] = _Held(word, choice.hold_steps)
