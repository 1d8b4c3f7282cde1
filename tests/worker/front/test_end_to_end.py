"""The worker as a process of its own, with its real engine and a tiny model."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import grpc
import pytest
from processes import Command, alive, eventually, shared_memory_files
from worker_process import PROMPT, Worker, ids, worker_of

from nightjar.v1 import generation_pb2 as pb


def test_stdout_holds_one_line(worker: Worker) -> None:
    """The engine's output and all logs go to stderr."""
    assert worker.command.stdout.startswith("listening on unix:")
    assert worker.command.stdout.count("\n") == 1


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 1.0, "seed": 11}], ids=["greedy", "seeded"]
)
def test_concurrent_answers_equal_those_without_speculation(
    worker: Worker, sampling: dict[str, Any]
) -> None:
    """Two streams at gamma 3 at once give what gamma 0 gives alone, and drafts are accepted."""
    prompts = [PROMPT, "A bird in the hand is"]
    plain = [list(worker.generate(text, max_gamma=0, **sampling)) for text in prompts]
    calls = [worker.generate(text, **sampling) for text in prompts]
    fast = [list(call) for call in calls]
    for expected, got in zip(plain, fast, strict=True):
        assert ids(got) == ids(expected)
        assert "".join(p.text for p in got) == "".join(p.text for p in expected)
        assert len(ids(got)) == got[-1].usage.num_completion_tokens == 60
        assert got[-1].finish_reason == pb.FINISH_REASON_LENGTH
        assert expected[-1].usage.num_draft_tokens == 0
        assert got[-1].usage.num_accepted_tokens > 0
        assert sum(got[-1].usage.gamma_histogram) == got[-1].usage.num_steps
    status = worker.status()
    assert status.draft.num_accepted_tokens > 0
    assert 0 < status.acceptance_rate <= 1
    assert status.arithmetic.fingerprint == fast[0][0].start.arithmetic_fingerprint != ""


def test_a_stop_string_made_of_the_answer_ends_it(worker: Worker) -> None:
    """For stops cut from the plain answer at every offset, text ends right before them."""
    text = "".join(piece.text for piece in worker.generate(max_tokens=24))
    for start in range(0, len(text) - 4, 3):
        stop = text[start : start + 4]
        pieces = list(worker.generate(max_tokens=24, stop=[stop]))
        assert "".join(piece.text for piece in pieces) == text[: text.index(stop)]
        assert pieces[-1].finish_reason == pb.FINISH_REASON_STOP
        assert len(ids(pieces)) == pieces[-1].usage.num_completion_tokens


def test_cancel_frees_the_blocks(worker: Worker) -> None:
    """Running and queued requests that are cancelled give every block back."""
    total = worker.status().num_total_blocks
    eventually(lambda: worker.status().num_free_blocks == total, "idle")
    calls = [worker.generate(f"{i} {PROMPT}", max_tokens=200) for i in range(20)]
    for call in calls[:2]:
        next(iter(call))
    eventually(lambda: worker.status().num_free_blocks < total, "blocks are in use")
    for call in calls:
        call.cancel()

    def all_back() -> bool:
        status = worker.status()
        return status.num_free_blocks == total and status.num_running + status.num_waiting == 0

    eventually(all_back, "every block is free", 10)


def test_sigterm_finishes_the_answer_and_leaves_nothing(tiny: Any, tmp_path: Path) -> None:
    """The stream inside completes, the exit status is 0, files and processes are gone."""
    with worker_of(tiny, tmp_path, "--arithmetic=free") as worker:
        engine = worker.status().engine_pid
        assert shared_memory_files(worker.shm)
        call = worker.generate(max_tokens=150)
        first = next(iter(call))
        worker.command.signal(signal.SIGTERM)
        pieces = [first, *call]
        assert len(ids(pieces)) == 150
        assert worker.command.wait() == 0
        assert not alive(engine)
        assert shared_memory_files(worker.shm) == []
        assert not list(tmp_path.glob("nightjar-worker-*"))


def test_a_killed_engine_fails_its_streams_and_the_worker(tiny: Any, tmp_path: Path) -> None:
    """The stream ends with INTERNAL, the worker with 1, and the engine's files are removed."""
    with worker_of(tiny, tmp_path, "--arithmetic=free") as worker:
        call = worker.generate(max_tokens=200)
        next(iter(call))
        os.kill(worker.status().engine_pid, signal.SIGKILL)
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        assert caught.value.code() == grpc.StatusCode.INTERNAL
        assert worker.command.wait() == 1
        assert shared_memory_files(worker.shm) == []
        assert not list(tmp_path.glob("nightjar-worker-*"))


def test_a_killed_front_takes_its_engine_along(tiny: Any, tmp_path: Path) -> None:
    """The engine sees its socket close, removes its files and ends."""
    with worker_of(tiny, tmp_path, "--arithmetic=free") as worker:
        engine = worker.status().engine_pid
        worker.command.signal(signal.SIGKILL)
        eventually(lambda: not alive(engine), "the engine has ended", 20)
        assert shared_memory_files(worker.shm) == []


def test_a_model_that_cannot_be_had_ends_the_start(tmp_path: Path) -> None:
    """The engine's ConfigError is the worker's: exit status 2 and a sentence that names it."""
    flags = ("--model=no/such-model", "--proposer=none", f"--cache-dir={tmp_path}")
    with Command(
        "-m", "worker.main", f"--listen=unix:{tmp_path}/w.sock", *flags,
        environ={"HF_HUB_OFFLINE": "1"},
    ) as command:  # fmt: skip
        assert command.wait() == 2
        assert "model 'no/such-model': the Hub cannot be reached" in command.stderr
        assert "Traceback" not in command.stderr
