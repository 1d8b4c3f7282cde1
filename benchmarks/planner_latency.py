"""Round trip of one Plan stream, planner and store as real processes; prints JSON.

    python benchmarks/planner_latency.py --asks 4000

A unary health check of the same server is timed in turns with it,
so that the ratio holds on a noisy machine. Also: select and update in this process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from grpc_health.v1 import health_pb2, health_pb2_grpc

from nightjar.rpc import dial
from nightjar.v1 import planner_pb2 as pb
from nightjar.v1 import planner_pb2_grpc
from planner_service.context import Context, Outcome
from planner_service.policies import BUILT_IN
from planner_service.session import Session
from planner_service.sums import NOTHING

ROUNDS = 8


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--asks", type=int, default=4000, help="messages on the stream")
    parser.add_argument("--batch-sizes", type=int, default=16, help="batch sizes that occur")
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))
    from store_server import StoreServer  # the tests' own store, ending with this process

    store = StoreServer()
    store.start()
    argv = [sys.executable, "-m", "nightjar", "planner", "--store", store.url]
    with tempfile.TemporaryFile() as log:
        planner = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert planner.stdout is not None
            address = planner.stdout.readline().split()[-1]
            figures = asyncio.run(measure(address, options.asks, options.batch_sizes))
        finally:
            planner.terminate()
            planner.wait()
            store.close()
    figures["select_and_update_us"] = in_process(options.batch_sizes)
    print(json.dumps(figures, indent=2))


async def measure(address: str, num_asks: int, batch_sizes: int) -> dict[str, object]:
    """Times of round trips in microseconds, and of a unary health check beside them."""
    profile = pb.Profile(
        target="t", draft="d", proposer="draft_model", device="cpu", tensor_parallel_size=1
    )
    hello = pb.PlanHello(worker_id="w", profile=profile, max_gamma=5, max_batch_size=batch_sizes)
    rng, plan_us, bare_us = random.Random(0), list[float](), list[float]()
    async with dial(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        stream = planner_pb2_grpc.PlannerServiceStub(channel).Plan()
        await stream.write(pb.PlanRequest(hello=hello))
        session, decision = b"", None
        for _ in range(ROUNDS):
            for _ in range(num_asks // ROUNDS):
                batch_size = rng.randint(1, batch_sizes)
                context = pb.Context(
                    batch_size=batch_size,
                    num_kv_tokens=99,
                    feasible_max_gamma=5,
                    draft_resident=True,
                )
                request = pb.PlanRequest(ask=context, session=session)
                if decision is not None:
                    request.reports.append(_report(decision, rng))
                start = time.perf_counter()
                await stream.write(request)
                response = await stream.read()
                plan_us.append((time.perf_counter() - start) * 1e6)
                assert isinstance(response, pb.PlanResponse)
                decision, session = response.decision, response.decision.session
            for _ in range(100):
                start = time.perf_counter()
                await health.Check(health_pb2.HealthCheckRequest())
                bare_us.append((time.perf_counter() - start) * 1e6)
        await stream.done_writing()
    plan, bare = _percentiles(plan_us), _percentiles(bare_us)
    ratio = round(plan["p50"] / bare["p50"], 3)
    sizes = {"session_bytes": len(session), "table_rows": len(decision.table) if decision else 0}
    return {"plan_us": plan, "unary_health_us": bare, "plan_to_unary_p50": ratio, **sizes}


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
        stats = policy.update(stats, context, choice.gamma, outcome)
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
