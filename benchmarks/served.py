"""The whole system under load: concurrency, the planner's policy against fixed gammas, memory.

Three systems, one policy each, are up at once and take turns, so that each keeps what its
planner learned; only one has requests at a time.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from nightjar.rpc import dial
from nightjar.v1 import generation_pb2 as pb
from nightjar.v1 import generation_pb2_grpc, worker_pb2, worker_pb2_grpc

POLICIES = {"off": ("off",), "fixed 3": ("fixed", "gamma=3"), "nightjar": ("nightjar",)}
LOADS = (1, 4, 16)
WARM_UP_STEPS = 1000
MEASURED_S = 10.0
QUESTIONS = (
    "Explain how rain forms.",
    "Write a short poem about a river.",
    "List five uses of a paper clip.",
    "What is a prime number? Give examples.",
    "Tell a story about a fox and a crow.",
    "How does a bicycle stay upright?",
    "Summarise the plot of a heist film in three sentences.",
    "Translate 'good morning, my friends' into French and Spanish.",
)


class System:
    """One `nightjar up` with one policy."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._run = tempfile.mkdtemp(prefix="nj-")
        command = [sys.executable, "-m", "nightjar", "up", f"--run-dir={self._run}"]
        command += ["--http-listen=127.0.0.1:0", "--grpc-listen=127.0.0.1:0"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        self.addresses: dict[str, Any] = {}

    async def ready(self) -> None:
        """Wait until it serves, then set the policy."""
        file = Path(self._run) / "addresses.json"
        while not file.exists():
            if self._process.poll() is not None:
                raise SystemExit(f"system {self.name} ended with {self._process.returncode}")
            await asyncio.sleep(0.2)
        self.addresses = json.loads(file.read_text())
        command = [sys.executable, "-m", "nightjar", "healthcheck", "--wait", "600"]
        subprocess.run([*command, self.addresses["gateway_grpc"]], check=True)
        policy, *parameters = POLICIES[self.name]
        flags = [flag for pair in parameters for flag in ("--param", pair)]
        planner = f"--planner={self.addresses['planner']}"
        command = [sys.executable, "-m", "nightjar", "policy", "activate", policy, *flags, planner]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    async def status(self) -> worker_pb2.GetWorkerStatusResponse:
        """State of its worker."""
        async with dial(self.addresses["workers"][0]) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            return await stub.GetWorkerStatus(worker_pb2.GetWorkerStatusRequest())

    def stop(self) -> None:
        """Ctrl-C."""
        self._process.terminate()
        self._process.wait(60)


async def load(system: System, num_clients: int, seconds: float, steps: int = 0) -> float:
    """Closed loop of `num_clients`; returns tok/s over `seconds`, or until `steps` have run."""
    count, number, begun = 0, 0, time.perf_counter()
    stop = asyncio.Event()

    async def client() -> None:
        nonlocal count, number
        while not stop.is_set():
            number += 1
            call = stub.Generate(_request(QUESTIONS[number % len(QUESTIONS)], 128))
            async for response in call:
                count += len(response.token_ids)
                if stop.is_set():
                    call.cancel()
                    return

    async with dial(system.addresses["gateway_grpc"]) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        tasks = [asyncio.create_task(client()) for _ in range(num_clients)]
        if steps:
            goal = (await system.status()).num_steps + steps
            while (await system.status()).num_steps < goal:
                await asyncio.sleep(0.5)
        else:
            await asyncio.sleep(seconds)
        rate = count / (time.perf_counter() - begun)
        stop.set()
        await asyncio.gather(*tasks, return_exceptions=True)
    return rate


def _request(question: str, max_tokens: int) -> pb.GenerateRequest:
    message = pb.ChatMessage(role="user", content=question)
    sampling = pb.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return pb.GenerateRequest(chat=pb.ChatPrompt(messages=[message]), sampling=sampling)


async def concurrency(system: System, rounds: int) -> dict[str, Any]:
    """Eight requests at once against the same eight one after the other."""
    async with dial(system.addresses["gateway_grpc"]) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)

        async def ask(question: str) -> None:
            async for _ in stub.Generate(_request(question, 64)):
                pass

        found = []
        for _ in range(rounds):
            begin = time.perf_counter()
            for question in QUESTIONS:
                await ask(question)
            sequential = time.perf_counter() - begin
            begin = time.perf_counter()
            await asyncio.gather(*map(ask, QUESTIONS))
            found.append(sequential / (time.perf_counter() - begin))
    return {"sequential_over_concurrent": _spread(found)}


async def run(rounds: int) -> dict[str, Any]:
    """All served figures."""
    systems = [System(name) for name in POLICIES]
    try:
        for system in systems:
            await system.ready()
        status = await systems[0].status()
        result: dict[str, Any] = {
            "idle_engine_rss_mb": round(status.engine_rss_bytes / 2**20),
            "build": status.arithmetic.build,
            "arithmetic": status.arithmetic.mode,
            "concurrency": await concurrency(systems[0], rounds),
        }
        for num_clients in LOADS:
            for system in systems:
                warm = await load(system, num_clients, 0, WARM_UP_STEPS)
                _say(f"warm {system.name} x{num_clients}: {warm:.1f} tok/s")
            rates: dict[str, list[float]] = {system.name: [] for system in systems}
            for _ in range(rounds):
                for system in systems:
                    rates[system.name].append(await load(system, num_clients, MEASURED_S))
                    _say(f"{system.name} x{num_clients}: {rates[system.name][-1]:.1f} tok/s")
            best = [max(a, b) for a, b in zip(rates["off"], rates["fixed 3"], strict=True)]
            found = [a / b for a, b in zip(rates["nightjar"], best, strict=True)]
            result[f"{num_clients} clients"] = {
                "tok_s": {name: _spread(found) for name, found in rates.items()},
                "nightjar_over_better": _spread(found),
            }
        return result
    finally:
        for system in systems:
            system.stop()


def _spread(values: list[float]) -> dict[str, float]:
    named = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: round(value, 3) for name, value in named.items()}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(int(os.environ.get("ROUNDS", "5")))), indent=1))
