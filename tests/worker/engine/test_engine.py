"""The step loop over a channel that records, with fake models behind it."""

from __future__ import annotations

import itertools
import random

import pytest
from engine_bench import TEXT, Bench, answer, submit
from engine_rig import params, prompt

from nightjar.errors import EngineFailure
from worker.engine.runner import NOT_NUMBERS
from worker.messages import (
    Abort,
    Pressure,
    Reports,
    Shutdown,
    Status,
    StepOutput,
    Submit,
)

pytestmark = pytest.mark.usefixtures("every_depth")


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
