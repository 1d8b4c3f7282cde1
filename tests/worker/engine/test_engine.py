"""The step loop over a channel that records, with fake models behind it."""

from __future__ import annotations

import itertools
import random
from array import array
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from engine_rig import BLOCK_SIZE, fakes, oracle, params, prompt
from fake_device import FakeDeviceRunner
from fake_forward import FakeForward

from nightjar.buckets import BucketGrid
from nightjar.errors import EngineFailure
from worker.engine.block_manager import BlockManager
from worker.engine.drafting import Drafting
from worker.engine.elastic import ElasticMemory
from worker.engine.engine import Engine
from worker.engine.links import CpuMeter, Memory, Planner
from worker.engine.plan import StepResult
from worker.engine.runner import NOT_NUMBERS, Runner
from worker.engine.scheduler import Scheduler
from worker.messages import (
    Abort,
    AgentLink,
    Decision,
    Finished,
    Grant,
    GrantAnswer,
    PlannerLink,
    Pressure,
    Reports,
    RequestRefused,
    SamplingParams,
    Shutdown,
    Status,
    StepOutput,
    Submit,
    ToEngine,
    ToFront,
    TransitionDone,
    TransitionRequest,
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
        self.elastic = ElasticMemory(self.scheduler, blocks, self.draft, clock)
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


@pytest.fixture(autouse=True, params=["depth 0", "depth 1, eager", "depth 1, late"])
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the loop promises holds at both depths."""
    monkeypatch.setattr(Bench, "mode", request.param)


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


def test_requests_stream_and_end() -> None:
    """Tokens come in columns, the end with its usage; steps without news send nothing."""
    bench = Bench()
    bench.give(submit(7, TEXT, max_tokens=30), submit(8, TEXT[:5], max_tokens=4))
    bench.finish()
    assert bench.channel.tokens(7) == answer(bench, params(max_tokens=30))
    assert len(bench.channel.tokens(8)) == 4
    end = bench.channel.end(7)
    assert (end.reason, end.usage.num_prompt_tokens, end.usage.num_completion_tokens) == (
        "length",
        20,
        30,
    )
    assert end.usage.gamma_histogram[3] > 0
    assert all(o.request_ids or o.finished for o in bench.channel.of(StepOutput))
    assert bench.channel.of(Reports) == []  # there is no planner to report to


def test_bad_requests_end_with_a_sentence_and_harm_nobody() -> None:
    """Ids out of range, an empty prompt, an unknown abort, a detector that cannot be made."""
    bench = Bench()
    bench.give(
        submit(1, TEXT, max_tokens=20),
        submit(2, [3, 40]),
        submit(3, [-1]),
        submit(4, []),
        submit(5, TEXT, stop=("x",)),
        Abort(request_id=99),
    )
    bench.finish()
    assert bench.channel.tokens(1) == answer(bench, params(max_tokens=20))
    for request_id in (2, 3):
        assert bench.channel.end(request_id).error == "prompt token ids must lie in [0, 40)"
    assert bench.channel.end(4).error == "the prompt is empty"
    assert "no detector here" in bench.channel.end(5).error
    assert {bench.channel.end(r).reason for r in (2, 3, 4, 5)} == {"error"}


def test_a_resumed_answer_sends_what_is_new() -> None:
    """The engine goes on after the tokens it is given; ids out of range are refused."""
    bench = Bench()
    whole = answer(bench, params(max_tokens=30, frequency_penalty=0.7))
    for request_id, prior in enumerate([whole[:1], whole[:29], whole, [3, 40], [-1]]):
        sampling = params(max_tokens=30, frequency_penalty=0.7)
        bench.give(
            Submit(
                request_id=request_id,
                prompt_token_ids=TEXT,
                sampling=sampling,
                prior_token_ids=prior,
            )
        )
    bench.finish()
    assert [bench.channel.tokens(i) for i in range(5)] == [whole[1:], whole[29:], [], [], []]
    assert [bench.channel.end(i).reason for i in range(3)] == ["length"] * 3
    for request_id in (3, 4):
        assert bench.channel.end(request_id).error == "prior token ids must lie in [0, 40)"


def test_log_probabilities_are_sent_with_their_tokens() -> None:
    """A long prompt's arrive chunk by chunk before the first token, the answer's beside it."""
    bench = Bench()
    bench.give(
        submit(1, TEXT * 6, max_tokens=7, num_prompt_logprobs=2, num_logprobs=3),
        submit(2, TEXT, max_tokens=7),
    )
    bench.finish()
    outputs = bench.channel.of(StepOutput)
    chunks = [message for output in outputs for message in output.prompt_logprobs]
    assert len(chunks) > 1
    assert {(chunk.request_id, chunk.num_top) for chunk in chunks} == {(1, 2)}
    assert sum(len(chunk.chosen) for chunk in chunks) == 4 * (len(TEXT) * 6 - 1)
    parts = [message for output in outputs for message in output.logprobs]
    assert {(part.request_id, part.num_top) for part in parts} == {(1, 3)}
    assert sum(len(part.chosen) for part in parts) == 4 * 7
    assert sum(len(part.top_ids) for part in parts) == 4 * 7 * 3
    assert [len(output.logprobs) for output in outputs] == [
        output.request_ids.count(1) for output in outputs
    ]


def test_an_abort_ends_the_request_and_shutdown_ends_all() -> None:
    """Aborted requests say so once; at shutdown what is left ends as aborted, waiting or not."""
    bench = Bench()
    for request_id in range(6):
        bench.give(submit(request_id, TEXT, max_tokens=100))
    bench.turn(4)
    bench.give(Abort(request_id=0), Abort(request_id=5), Abort(request_id=0))
    bench.turn()
    assert bench.channel.end(0).reason == bench.channel.end(5).reason == "abort"
    bench.give(Shutdown())
    assert not bench.engine.turn()
    assert {bench.channel.end(r).reason for r in range(6)} == {"abort"}
    assert bench.scheduler.blocks.num_free == bench.scheduler.blocks.num_total


def test_a_target_that_is_not_a_number_ends_its_request_alone() -> None:
    """The row ends with an error, its blocks leave the cache; its neighbour is bit-identical."""
    for moment, gamma in itertools.product((0, 1, 4, 7), range(6)):
        bench = Bench(fixed_gamma=gamma)
        expected = answer(bench, params(max_tokens=30))
        other = prompt(random.Random(2), 40)
        bench.target.poisoned_prefixes.add(tuple(TEXT + expected[:moment]))
        bench.give(submit(1, TEXT, max_tokens=30), submit(2, other, max_tokens=30))
        bench.finish()
        assert (bench.channel.end(1).reason, bench.channel.end(1).error) == ("error", NOT_NUMBERS)
        got = bench.channel.tokens(1)
        assert got == expected[: len(got)]
        assert len(got) <= moment
        assert bench.channel.tokens(2) == answer(bench, params(max_tokens=30), other)
        bench.target.poisoned_prefixes.clear()
        bench.give(submit(3, TEXT, max_tokens=30))
        bench.finish()
        assert bench.channel.tokens(3) == expected
        assert bench.channel.end(3).usage.num_cached_tokens == 0


def test_not_a_number_behind_a_rejected_draft_means_nothing() -> None:
    """Only positions that are reached count."""
    bench = Bench()
    bench.draft.kind = "random"
    expected = answer(bench, params(max_tokens=30))
    wrong = next(t for t in range(40) if t != expected[5])
    bench.target.poisoned_prefixes.update((*TEXT, *expected[:5], wrong, t) for t in range(40))
    bench.give(submit(1, TEXT, max_tokens=30))
    bench.finish()
    assert bench.channel.tokens(1) == expected


def test_a_draft_that_is_not_a_number_only_loses_its_drafts() -> None:
    """The answer is the same; the row goes on without drafts, its neighbour with."""
    bench = Bench()
    expected = answer(bench, params(max_tokens=40))
    bench.draft.poisoned_prefixes.add(tuple(TEXT + expected[:9]))
    other = prompt(random.Random(2), 30)
    bench.give(submit(1, TEXT, max_tokens=40), submit(2, other, max_tokens=40))
    bench.finish()
    assert bench.channel.tokens(1) == expected
    usage = bench.channel.end(1).usage
    assert 0 < usage.num_draft_tokens == usage.num_accepted_tokens < 10
    assert bench.channel.end(2).usage.num_accepted_tokens >= 28
    bench.draft.poisoned_prefixes.clear()
    bench.give(submit(3, TEXT, max_tokens=40))
    bench.finish()
    usage = bench.channel.end(3).usage
    assert usage.num_cached_tokens == 16
    assert usage.num_accepted_tokens == usage.num_draft_tokens > 20


def test_a_draft_cache_that_broke_is_filled_again() -> None:
    """A cached prefix whose draft half holds garbage costs one request its drafts, not the next."""
    bench = Bench()
    bench.give(submit(1, TEXT, max_tokens=40))
    bench.finish()
    bench.draft.poison(range(len(bench.draft.slots)))
    for request_id in (2, 3):
        bench.give(submit(request_id, TEXT, max_tokens=40))
        bench.finish()
        assert bench.channel.tokens(request_id) == bench.channel.tokens(1)
        assert bench.channel.end(request_id).usage.num_cached_tokens == 16
    assert bench.channel.end(2).usage.num_draft_tokens == 0
    usage = bench.channel.end(3).usage
    assert usage.num_accepted_tokens == usage.num_draft_tokens > 20


def test_a_step_that_raises_fails_its_rows_and_the_engine_goes_on() -> None:
    """Rows of the step end with the message; a request after it is served."""
    bench = Bench()
    bench.give(submit(1, TEXT, max_tokens=30), submit(2, TEXT[:9], max_tokens=30))
    bench.turn(3)
    bench.draft.raises = RuntimeError("out of luck")
    bench.turn()
    for request_id in (1, 2):
        end = bench.channel.end(request_id)
        assert (end.reason, end.error) == ("error", "the engine failed in a step: out of luck")
    bench.draft.raises = None
    bench.give(submit(3, TEXT, max_tokens=30))
    bench.finish()
    assert bench.channel.tokens(3) == answer(bench, params(max_tokens=30))


def test_three_failed_steps_in_a_row_end_the_engine() -> None:
    """Two failures and a success do not count on; three in a row raise."""
    bench = Bench()
    for round_number in range(2):
        for failure in range(2):
            bench.target.raises = RuntimeError("broken")
            bench.give(submit(10 * round_number + failure, TEXT))
            bench.turn(1 + bench.depth)
        bench.target.raises = None
        bench.give(submit(10 * round_number + 5, TEXT))
        bench.finish()
    bench.target.raises = RuntimeError("broken for good")
    bench.give(*(submit(100 + n, prompt(random.Random(n), 60)) for n in range(12)))
    with pytest.raises(EngineFailure, match="3 steps in a row failed: broken for good"):
        bench.turn(4 + 3 * bench.depth)
    assert bench.channel.end(100).reason == "error"


def test_idle_engines_say_so_every_200_ms() -> None:
    """Without requests the loop sleeps in poll and still sends its status and its pressure."""
    bench = Bench()
    bench.turn(40)
    assert all(timeout == 0.1 for timeout in bench.channel.polls)
    seconds = bench.channel.now
    assert seconds / 0.2 - 2 <= len(bench.channel.of(Status)) <= seconds / 0.2 + 2
    assert seconds / 0.2 - 2 <= len(bench.channel.of(Pressure)) <= seconds / 0.2 + 2
    status = bench.channel.of(Status)[-1]
    assert (status.num_running, status.num_free_blocks, status.residency) == (0, 24, "resident")
    assert status.rss_bytes > 1 << 20


def test_status_follows_the_steps() -> None:
    """Counts of steps, tokens and drafts agree with what was delivered."""
    bench = Bench()
    bench.give(submit(1, TEXT, max_tokens=50))
    bench.finish()
    bench.turn(5)
    status = bench.channel.of(Status)[-1]
    usage = bench.channel.end(1).usage
    assert status.num_generated_tokens == 50
    assert status.num_draft_tokens == usage.num_draft_tokens
    assert status.num_accepted_tokens == usage.num_accepted_tokens
    assert status.num_steps == usage.num_steps + 1
    assert status.policy_version == ""


def test_the_planner_is_asked_obeyed_and_told() -> None:
    """Gamma 0 until a decision comes; then its gamma for its hold, sums, and a new question."""
    bench = Bench(planned=True)
    bench.give(submit(1, TEXT, max_tokens=120))
    bench.turn(4 + bench.depth)
    assert bench.channel.of(Reports) == []  # no stream: sums wait
    bench.give(PlannerLink(connected=True))
    bench.turn()
    (first,) = bench.channel.of(Reports)
    assert first.ask is not None
    assert first.ask.feasible_max_gamma == 5
    assert sum(sums.num_steps for sums in first.reports) == 4
    assert {(sums.gamma, sums.decision_id) for sums in first.reports} == {(0, "")}
    bench.give(decision("a", 4))
    bench.turn(5 + bench.depth)
    told = [s for r in bench.channel.of(Reports)[1:] for s in r.reports]
    mine = [s for s in told if s.decision_id == "a"]
    assert {s.gamma for s in mine} == {4}
    assert sum(s.num_steps for s in mine) == 5
    assert sum(s.num_emitted for s in mine) == 25
    assert bench.channel.of(Reports)[-1].ask is not None  # the hold of five steps is over
    assert bench.channel.of(Reports)[-1].session == b"a"
    bench.turn(2)  # the table serves until the answer comes
    assert bench.engine.planner.gamma == 4
    bench.give(decision("b", 0, policy_version="2-off"))
    bench.turn(1 + bench.depth)
    assert bench.engine.planner.gamma == 0
    bench.give(PlannerLink(connected=False))
    bench.finish()
    assert bench.channel.tokens(1) == answer(bench, params(max_tokens=120))
    assert bench.channel.end(1).usage.policy_version == "2-off"


def test_reports_tell_the_contexts_that_each_decision_was_about(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Coarse grids of two versions, tables with gaps: every step counts where it ran."""
    bench, rng = Bench(planned=True, num_base_blocks=40), random.Random(4)
    bench.give(PlannerLink(connected=True))
    grids = [BucketGrid((2, 3), (40, 90, 160)), BucketGrid((1, 4), (60, 100))]
    decisions: dict[str, tuple[Decision, BucketGrid]] = {}
    ran: Counter[tuple[int, int]] = Counter()
    report = bench.engine.planner.report

    def count(done: StepResult) -> None:
        if done.plan.context is not None:
            ran[done.plan.context.batch_size, done.plan.gamma] += 1
        report(done)

    monkeypatch.setattr(bench.engine.planner, "report", count)
    num_seen, num_requests, owed = 0, 0, None
    for turn in range(600):
        if turn < 500 and rng.random() < 0.2:
            num_requests += 1
            text = prompt(rng, rng.randint(5, 40))
            bench.give(submit(num_requests, text, max_tokens=rng.randint(5, 60)))
        if owed is not None and rng.random() < 0.8:
            grid = grids[turn // 97 % 2]
            bucket = grid.bucket(owed.batch_size, owed.num_kv_tokens)
            table = {b: (rng.randint(0, 5),) * 2 for b in (bucket, bucket - 1, bucket + 3)}
            answer = decision(
                f"d{turn}",
                0,
                policy_version=f"{turn // 97}-x",
                batch_size_edges=grid.batch_size_edges,
                kv_token_edges=grid.kv_token_edges,
                table=table,
                bucket=bucket,
                num_extra_drafts=rng.choice([0, 0, 2]),
            )
            decisions[answer.decision_id] = answer, grid
            bench.give(answer)
            owed = None
        bench.turn()
        for message in bench.channel.of(Reports)[num_seen:]:
            num_seen += 1
            owed = message.ask or owed
    bench.finish()
    bench.channel.now += 1.0
    bench.turn()
    told = [s for message in bench.channel.of(Reports) for s in message.reports]
    reported: Counter[tuple[int, int]] = Counter()
    for sums in told:
        context = sums.context
        reported[context.batch_size, sums.gamma] += sums.num_steps
        assert sums.num_timed_rows == context.batch_size * sums.num_timed_steps
        if sums.decision_id:
            given, grid = decisions[sums.decision_id]
            bucket = grid.bucket(context.batch_size, context.num_kv_tokens)
            assert sums.bucket == bucket
            assert sums.gamma <= given.table[bucket][0]
            assert len(sums.reached) <= sums.gamma + given.num_extra_drafts
    assert reported == ran
    by_decision = {s.decision_id for s in told}
    assert len(by_decision) > 60
    assert len({decisions[d][0].policy_version for d in by_decision if d}) > 4
    assert "" in by_decision  # the tables had gaps


@pytest.mark.parametrize("gamma", [-1, 6, 10**6])
def test_a_wrong_decision_is_cut_to_what_is_possible(gamma: int) -> None:
    """Whatever the planner says, the step runs and the answer stays."""
    bench = Bench(planned=True)
    bench.give(PlannerLink(connected=True), decision("wild", gamma, hold_steps=1000))
    bench.give(submit(1, TEXT, max_tokens=60))
    bench.turn(5)
    assert bench.engine.planner.gamma == (0 if gamma < 0 else 5)
    bench.finish()
    assert bench.channel.tokens(1) == answer(bench, params(max_tokens=60))


def test_steps_without_a_resident_draft_hold_no_decision() -> None:
    """While the draft is away a hold does not run down, and its arm is not charged."""
    bench = Bench(planned=True)
    bench.give(PlannerLink(connected=True), AgentLink(connected=True))
    bench.give(decision("a", 3, hold_steps=8), submit(1, TEXT, max_tokens=60))
    bench.turn(3)
    bench.give(TransitionRequest(request_id=1, kind="expand"))
    bench.turn(20)
    assert bench.elastic.residency == "offloaded"
    away = [s for r in bench.channel.of(Reports) for s in r.reports if s.gamma == 0]
    assert sum(s.num_steps for s in away) >= 15
    assert {(s.decision_id, s.num_timed_steps) for s in away} == {("", 0)}
    assert not any(s.context.draft_resident for s in away)
    assert bench.engine.planner.last.held
    mine = [s for r in bench.channel.of(Reports) for s in r.reports if s.decision_id == "a"]
    assert sum(s.num_steps for s in mine) == 2


def test_memory_goes_and_comes_back_while_requests_run() -> None:
    """Expand, grow into the tail, contract by grants, reload: answers and acceptance stay."""
    bench = Bench(num_base_blocks=16, num_extra_blocks=6)
    texts = {n: prompt(random.Random(n), 40) for n in range(4)}
    bench.give(*(submit(n, text, max_tokens=50) for n, text in texts.items()))
    bench.give(AgentLink(connected=True), TransitionRequest(request_id=1, kind="expand"))
    bench.until(lambda: bool(bench.scheduler.blocks.live_tail_blocks()))
    assert bench.channel.of(TransitionDone)[0].residency == "offloaded"
    bench.turn(3)

    def contract() -> bool:
        bench.give(TransitionRequest(request_id=2, kind="contract"))
        seen = len(bench.channel.of(Grant)) + len(bench.channel.of(RequestRefused))
        bench.turn()
        return len(bench.channel.of(Grant)) + len(bench.channel.of(RequestRefused)) > seen and bool(
            bench.channel.of(Grant)
        )

    bench.until(contract)
    answered = 0
    while bench.elastic.residency != "resident":
        for grant in bench.channel.of(Grant)[answered:]:
            moves = dict(zip(grant.source_ids, grant.destination_ids, strict=True))
            bench.target.copy_blocks(moves)
            bench.give(GrantAnswer(grant_id=grant.grant_id, ok=True))
            answered += 1
        bench.turn()
    assert answered >= 2
    assert {grant.kind for grant in bench.channel.of(Grant)} == {"copy", "load"}
    bench.give(submit(9, TEXT, max_tokens=40))
    bench.finish()
    for request_id, text in texts.items():
        assert bench.channel.tokens(request_id) == answer(bench, params(max_tokens=50), text)
    assert bench.channel.tokens(9) == answer(bench, params(max_tokens=40))
    usage = bench.channel.end(9).usage
    assert usage.num_accepted_tokens == usage.num_draft_tokens > 0
    bench.turn(5)
    status = bench.channel.of(Status)[-1]
    assert (status.num_expansions, status.num_contractions, status.expanded) == (1, 1, False)


def test_pressure_tells_the_choice_without_exploration() -> None:
    """The agent goes by exploit_gamma, not by the arm that is being tried."""
    bench = Bench(planned=True)
    bench.give(PlannerLink(connected=True), decision("a", 3, table={0: (3, 0)}))
    bench.give(submit(1, TEXT, max_tokens=40))
    bench.finish()
    assert bench.channel.of(Pressure)[-1].exploit_gamma == 0
    assert bench.channel.end(1).usage.num_draft_tokens > 0
    sequences = [pressure.sequence for pressure in bench.channel.of(Pressure)]
    assert sequences == list(range(1, len(sequences) + 1))


def test_a_loop_that_may_not_launch_does_not_spin() -> None:
    """While a transition pauses the steps, the loop waits in poll."""
    bench = Bench()
    bench.give(submit(1, TEXT, max_tokens=40))
    bench.turn(3)
    reserved = bench.scheduler.blocks.reserve(bench.scheduler.blocks.num_free)
    assert reserved is not None
    bench.turn(40)
    assert bench.channel.polls[-1] > 0
    bench.scheduler.blocks.release_reserved(reserved)
    bench.finish()
    assert bench.channel.tokens(1) == answer(bench, params(max_tokens=40))


def test_a_launch_that_fails_ends_the_rows_in_flight_too() -> None:
    """Rows of both steps end with the error, in order, once; blocks and slots are all back."""
    bench = Bench()
    bench.give(submit(1, TEXT, max_tokens=30), submit(2, prompt(random.Random(2), 60)))
    bench.turn(2)
    bench.draft.raises = bench.target.raises = RuntimeError("out of luck")
    bench.turn(1 + bench.depth)
    for request_id in (1, 2):
        assert bench.channel.end(request_id).error == "the engine failed in a step: out of luck"
    assert bench.scheduler.blocks.num_free == bench.scheduler.blocks.num_total
    assert not bench.scheduler.has_work
    bench.draft.raises = bench.target.raises = None
    bench.give(submit(3, TEXT, max_tokens=30))
    bench.finish()
    assert bench.channel.tokens(3) == answer(bench, params(max_tokens=30))
    assert bench.channel.end(3).usage.num_cached_tokens == 0


def test_nothing_stays_in_flight_when_the_requests_are_gone() -> None:
    """Aborted in flight, all of them: the step retires, and what it held is free."""
    bench = Bench()
    bench.give(submit(1, TEXT, max_tokens=90), submit(2, TEXT[:3], max_tokens=90))
    bench.turn(4)
    bench.give(Abort(request_id=1), Abort(request_id=2))
    bench.turn()
    assert bench.scheduler.blocks.num_free == bench.scheduler.blocks.num_total
    assert bench.channel.polls[-1] == 0
    bench.turn()
    assert bench.channel.polls[-1] > 0
    for request_id, text in ((1, TEXT), (2, TEXT[:3])):
        got = bench.channel.tokens(request_id)
        assert got == answer(bench, params(max_tokens=90), text)[: len(got)]


def test_the_tail_changes_hands_only_with_nothing_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The draft is dropped, and comes back, between steps: none is on its way then."""
    bench = Bench()
    seen = []

    def look(name: str) -> Callable[[], None]:
        method = getattr(bench.draft, name)

        def call() -> None:
            seen.append(name)
            assert bench.scheduler._num_launched == bench.scheduler._num_retired
            method()

        return call

    for name in ("drop", "restore"):
        monkeypatch.setattr(bench.draft, name, look(name))
    bench.give(submit(1, TEXT, max_tokens=120), AgentLink(connected=True))
    bench.turn(5)
    bench.give(TransitionRequest(request_id=1, kind="expand"))
    bench.turn(3)
    bench.give(TransitionRequest(request_id=2, kind="contract"))
    bench.until(lambda: bool(bench.channel.of(Grant)))
    bench.give(GrantAnswer(grant_id=bench.channel.of(Grant)[0].grant_id, ok=True))
    bench.until(lambda: bench.elastic.residency == "resident")
    bench.finish()
    assert seen == ["drop", "restore"]
    assert bench.channel.tokens(1) == answer(bench, params(max_tokens=120))
    assert bench.channel.end(1).usage.num_draft_tokens > 0
