"""Routing policies in turn over the same two workers: TTFT, throughput, and prefix-cache hits.

Each policy has a gateway of its own in front of one `nightjar up`. Every turn brings prompts
that no worker has seen: groups that share a long system prompt, and short ones that share none.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nightjar.rpc import dial
from nightjar.v1 import generation_pb2 as pb
from nightjar.v1 import generation_pb2_grpc

POLICIES = ("least_loaded", "prefix_affinity", "speculation_aware")
NIGHTJAR = (sys.executable, "-m", "nightjar")
NUM_CLIENTS = 4
NUM_GROUPS, GROUP_SIZE, NUM_SHORT = 6, 4, 8
SYSTEM_WORDS = 400  # about as many tokens
WORDS = ("river", "stone", "paper", "bird", "winter", "lamp", "garden", "wheel", "silver", "window")


@dataclass
class Answer:
    """What a client saw of one answer."""

    ttft_s: float
    num_tokens: int
    usage: pb.Usage


class System:
    """One `nightjar up` with two workers, and a gateway for each policy."""

    def __init__(self) -> None:
        self._run = tempfile.mkdtemp(prefix="nj-")
        command = [*NIGHTJAR, "up", f"--run-dir={self._run}", "--num-workers=2"]
        command += ["--http-listen=127.0.0.1:0", "--grpc-listen=127.0.0.1:0"]
        command += ["--", "--num-threads=1"]
        self._processes = [subprocess.Popen(command, stdout=subprocess.DEVNULL, text=True)]
        self.gateways: dict[str, str] = {}

    def start(self) -> None:
        """Wait until the workers serve, then start the gateways."""
        file = Path(self._run) / "addresses.json"
        while not file.exists():
            if self._processes[0].poll() is not None:
                raise SystemExit(f"nightjar up ended with {self._processes[0].returncode}")
            time.sleep(0.2)
        workers = json.loads(file.read_text())["workers"]
        _wait_healthy(workers)
        for policy in POLICIES:
            command = [*NIGHTJAR, "gateway", f"--workers={','.join(workers)}"]
            command += [f"--routing={policy}", "--grpc-listen=127.0.0.1:0"]
            command += ["--http-listen=127.0.0.1:0"]
            gateway = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            self._processes.append(gateway)
            assert gateway.stdout is not None
            line = gateway.stdout.readline()
            if not line.startswith("grpc listening on "):
                raise SystemExit(f"the gateway with {policy} did not start")
            self.gateways[policy] = line.split()[-1]
        _wait_healthy(self.gateways.values())

    def stop(self) -> None:
        """End the gateways, then the system."""
        for process in reversed(self._processes):
            process.terminate()
            process.wait(60)


def _wait_healthy(addresses: Any) -> None:
    subprocess.run([*NIGHTJAR, "healthcheck", "--wait=600", *addresses], check=True)


def workload(rng: random.Random) -> list[pb.GenerateRequest]:
    """Requests of one turn in random order; their texts depend on `rng` alone."""
    requests = []
    for _ in range(NUM_GROUPS):
        system = " ".join(rng.choices(WORDS, k=SYSTEM_WORDS))
        requests += [_request(_words(rng, 6), 8, system) for _ in range(GROUP_SIZE)]
    requests += [_request(_words(rng, 6), 24) for _ in range(NUM_SHORT)]
    rng.shuffle(requests)
    return requests


def _words(rng: random.Random, num_words: int) -> str:
    return "Tell me of " + " ".join(rng.choices(WORDS, k=num_words))


def _request(question: str, max_tokens: int, system: str = "") -> pb.GenerateRequest:
    messages = [pb.ChatMessage(role="system", content=system)] if system else []
    messages.append(pb.ChatMessage(role="user", content=question))
    sampling = pb.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return pb.GenerateRequest(chat=pb.ChatPrompt(messages=messages), sampling=sampling)


async def turn(address: str, requests: list[pb.GenerateRequest]) -> dict[str, float]:
    """Send `requests` from a few clients, each one at a time; returns the turn's figures."""
    waiting = iter(requests)
    answers: list[Answer] = []

    async def client(stub: Any) -> None:
        for request in waiting:  # one iterator for all: each request is taken once
            begun, first, count = time.perf_counter(), 0.0, 0
            usage = pb.Usage()
            async for response in stub.Generate(request):
                if response.token_ids and not count:
                    first = time.perf_counter()
                count += len(response.token_ids)
                if response.HasField("usage"):
                    usage = response.usage
            answers.append(Answer(first - begun, count, usage))

    async with dial(address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        begun = time.perf_counter()
        await asyncio.gather(*(client(stub) for _ in range(NUM_CLIENTS)))
        seconds = time.perf_counter() - begun
    ttfts = [answer.ttft_s for answer in answers]
    prompts = sum(answer.usage.num_prompt_tokens for answer in answers)
    return {
        "tok_s": sum(answer.num_tokens for answer in answers) / seconds,
        "ttft_p50_s": statistics.median(ttfts),
        "ttft_p90_s": statistics.quantiles(ttfts, n=10)[-1],
        "prefix_hit_share": sum(a.usage.num_cached_tokens for a in answers) / prompts,
    }


async def run(rounds: int) -> dict[str, Any]:
    """All rounds; in each the policies take turns, with unlike prompts of the same shape."""
    system = System()
    try:
        system.start()
        await turn(system.gateways["least_loaded"], workload(random.Random(0)))
        found: dict[str, list[dict[str, float]]] = {policy: [] for policy in POLICIES}
        for number in range(rounds):
            for place in range(len(POLICIES)):
                policy = POLICIES[(number + place) % len(POLICIES)]
                rng = random.Random(f"{number} {policy}")
                found[policy].append(await turn(system.gateways[policy], workload(rng)))
                print(f"{number} {policy}: {found[policy][-1]}", file=sys.stderr, flush=True)
    finally:
        system.stop()
    base = found["least_loaded"]
    return {
        policy: {name: _spread([result[name] for result in results]) for name in results[0]}
        | {
            f"{name} over least_loaded": _spread(
                [result[name] / other[name] for result, other in zip(results, base, strict=True)]
            )
            for name in ("tok_s", "ttft_p50_s", "ttft_p90_s")
        }
        for policy, results in found.items()
    }


def _spread(values: list[float]) -> dict[str, float]:
    named = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: round(value, 3) for name, value in named.items()}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(int(os.environ.get("ROUNDS", "5")))), indent=1))
