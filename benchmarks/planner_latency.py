"""How fast the planner is, with planner and store as real processes; prints JSON.

    python benchmarks/planner_latency.py                 round trip, 32 workers, every policy
    python benchmarks/planner_latency.py --memory 1000000        memory over so many updates

A stream of the same messages to a process that answers without thinking is timed in turns with
the planner's, so that the ratio holds on a noisy machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from nightjar.rpc import Server, dial, until_signalled
from nightjar.v1 import planner_pb2 as pb
from nightjar.v1 import planner_pb2_grpc
from planner_service.context import Context, Outcome, Profile
from planner_service.ledger import Ledger
from planner_service.planner import Planner, Report, Stream
from planner_service.policies import BUILT_IN
from planner_service.session import Session
from planner_service.sums import NOTHING
from planner_service.versions import EVERYONE, Book

TURNS, WARM_UP = 10_000, 2_000
MEMORY_BATCH_SIZES = 64
FLAT_MIB = 2.0


PARTS = ("round_trip", "load", "policies")
FLOORS = {"p50_us": 350, "p99_us": 2000, "steps": 2, "cores": 1, "select_and_update_us": 30}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=PARTS, help="measure one part alone")
    parser.add_argument("--policy", default="nightjar", help="that decides; not of `policies`")
    parser.add_argument("--asks", type=int, default=4000, help="messages on the stream")
    parser.add_argument("--batch-sizes", type=int, default=16, help="batch sizes that occur")
    parser.add_argument("--workers", type=int, default=32, help="simulated workers")
    parser.add_argument("--steps-per-s", type=float, default=215, help="of each of them")
    parser.add_argument("--seconds", type=float, default=20, help="of load; half of it warms up")
    parser.add_argument("--memory", type=int, default=0, metavar="UPDATES", help="this instead")
    parser.add_argument("--policies", nargs="*", default=list(BUILT_IN), metavar="NAME")
    parser.add_argument("--echo", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--grow", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.echo:
        asyncio.run(echo())
    elif options.grow:
        print(json.dumps(grow(options.grow, options.memory)))
    elif options.memory:
        figures = {name: grown(name, options.memory) for name in options.policies}
        print(json.dumps({"updates": options.memory, "rss_mib": figures}, indent=2))
    else:
        parts = (options.only,) if options.only else PARTS
        print(json.dumps(measured(parts, options), indent=2))


def measured(parts: Sequence[str], options: argparse.Namespace) -> dict[str, object]:
    """Figures of some parts, beside what they must reach."""
    figures: dict[str, object] = {"floors": FLOORS}
    if "round_trip" in parts:
        with planner(options.policy) as (_, address), started([__file__, "--echo"]) as (_, bare):
            asks, sizes = options.asks, options.batch_sizes
            figures["round_trip"] = asyncio.run(measure(address, bare, asks, sizes))
    if "load" in parts:
        with planner(options.policy) as (process, address):
            figures["load"] = loaded(process, address, options)
    if "policies" in parts:
        sizes = options.batch_sizes
        figures["policies"] = {name: in_process(name, sizes) for name in options.policies}
    return figures


@contextlib.contextmanager
def planner(policy: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A planner over a store of its own."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))
    from store_server import StoreServer  # the tests' own store, ending with this process

    store = StoreServer()
    store.start()
    command = ["-m", "nightjar", "planner", "--store", store.url, "--policy", policy]
    try:
        with started(command) as found:
            yield found
    finally:
        store.close()


def loaded(
    process: subprocess.Popen[str], address: str, options: argparse.Namespace
) -> dict[str, object]:
    """Figures of many workers, and the planner's share of a core meanwhile."""
    argv = [sys.executable, str(Path(__file__).with_name("planner_load.py"))]
    argv += ["--planner", address, "--workers", str(options.workers)]
    argv += ["--steps-per-s", str(options.steps_per_s), "--seconds", str(options.seconds)]
    watched = psutil.Process(process.pid)
    shares = []
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as load:
        assert load.stdout is not None
        while (line := load.stdout.readline()) and not line.startswith("{"):
            used = sum(watched.cpu_times()[:2])
            shares.append((time.perf_counter(), used))
        shares.append((time.perf_counter(), sum(watched.cpu_times()[:2])))
    (start, before), (end, after) = shares[-2:]
    figures: dict[str, object] = json.loads(line)
    figures["planner_cores"] = round((after - before) / (end - start), 2)
    figures["planner_rss_mib"] = round(watched.memory_info().rss / 2**20, 1)
    return figures


@contextlib.contextmanager
def started(command: list[str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server process and its address."""
    argv = [sys.executable, *command]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().split()[-1]
        finally:
            process.terminate()


class Echo(planner_pb2_grpc.PlannerServiceServicer):
    """Answers every message on a stream with the session that it holds."""

    async def Plan(
        self, request_iterator: AsyncIterator[pb.PlanRequest], context: object
    ) -> AsyncIterator[pb.PlanResponse]:
        """Answer at once."""
        async for request in request_iterator:
            yield pb.PlanResponse(decision=pb.Decision(session=request.session))


async def echo() -> None:
    """Serve `Echo` until a signal."""
    server = Server("127.0.0.1:0", [])
    planner_pb2_grpc.add_PlannerServiceServicer_to_server(Echo(), server.grpc)
    await server.start()
    print(f"listening on {server.address}", flush=True)
    await until_signalled()


async def measure(planner: str, bare: str, num_asks: int, batch_sizes: int) -> dict[str, object]:
    """Times of round trips in microseconds, to the planner and to the echo."""
    profile = pb.Profile(
        target="t", draft="d", proposer="draft_model", device="cpu", tensor_parallel_size=1
    )
    hello = pb.PlanHello(worker_id="w", profile=profile, max_gamma=5, max_batch_size=batch_sizes)
    rng, plan_us, bare_us = random.Random(0), list[float](), list[float]()
    async with dial(planner) as plan_channel, dial(bare) as bare_channel:
        plan = planner_pb2_grpc.PlannerServiceStub(plan_channel).Plan()
        echoed = planner_pb2_grpc.PlannerServiceStub(bare_channel).Plan()
        await plan.write(pb.PlanRequest(hello=hello))
        decision: pb.Decision | None = None
        for turn in range(num_asks):
            context = pb.Context(
                batch_size=rng.randint(1, batch_sizes), feasible_max_gamma=5, draft_resident=True
            )
            request = pb.PlanRequest(ask=context)
            if decision is not None:
                request.reports.append(_report(decision, rng))
                request.session = decision.session
            decision = (await _round_trip(plan, request, plan_us)).decision
            if turn % 2:
                await _round_trip(echoed, request, bare_us)
    figures, bare_figures = _percentiles(plan_us), _percentiles(bare_us)
    assert decision is not None
    return {
        "plan_us": figures,
        "echo_us": bare_figures,
        "plan_to_echo_p50": round(figures["p50"] / bare_figures["p50"], 2),
        "session_bytes": len(decision.session),
        "table_rows": len(decision.table),
    }


async def _round_trip(stream: Any, request: pb.PlanRequest, times: list[float]) -> pb.PlanResponse:
    start = time.perf_counter()
    await stream.write(request)
    response = await stream.read()
    times.append((time.perf_counter() - start) * 1e6)
    assert isinstance(response, pb.PlanResponse)
    return response


def in_process(name: str, batch_sizes: int) -> dict[str, float]:
    """Time of one select and one update together, in microseconds."""
    policy, _ = BUILT_IN[name].build({})
    rng, stats, session, times = random.Random(0), NOTHING, Session(), list[float]()
    for turn in range(TURNS + WARM_UP):
        context, outcome = _ran(rng, batch_sizes)
        start = time.perf_counter()
        choice, session = policy.select(context, stats, session, rng)
        learned = policy.update(stats, context, choice.gamma, outcome)
        if turn >= WARM_UP:
            times.append((time.perf_counter() - start) * 1e6)
        stats = stats.plus(learned)
        session = session.after_steps(context.bucket, outcome.num_steps)
    return _percentiles(times)


def grow(name: str, num_updates: int) -> list[float]:
    """Memory of this process in MiB, ten times while a planner learns and decides."""
    clock = time.monotonic
    ledger = Ledger(stored=True)
    planner = Planner(
        registry=BUILT_IN, ledger=ledger, incarnation="i", rng=random.Random(0), clock=clock
    )
    parameters = planner.prepare(name, {}, EVERYONE)
    planner.set_book(Book().activate(name, parameters, EVERYONE, 0, "default"))
    profile = Profile(
        target="t",
        draft="d",
        proposer="draft_model",
        dtype="",
        device="",
        tensor_parallel_size=1,
        engine="",
    )
    stream, rng, sizes = Stream(profile, "w"), random.Random(1), list[float]()
    rss = psutil.Process().memory_info
    for turn in range(1, num_updates + 1):
        context, outcome = _ran(rng, MEMORY_BATCH_SIZES)
        decision = planner.decide(stream, context)
        report = Report(context, decision.choice.gamma, decision.decision_id, outcome)
        planner.learn(stream, report)
        if turn % 100 == 0:  # a store that takes everything
            for key in ledger.groups():
                if (departing := ledger.depart(key)) is not None:
                    ledger.settle(key, departing[0].number, clock())
        if turn * 10 % num_updates < 10:
            sizes.append(round(rss().rss / 2**20, 1))
    return sizes


def grown(name: str, num_updates: int) -> dict[str, object]:
    """The same in a process of its own; flat if its second half grew by less than 2 MiB."""
    argv = [sys.executable, __file__, "--grow", name, "--memory", str(num_updates)]
    answer = subprocess.run(argv, stdout=subprocess.PIPE, check=True)
    sizes = json.loads(answer.stdout)
    return {"samples": sizes, "flat": sizes[-1] - sizes[len(sizes) // 2] < FLAT_MIB}


def _ran(rng: random.Random, batch_sizes: int) -> tuple[Context, Outcome]:
    """Four steps of some batch."""
    size = rng.randint(1, batch_sizes)
    context = Context(
        size,
        num_kv_tokens=size * rng.randint(100, 1000),
        sum_stale_tokens=rng.choice((0, 10 * size)),
        feasible_max_gamma=5,
        max_gamma=5,
        max_batch_size=batch_sizes,
    )
    emitted = rng.randint(4 * size, 8 * size)
    step_us = 4 * round(rng.lognormvariate(0, 0.1) * (3000 + 50 * size))
    outcome = Outcome(4, 4, step_us, emitted, 4 * size, emitted, reached=(9, 5), accepted=(5, 3))
    return context, outcome


def _report(decision: pb.Decision, rng: random.Random) -> pb.StepReport:
    gamma = next(row.gamma for row in decision.table if row.bucket == decision.bucket)
    steps = decision.hold_steps
    rows = steps * decision.bucket
    emitted = rows + rng.randint(0, rows * gamma)
    return pb.StepReport(
        context=pb.Context(batch_size=decision.bucket, feasible_max_gamma=5),
        gamma=gamma,
        decision_id=decision.decision_id,
        num_steps=steps,
        num_timed_steps=steps,
        step_us=steps * (10_000 + 1_000 * gamma),
        num_timed_emitted=emitted,
        num_emitted=emitted,
        num_timed_rows=rows,
        reached=[rows] * gamma,
        accepted=[rows // 2] * gamma,
    )


def _percentiles(values: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=100)
    return {"p50": round(cuts[49], 1), "p99": round(cuts[98], 1)}


if __name__ == "__main__":
    main()
