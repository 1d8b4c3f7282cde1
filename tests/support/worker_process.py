"""The worker's command in a process of its own, with its real engine and a tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from processes import Command

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


def drafting_flags(tiny: Any, shm: Path) -> list[str]:
    """Of a worker whose tiny model drafts three tokens a step, on one thread."""
    return [
        f"--model={tiny.target}",
        f"--draft={tiny.noisy}",
        "--served-model-name=tiny",
        "--gamma=3",
        "--dtype=float32",
        "--build=eager",
        "--num-threads=1",
        "--max-model-len=256",
        f"--shm-dir={shm}",
    ]


@contextmanager
def worker_of(tiny: Any, folder: Path, *flags: str) -> Iterator[Worker]:
    """A worker with gamma 3 and a pool of 64 blocks; nobody answers at its agent's address."""
    shm = folder / "shm"
    shm.mkdir()
    command = Command(
        "-m",
        "worker.main",
        *drafting_flags(tiny, shm),
        f"--listen=unix:{folder}/worker.sock",
        "--num-blocks=64",
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


def ids(pieces: list[pb.GenerateResponse]) -> list[int]:
    """The token ids of an answer."""
    return [token_id for piece in pieces for token_id in piece.token_ids]


def text_of(pieces: list[pb.GenerateResponse]) -> str:
    """The text of an answer."""
    return "".join(piece.text for piece in pieces)
