"""The worker as a process of its own, with its real engine and a tiny model."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from processes import Command, alive, eventually, shared_memory_files

from nightjar.v1 import generation_pb2 as pb
from nightjar.v1 import generation_pb2_grpc, worker_pb2, worker_pb2_grpc

PROMPT = "The sound of the wind in the trees is one that"


@dataclass
class Worker:
    """A running worker command and stubs on it."""

    command: Command
    shm: Path
    generation: Any
    workers: Any

    def status(self) -> worker_pb2.GetWorkerStatusResponse:
        """The worker's status."""
        answer: worker_pb2.GetWorkerStatusResponse = self.workers.GetWorkerStatus(
            worker_pb2.GetWorkerStatusRequest(), timeout=20
        )
        return answer

    def generate(self, text: str = PROMPT, max_gamma: int | None = None, **sampling: object) -> Any:
        """Begin an answer; `max_tokens` 60 and temperature 0 unless given."""
        fields = {"max_tokens": 60, "temperature": 0.0, "ignore_eos": True, **sampling}
        request = pb.GenerateRequest(text=text, sampling=pb.SamplingParams(**fields))  # type: ignore[arg-type]
        if max_gamma is not None:
            request.speculation.max_gamma = max_gamma
        return self.generation.Generate(request, timeout=120)


@contextmanager
def worker_of(tiny: Any, folder: Path, *flags: str) -> Iterator[Worker]:
    """A worker with gamma 3 and a pool of 64 blocks; nobody answers at its agent's address."""
    shm = folder / "shm"
    shm.mkdir()
    command = Command(
        "-m",
        "worker.main",
        f"--listen=unix:{folder}/worker.sock",
        f"--model={tiny.target}",
        f"--draft={tiny.noisy}",
        "--served-model-name=tiny",
        "--gamma=3",
        "--dtype=float32",
        "--build=eager",
        "--num-threads=1",
        "--num-blocks=64",
        "--max-model-len=256",
        f"--shm-dir={shm}",
        f"--memory-agent=unix:{folder}/nobody.sock",
        *flags,
        environ={"TMPDIR": str(folder)},
    )
    with command, grpc.insecure_channel(f"unix:{folder}/worker.sock") as channel:
        command.shows("serving=True", timeout_s=120)
        yield Worker(
            command,
            shm,
            generation_pb2_grpc.GenerationServiceStub(channel),
            worker_pb2_grpc.WorkerServiceStub(channel),
        )


@pytest.fixture(scope="module")
def worker(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """One worker for the tests that leave it as it was."""
    with worker_of(tiny, tmp_path_factory.mktemp("worker")) as made:
        yield made


def ids(pieces: list[pb.GenerateResponse]) -> list[int]:
    """The token ids of an answer."""
    return [token_id for piece in pieces for token_id in piece.token_ids]


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


def test_a_model_that_is_not_there_ends_the_start(tmp_path: Path) -> None:
    """The engine's ConfigError is the worker's: exit status 2 and a sentence that names it."""
    with Command(
        "-m", "worker.main", f"--listen=unix:{tmp_path}/w.sock", "--model=/no/such/model"
    ) as command:
        assert command.wait() == 2
        assert "/no/such/model" in command.stderr
        assert "Traceback" not in command.stderr
