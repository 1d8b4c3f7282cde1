"""Round trip of one Plan stream, planner and store as real processes; prints JSON.

    python benchmarks/planner_latency.py --asks 4000

A stream of the same messages to a process that answers without thinking is timed in turns with
it, so that the ratio holds on a noisy machine. Also: select and update in this process.
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
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from nightjar.rpc import Server, dial, until_signalled
from nightjar.v1 import planner_pb2 as pb
from nightjar.v1 import planner_pb2_grpc
from planner_service.context import Context, Outcome
from planner_service.policies import BUILT_IN
from planner_service.session import Session
from planner_service.sums import NOTHING


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--asks", type=int, default=4000, help="messages on the stream")
    parser.add_argument("--batch-sizes", type=int, default=16, help="batch sizes that occur")
    parser.add_argument("--echo", action="store_true", help="serve the echo; for the script itself")
    options = parser.parse_args()
    if options.echo:
        asyncio.run(echo())
        return
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))
    from store_server import StoreServer  # the tests' own store, ending with this process

    store = StoreServer()
    store.start()
    commands = (["-m", "nightjar", "planner", "--store", store.url], [__file__, "--echo"])
    with contextlib.ExitStack() as stack:
        stack.callback(store.close)
        planner, bare = (stack.enter_context(started(command)) for command in commands)
        figures = asyncio.run(measure(planner, bare, options.asks, options.batch_sizes))
    figures["select_and_update_us"] = in_process(options.batch_sizes)
    print(json.dumps(figures, indent=2))


@contextlib.contextmanager
def started(command: list[str]) -> Iterator[str]:
    """A server process; its address."""
    argv = [sys.executable, *command]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[-1]
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


def in_process(batch_sizes: int) -> dict[str, float]:
    """Time of one select and one update together, in microseconds."""
    policy, _ = BUILT_IN["nightjar"].build({})
    rng, stats, session, times = random.Random(0), NOTHING, Session(), list[float]()
    for _ in range(20_000):
        size = rng.randint(1, batch_sizes)
        context = Context(size, feasible_max_gamma=5, max_gamma=5, max_batch_size=batch_sizes)
        start = time.perf_counter()
        choice, session = policy.select(context, stats, session, rng)
        outcome = Outcome(
            4, 4, 40_000, 4 * size, 4 * size, 4 * size, reached=(9, 5), accepted=(5, 3)
        )
        stats = stats.plus(policy.update(stats, context, choice.gamma, outcome))
        times.append((time.perf_counter() - start) * 1e6)
        session = session.after_steps(size, 4)
    return _percentiles(times)


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
