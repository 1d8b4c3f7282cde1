"""Answers that go on between two real workers: bit for bit those of one that nothing happens to."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
from conditions import until
from cut_worker import CutWorker
from processes import Command
from worker_process import drafting_flags

from nightjar import rpc
from nightjar.v1 import generation_pb2 as pb
from nightjar.v1 import generation_pb2_grpc, worker_pb2, worker_pb2_grpc

PROMPT = "The sound of the wind in the trees is one that"
NUM_TOKENS = 64
GREEDY = {"temperature": 0.0}
SAMPLED = {
    "temperature": 0.9,
    "top_p": 0.95,
    "seed": 2**64 - 59,
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.3,
    "presence_penalty": -0.2,
    "logit_bias": {70: 1.5, 90: -3.0},
    "logprobs": 2,
}


@dataclass
class Worker:
    """A running worker process."""

    address: str
    command: Command

    async def status(self) -> worker_pb2.GetWorkerStatusResponse:
        """Its status."""
        async with rpc.dial(self.address) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            status: worker_pb2.GetWorkerStatusResponse = await stub.GetWorkerStatus(
                worker_pb2.GetWorkerStatusRequest(), timeout=20
            )
            return status

    async def idle(self) -> bool:
        """Whether it runs nothing and every block is free."""
        status = await self.status()
        running = status.num_running + status.num_waiting
        return running == 0 and status.num_free_blocks == status.num_total_blocks

    async def answer(self, request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
        """An answer without a gateway."""
        async with rpc.dial(self.address) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            return [part async for part in stub.Generate(request, timeout=60)]


@pytest.fixture(scope="module")
def workers(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Worker]]:
    """Two workers of one model that draft, each an engine and a front of its own."""
    with ExitStack() as stack:
        commands = []
        for i in range(2):
            folder = tmp_path_factory.mktemp(f"worker{i}")
            (folder / "shm").mkdir()
            flags = [
                *drafting_flags(tiny, folder / "shm"),
                "--listen=127.0.0.1:0",
                "--num-blocks=128",
                "--stream-interval-ms=0",
            ]
            environ = {"TMPDIR": str(folder)}
            command = Command("-m", "worker.main", *flags, environ=environ)
            commands.append(stack.enter_context(command))
        for command in commands:
            command.shows("serving=True", timeout_s=120)
        yield [Worker(command.stdout.split()[-1], command) for command in commands]


@pytest.fixture
async def doors(workers: list[Worker]) -> AsyncIterator[list[CutWorker]]:
    """The first worker behind a door that cuts, the second behind one that seems busy."""
    made = [
        await CutWorker(workers[0].address, cuts=True).start(),
        await CutWorker(workers[1].address, num_waiting=100_000).start(),
    ]
    yield made
    for door in made:
        await door.stop()


def request(name: str = "", **fields: Any) -> pb.GenerateRequest:
    """A request for 64 tokens, whatever they are."""
    sampling = {"max_tokens": NUM_TOKENS, "ignore_eos": True, **fields}
    return pb.GenerateRequest(text=PROMPT, request_id=name, sampling=pb.SamplingParams(**sampling))


def told(parts: list[pb.GenerateResponse]) -> list[tuple[Any, ...]]:
    """All that a client has of each choice."""
    choices = []
    for index in sorted({part.index for part in parts}):
        own = [part for part in parts if part.index == index]
        entries = [entry for part in own for entry in part.logprobs]
        choices.append(
            (
                [token_id for part in own for token_id in part.token_ids],
                "".join(part.text for part in own),
                [entry.SerializeToString() for entry in entries],
                [part.finish_reason for part in own if part.finish_reason],
            )
        )
    return choices


def check(parts: list[pb.GenerateResponse], expected: list[pb.GenerateResponse]) -> None:
    """Both clients have the same, once, and usage counts what they have."""
    assert told(parts) == told(expected)
    assert [part.HasField("start") for part in parts].count(True) == 1
    assert [part.HasField("usage") for part in parts].count(True) == 1
    usage, whole = parts[-1].usage, expected[-1].usage
    assert usage.num_prompt_tokens == whole.num_prompt_tokens
    assert usage.num_completion_tokens == whole.num_completion_tokens
    assert usage.num_accepted_tokens <= usage.num_draft_tokens


async def collect(served: Any, asked: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    """Every message of an answer of the gateway."""
    return [part async for part in served.grpc.Generate(asked, timeout=60)]


async def cut_everywhere(
    served: Any, doors: list[CutWorker], worker: Worker, sampling: dict[str, Any], ks: range
) -> None:
    """Ask at once for an answer for each k, cut there; all must be the undisturbed one."""
    expected = await worker.answer(request(**sampling))
    doors[0].num_together = len(ks)  # nobody is cut before all have chosen
    answers = await asyncio.gather(*(collect(served, request(f"cut-{k}", **sampling)) for k in ks))
    for parts in answers:
        check(parts, expected)
    assert doors[0].num_cut == len(ks)
    rests = Counter(len(rest.continuation.token_ids) for rest in doors[1].requests)
    assert sorted(rests) == list(ks)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
async def test_cut_at_every_token(
    workers: list[Worker], doors: list[CutWorker], make_gateway: Any, sampling: dict[str, Any]
) -> None:
    """Cut at every token k of 64 and gone on with by drafts: ids, text, entries, one end, usage."""
    served = await make_gateway(*doors, routing="least_loaded", probe_interval_ms=60_000)
    await cut_everywhere(served, doors, workers[1], sampling, range(NUM_TOKENS))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
async def test_cut_at_every_token_of_longer_answers(
    workers: list[Worker], doors: list[CutWorker], make_gateway: Any, seed: int
) -> None:
    """The same for 160 tokens under other seeds and temperatures, two choices each."""
    sampling = {
        **SAMPLED,
        "seed": seed,
        "temperature": [0.0, 0.3, 1.0, 2.0][seed],
        "max_tokens": 160,
        "n": 2,
    }
    served = await make_gateway(*doors, routing="least_loaded", probe_interval_ms=60_000)
    expected = await workers[1].answer(request(**sampling))
    for ks in (range(0, 320, 5), range(2, 320, 5)):
        doors[0].requests.clear()
        doors[0].num_together = len(ks)
        answers = await asyncio.gather(
            *(collect(served, request(f"cut-{k}", **sampling)) for k in ks)
        )
        for parts in answers:
            check(parts, expected)


async def test_limits_hold_over_a_cut(
    workers: list[Worker], doors: list[CutWorker], make_gateway: Any
) -> None:
    """A stop id that comes early counts from min_tokens on, and max_tokens, wherever it is cut."""
    free = told(await workers[1].answer(request(**GREEDY)))[0][0]
    first = free.index(free[3])
    assert first <= 3
    stops = {"stop_token_ids": [free[3]], "min_tokens": 20, "max_tokens": 32, **GREEDY}
    expected = await workers[1].answer(request(**stops))
    count = len(told(expected)[0][0])
    assert 20 <= count <= 32
    served = await make_gateway(*doors, routing="least_loaded", probe_interval_ms=60_000)
    await cut_everywhere(served, doors, workers[1], stops, range(1, count))


async def test_stop_strings_hold_over_a_cut(
    workers: list[Worker], doors: list[CutWorker], make_gateway: Any
) -> None:
    """A stop string that lies across the cut ends the answer, and none of it is ever shown."""
    text = told(await workers[1].answer(request(**GREEDY)))[0][1]
    stop = text[len(text) // 2 : len(text) // 2 + 8]
    stops = {"stop": [stop, text[5:9] + "\0"], **GREEDY}
    expected = await workers[1].answer(request(**stops))
    assert expected[-1].finish_reason == pb.FINISH_REASON_STOP
    count = len(told(expected)[0][0])
    served = await make_gateway(*doors, routing="least_loaded", probe_interval_ms=60_000)
    await cut_everywhere(served, doors, workers[1], stops, range(1, count))


async def test_choices_go_on_each_by_itself(
    workers: list[Worker], doors: list[CutWorker], make_gateway: Any
) -> None:
    """With n = 2 both choices are what they would have been, prompt entries told once."""
    sampling = {**SAMPLED, "n": 2, "prompt_logprobs": 1, "max_tokens": 16}
    expected = await workers[1].answer(request(**sampling))
    served = await make_gateway(*doors, routing="least_loaded", probe_interval_ms=60_000)
    asked = [request(f"cut-{k}", **sampling) for k in range(0, 32, 5)]
    doors[0].num_together = len(asked)
    for parts in await asyncio.gather(*(collect(served, one) for one in asked)):
        check(parts, expected)
        entries = [entry for part in parts for entry in part.prompt_logprobs]
        assert len(entries) == expected[-1].usage.num_prompt_tokens - 1
    assert doors[0].num_cut == len(asked)


# ---- processes that stop and die -------------------------------------------------------


async def busy_with(
    worker: Worker, served: Any, asked: list[pb.GenerateRequest], rng: random.Random
) -> list[asyncio.Task[list[pb.GenerateResponse]]]:
    """Begin answers, each when those before it have some tokens; all are under way at return."""
    calls: list[asyncio.Task[list[pb.GenerateResponse]]] = []
    for one in asked:
        parts: list[pb.GenerateResponse] = []

        async def read(
            one: pb.GenerateRequest = one, parts: list[pb.GenerateResponse] = parts
        ) -> list[pb.GenerateResponse]:
            async for part in served.grpc.Generate(one, timeout=60):
                parts.append(part)  # noqa: PERF401 - looked at as it grows
            return parts

        calls.append(asyncio.create_task(read()))
        wanted = rng.randrange(1, 6)
        await until(lambda parts=parts, wanted=wanted: len(parts) >= wanted, "some tokens came")
    assert not any(call.done() for call in calls)
    return calls


LONG = {"max_tokens": 100}


async def two_processes(workers: list[Worker], make_gateway: Any) -> Any:
    """A gateway that gives the first worker all requests, and leaves it if it stands still."""
    seeming_busy = await CutWorker(workers[1].address, num_waiting=100_000).start()
    served = await make_gateway(
        workers[0],
        seeming_busy,
        routing="least_loaded",
        probe_interval_ms=50,
        probe_timeout_ms=300,
        max_progress_age_ms=1000,
        stall_timeout_ms=300,
    )
    return served, seeming_busy


@pytest.mark.parametrize("what", ["front", "engine"])
async def test_stopped_process(workers: list[Worker], make_gateway: Any, what: str) -> None:
    """A stopped front or engine is not ready soon, its answers go on; awake, it holds nothing."""
    served, other = await two_processes(workers, make_gateway)
    asked = [request(**GREEDY, **LONG), request(**SAMPLED, **LONG)]
    expected = await asyncio.gather(*map(workers[1].answer, asked))
    status = await workers[0].status()
    pid = status.pid if what == "front" else status.engine_pid
    calls = await busy_with(workers[0], served, asked, random.Random(5))
    os.kill(pid, signal.SIGSTOP)
    try:
        registry = served.gateway.registry
        known = registry.workers[workers[0].address]
        await until(lambda: bool(known.not_ready), "it is not ready", timeout_s=5)
        assert (await served.http.get("/health/live")).status_code == 200
        for call, whole in zip(calls, expected, strict=True):
            check(await call, whole)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert len(other.requests) == len(asked)
    await until(workers[0].idle, "the woken worker was told to stop")
    await until(lambda: not known.not_ready, "it is ready again")
    await until(lambda: all(w.num_dispatched == 0 for w in registry.loads()), "nothing counts")
    assert known.load.num_requests == 0
    await other.stop()


async def test_client_that_hangs_up(workers: list[Worker], make_gateway: Any) -> None:
    """A client that leaves its unstreamed answer frees the worker's blocks."""
    served = await make_gateway(workers[0])
    host, port = served.gateway.http_address.split(":")
    content = b'{"prompt": "hello", "max_tokens": 240, "ignore_eos": true}'
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(content), content)
    )

    async def runs() -> bool:
        return (await workers[0].status()).num_running == 1

    await until(runs, "it runs")
    writer.transport.abort()
    await until(workers[0].idle, "every block is free", timeout_s=1)


async def test_killed_process(workers: list[Worker], make_gateway: Any) -> None:
    """A worker killed under answers at random places: each goes on as if nothing had been."""
    served, other = await two_processes(workers, make_gateway)
    asked = [request(**(SAMPLED if i % 2 else GREEDY), **LONG) for i in range(4)]
    expected = await asyncio.gather(*map(workers[1].answer, asked[:2]))
    status = await workers[0].status()
    calls = await busy_with(workers[0], served, asked, random.Random(11))
    for pid in (status.pid, status.engine_pid):
        os.kill(pid, signal.SIGKILL)
    for i, call in enumerate(calls):
        check(await call, expected[i % 2])
    assert len(other.requests) == len(asked)
    assert (await served.http.get("/health/ready")).json()["num_ready"] == 1
    await other.stop()
