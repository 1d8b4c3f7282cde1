"""A `nightjar up` under test: its folders, addresses, children, and clients of it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import grpc
import psutil
from processes import Command

from nightjar.v1 import generation_pb2 as pb
from nightjar.v1 import generation_pb2_grpc, worker_pb2, worker_pb2_grpc

START_TIMEOUT_S = 240  # the proofs at start, on a machine that others use too


class System(Command):
    """A running `nightjar up` with folders of its own."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.folder = folder
        (folder / "shm").mkdir(parents=True)
        environ = {"NIGHTJAR_RUN_DIR": str(folder / "run"), "NIGHTJAR_NUM_THREADS": "1"}
        super().__init__(
            "-m", "nightjar", "up", f"--shm-dir={folder / 'shm'}", *flags, environ=environ
        )

    @property
    def addresses(self) -> dict[str, str]:
        """What `nightjar up` noted; lists as their first address."""
        note = json.loads((self.folder / "run" / "addresses.json").read_text())
        return {name: at if isinstance(at, str) else at[0] for name, at in note.items()}

    def ready(self) -> System:
        """Wait until it says so."""
        self.shows("ready: ", START_TIMEOUT_S)
        return self

    def pid_of(self, service: str) -> int:
        """Process id of a child, 0 while it is not there."""
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                if child.cmdline()[2:4] == ["nightjar", service]:
                    return child.pid
        return 0

    def nightjar(self, *argv: str) -> str:
        """Run another command against this system; returns what it prints."""
        environ = {"NIGHTJAR_RUN_DIR": str(self.folder / "run")}
        with Command("-m", "nightjar", *argv, environ=environ) as command:
            assert command.wait() == 0, command.stderr
            return command.stdout

    def generate(self, text: str, max_tokens: int = 32) -> tuple[str, pb.Usage]:
        """One greedy answer through the gateway's gRPC, and its usage."""
        sampling = pb.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        request = pb.GenerateRequest(text=text, sampling=sampling)
        with grpc.insecure_channel(self.addresses["gateway_grpc"]) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            parts = list(stub.Generate(request, timeout=60))
        return "".join(part.text for part in parts), parts[-1].usage

    def status(self) -> worker_pb2.GetWorkerStatusResponse:
        """State of the first worker."""
        with grpc.insecure_channel(self.addresses["workers"]) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            return stub.GetWorkerStatus(worker_pb2.GetWorkerStatusRequest(), timeout=10)


Start = Callable[..., System]
