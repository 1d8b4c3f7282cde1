"""Shares as a worker runs them: its own rules, late answers, and batches that change their size."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from planner_service.context import Context, Outcome, Profile
from planner_service.ledger import Ledger
from planner_service.planner import PROBE_SUFFIX, Planner, Report, Stream
from planner_service.policies import BUILT_IN
from planner_service.server_messages import decision_message
from planner_service.versions import EVERYONE, Book, Scope
from worker.engine.decisions import Decisions
from worker.planner_client import decision_message as received

STEP_S, ANSWER_STEPS, REPORT_STEPS = 0.005, 2, 4
PROFILE = Profile(
    target="t",
    draft="d",
    proposer="draft_model",
    dtype="float32",
    device="cpu",
    tensor_parallel_size=1,
    engine="tests",
)


def asked(batch_size: int) -> Context:
    """A context of a worker that can run 5 drafts and 16 rows."""
    return Context(
        batch_size, 100 * batch_size, feasible_max_gamma=5, max_gamma=5, max_batch_size=16
    )


def run(num_steps: int, change: float) -> Counter[str]:
    """Steps by version, probes apart, of a worker whose batch changes so often."""
    clock = [0.0]
    planner = Planner(
        registry=BUILT_IN,
        ledger=Ledger(stored=False),
        incarnation="i",
        rng=random.Random(0),
        clock=lambda: clock[0],
        probe_share=0.02,
    )
    book = Book().activate("nightjar", {"gamma_max": "5"}, EVERYONE, 0, "default")
    planner.set_book(book.activate("fixed", {"gamma": "2"}, Scope(canary_share=0.3), 0, "operator"))
    stream, decisions = Stream(PROFILE, "w"), Decisions(planned=True, fixed_gamma=0)
    planner.register(PROFILE)
    decisions.link(True, 0.0)
    rng, size, sent_at = random.Random(1), 2, 0
    ran, sums = Counter[str](), Counter[tuple[int, int, str]]()
    inbox = []
    for step in range(num_steps):
        clock[0] += STEP_S
        while inbox and inbox[0][0] <= step:
            message = received(inbox.pop(0)[1], 5)
            assert message is not None
            decisions.take(message, clock[0])
        size = rng.randint(1, 6) if rng.random() < change else size
        choice = decisions.choose(size, 100 * size, clock[0])
        is_probe = choice.decision_id.endswith(PROBE_SUFFIX)
        assert not is_probe or choice.gamma == 0
        ran["probe" if is_probe else choice.policy_version] += 1
        sums[size, choice.gamma, choice.decision_id] += 1
        ended = decisions.ran(choice)
        asks = decisions.asks(size, 100 * size, clock[0])
        if not (asks or ended or step - sent_at >= REPORT_STEPS):
            continue
        for (rows, gamma, decision_id), num in sums.items():
            tokens = num * rows * (gamma + 2) // 2
            outcome = Outcome(num, num, num * 10_000, tokens, num * rows, tokens)
            planner.learn(stream, Report(asked(rows), gamma, decision_id, outcome))
        sums, sent_at = Counter(), step
        if asks or stream.outdated is not None:
            about = asked(size) if asks else stream.outdated
            assert about is not None
            answer = decision_message(planner.decide(stream, about))
            inbox.append((step + ANSWER_STEPS, answer))
    return ran


@pytest.mark.parametrize("change", [0.0, 0.02, 0.2])
def test_shares_hold_however_the_batch_changes(change: float) -> None:
    """Holds left in other buckets neither keep a slice going nor swallow the probes."""
    num_steps = 40_000
    ran = run(num_steps, change)
    assert ran["2-fixed"] / num_steps == pytest.approx(0.3, abs=0.06)
    assert 0.015 <= ran["probe"] / num_steps <= 0.023
    assert ran["1-nightjar"] > 0.6 * num_steps
