"""An arm: a policy in a real planner core of its own, which learns from its own slices alone."""

from __future__ import annotations

import random
import time
from typing import Any

from nightjar.buckets import BucketGrid
from paper.design import ELASTIC, OFF
from paper.learned import Keeper, Learned
from planner_service.context import Context, Outcome, Profile
from planner_service.ledger import Ledger
from planner_service.planner import Decision, Planner, Report, Stream
from planner_service.policies import BUILT_IN
from planner_service.versions import EVERYONE, Book
from worker.messages import Context as WorkerContext
from worker.messages import Decision as DecisionMessage
from worker.messages import Ready, Reports, StepSums

_OUTCOME = [name for name in Outcome._fields if name != "propensity"]
_CONTEXT = WorkerContext.__struct_fields__


class Arm:
    """Takes the engine's reports and answers its questions, as a planner service would."""

    def __init__(self, name: str, ready: Ready, seed: int, known: Learned) -> None:
        """Activate the policy.

        Args:
            name: NAME or NAME:KEY=VALUE,…, and `+elastic` behind it.
            ready: The engine's facts.
            seed: Of the policy's draws.
            known: What earlier runs taught it.

        Raises:
            InvalidRequest: There is no such policy or parameter.
        """
        self.name = name
        self.is_elastic = name.endswith(ELASTIC)
        policy, _, rest = name.removesuffix(ELASTIC).partition(":")
        given = dict(pair.split("=", 1) for pair in rest.split(",")) if rest else {}
        self._ready = ready
        self.planner_s = 0.0  # spent in here, on the engine's thread
        self.num_questions = 0
        ledger = Ledger(stored=True)
        self._keeper = Keeper(ledger, known)
        self._session = known.session
        self._planner = Planner(
            registry=BUILT_IN,
            ledger=ledger,
            incarnation=name,
            rng=random.Random(seed),
            clock=time.monotonic,
        )
        parameters = self._planner.prepare(policy, given, EVERYONE)
        self._planner.set_book(Book().activate(policy, parameters, EVERYONE, 0, "operator"))
        profile = Profile(
            target=ready.target_identity,
            draft=ready.draft_identity,
            proposer=ready.proposer,
            dtype=ready.dtype,
            device=ready.device,
            tensor_parallel_size=1,
            engine=ready.build,
        )
        self._planner.register(profile)
        self._stream = Stream(profile, "paper")
        self.num_known_steps = round(self._planner.stats(profile).totals.steps)

    def learned(self) -> Learned:
        """What was learned since the arm was made."""
        return Learned(groups=self._keeper.flush(time.monotonic()), session=self._session)

    def begin(self, num_rows: int) -> DecisionMessage:
        """The word on a batch of so many rows, sent unasked when this arm's turn begins."""
        ready = self._ready
        gamma = ready.max_gamma
        asked = Context(
            num_rows,
            feasible_max_gamma=gamma,
            max_gamma=gamma,
            max_batch_size=ready.max_batch_size,
        )
        return self._decide(asked, self._session)

    def take(self, reports: Reports) -> DecisionMessage | None:
        """Learn from reports, and answer the question if there is one.

        Raises:
            RuntimeError: The policy failed.
        """
        began = time.perf_counter()
        for sums in reports.reports:
            # What ran under the arm before may still come: it is not this one's to learn from.
            if not sums.decision_id or sums.decision_id.startswith(f"{self.name}-"):
                self._learn(sums)
        answer = None
        if reports.ask is not None:
            self.num_questions += 1
            answer = self._decide(self._context(reports.ask), reports.session)
        if self._planner.num_policy_faults:
            raise RuntimeError(f"policy {self.name} failed and was withdrawn")
        self.planner_s += time.perf_counter() - began
        return answer

    def _learn(self, sums: StepSums) -> None:
        outcome = Outcome(**{name: getattr(sums, name) for name in _OUTCOME})
        report = Report(self._context(sums.context), sums.gamma, sums.decision_id, outcome)
        self._planner.learn(self._stream, report)

    def _context(self, context: WorkerContext) -> Context:
        values: dict[str, Any] = {name: getattr(context, name) for name in _CONTEXT}
        ready = self._ready
        return Context(**values, max_gamma=ready.max_gamma, max_batch_size=ready.max_batch_size)

    def _decide(self, asked: Context, session: bytes) -> DecisionMessage:
        decision: Decision = self._planner.decide(self._stream, asked, session)
        self._session = decision.session
        choice = decision.choice
        grid = choice.grid or BucketGrid(tuple(range(1, asked.max_batch_size + 1)))
        bucket = grid.bucket(asked.batch_size, asked.num_kv_tokens)
        table = {**choice.table, bucket: (choice.gamma, choice.exploit_gamma)}
        return DecisionMessage(
            decision_id=decision.decision_id,
            policy_version=self.name,  # not one arm's and another's alike: a swap ends every hold
            batch_size_edges=tuple(grid.batch_size_edges),
            kv_token_edges=tuple(grid.kv_token_edges),
            table=table,
            bucket=bucket,
            hold_steps=choice.hold_steps,
            explored=choice.explored,
            session=decision.session,
            num_extra_drafts=choice.num_extra_drafts,
        )


def is_gamma(name: str) -> bool:
    """Whether an arm is one gamma for ever."""
    return name == OFF or name.startswith("fixed:")
