"""A real worker under a burst, with a real agent that lives or is killed in each phase."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from memory_worker import MemoryWorker, PoolStub
from processes import Command, eventually

from nightjar.v1 import generation_pb2 as pb
from nightjar.v1 import generation_pb2_grpc, memory_pb2, memory_pb2_grpc, worker_pb2
from nightjar.v1 import worker_pb2_grpc as worker_grpc

NUM_BLOCKS = 64
# Short requests fill the head, so long ones that come after them live in the tail.
SHORT = [(f"{i} is the number of this prompt. " * 4, 60) for i in range(12)]
LONG = [(f"and this one is called {i}", 210) for i in range(2)]


@dataclass
class Worker:
    """A running worker, and where it expects its agent."""

    command: Command
    folder: Path
    generation: Any
    workers: Any
    expected: list[list[int]]  # answers to SHORT and LONG, each asked alone

    def ask(self, text: str, max_tokens: int) -> list[int]:
        """An answer's token ids."""
        sampling = pb.SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        request = pb.GenerateRequest(text=text, sampling=sampling)
        responses = self.generation.Generate(request, timeout=120)
        return [token_id for response in responses for token_id in response.token_ids]

    def draft(self) -> worker_pb2.DraftStatus:
        """Where the draft stands."""
        request = worker_pb2.GetWorkerStatusRequest()
        status: worker_pb2.GetWorkerStatusResponse = self.workers.GetWorkerStatus(request)
        return status.draft

    def agent(self, failpoint: str = "") -> Command:
        """Start an agent where the worker expects it; it dies at `failpoint`."""
        return Command(
            "-m", "nightjar", "memory-agent", f"--listen=unix:{self.folder}/agent.sock",
            f"--shm-dir={self.folder}", "--backoff-s=0.1", "--hold-s=0", "--tau-high=0",
            environ={"NIGHTJAR_FAILPOINT": failpoint},
        )  # fmt: skip


@pytest.fixture(scope="module")
def worker(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """A worker at gamma 0 with a small pool; its agent is not there yet."""
    folder = tmp_path_factory.mktemp("pool")
    address = f"unix:{folder}/worker.sock"
    command = Command(
        "-m", "nightjar", "worker", f"--listen={address}", f"--model={tiny.target}",
        f"--draft={tiny.noisy}", "--gamma=0", "--dtype=float32", "--build=eager",
        "--num-threads=1", f"--num-blocks={NUM_BLOCKS}", "--max-model-len=256",
        f"--shm-dir={folder}", f"--memory-agent=unix:{folder}/agent.sock",
    )  # fmt: skip
    with command, grpc.insecure_channel(address) as channel:
        command.shows("serving=True", timeout_s=120)
        worker = Worker(
            command,
            folder,
            generation_pb2_grpc.GenerationServiceStub(channel),
            worker_grpc.WorkerServiceStub(channel),
            [],
        )
        worker.expected = [worker.ask(*request) for request in [*SHORT, *LONG]]
        yield worker
        command.signal(signal.SIGTERM)
        assert command.wait() == 0


def burst(worker: Worker, pool: ThreadPoolExecutor) -> list[Future[list[int]]]:
    """Ask everything at once, after the agent has attached."""
    eventually(lambda: worker.draft().agent_attached, "the agent attached")
    return [pool.submit(worker.ask, *request) for request in [*SHORT, *LONG]]


async def test_an_agent_that_serves_another_is_waited_for(worker: Worker) -> None:
    """Driven out and refused, the worker answers, tells why, logs it once, and attaches later."""
    pool = PoolStub(worker.folder)
    agent = MemoryWorker(f"unix:{worker.folder}/agent.sock")
    with worker.agent():
        await asyncio.to_thread(eventually, lambda: worker.draft().agent_attached, "attached")
        async with agent.attach(pool.handshake("RELOADING")):
            sentence = "worker 'worker-1' is attached; an agent serves one worker"
            answer = await asyncio.to_thread(worker.ask, *LONG[0])
            assert answer == worker.expected[len(SHORT)]
            await asyncio.to_thread(
                eventually, lambda: sentence in worker.draft().agent_reason, "the reason"
            )
            assert not worker.draft().agent_attached
        await asyncio.to_thread(eventually, lambda: worker.draft().agent_attached, "attached again")
        assert worker.draft().agent_reason == ""
        assert worker.command.stderr.count(sentence) == 1
    eventually(lambda: worker.draft().agent_reason not in ("", "connecting"), "the agent's end")
    pool.close()


def is_resident(worker: Worker) -> bool:
    """Whether the draft is back."""
    return worker.draft().residency == worker_pb2.DRAFT_RESIDENCY_RESIDENT


def test_expands_and_contracts_under_a_burst(worker: Worker) -> None:
    """The pool grows and shrinks with rows in its tail, and every answer is as if alone."""
    before = worker.draft()
    with worker.agent() as command, ThreadPoolExecutor(len(SHORT + LONG)) as pool:
        answers = burst(worker, pool)
        assert [answer.result() for answer in answers] == worker.expected
        eventually(lambda: is_resident(worker), "the draft is back")
        after = worker.draft()
        with grpc.insecure_channel(f"unix:{worker.folder}/agent.sock") as channel:
            stub: Any = memory_pb2_grpc.MemoryServiceStub(channel)
            status = stub.GetMemoryStatus(memory_pb2.GetMemoryStatusRequest())
        assert after.num_expansions > before.num_expansions
        assert after.num_contractions > before.num_contractions
        assert status.num_contractions >= 1
        assert command.stderr.count("grant answered") >= status.num_contractions + 1, "no copy"
        command.signal(signal.SIGTERM)
        assert command.wait() == 0


@pytest.mark.parametrize(
    "phase",
    [
        pytest.param("agent.before_work", marks=pytest.mark.slow),
        "agent.mid_copy",
        pytest.param("agent.before_answer", marks=pytest.mark.slow),
        "agent.mid_load",
    ],
)
def test_killed_in_each_phase(worker: Worker, phase: str) -> None:
    """The agent dies by SIGKILL in a transition: answers are right, and the next one finishes."""
    before = worker.draft()
    with ThreadPoolExecutor(len(SHORT + LONG)) as pool:
        with worker.agent(phase) as command:
            answers = burst(worker, pool)
            assert command.wait() == -signal.SIGKILL
        assert [answer.result() for answer in answers] == worker.expected
        with worker.agent():
            eventually(lambda: is_resident(worker), "the draft is back")
    after = worker.draft()
    assert after.num_expansions > before.num_expansions
    assert after.num_contractions > before.num_contractions
    assert after.num_granted_blocks == 0
    assert [worker.ask(*request) for request in LONG] == worker.expected[len(SHORT) :]
