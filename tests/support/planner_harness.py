"""A planner for tests, in this process or as a command, and messages as a worker sends them."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import redis
from processes import Command

from nightjar.rpc import dial
from nightjar.v1 import planner_pb2 as pb
from nightjar.v1 import planner_pb2_grpc
from planner_service.config import PlannerConfig
from planner_service.main import serve
from planner_service.policies import BUILT_IN
from planner_service.policies.policy import Registry

PROFILE = pb.Profile(
    target="target",
    draft="draft",
    proposer="draft_model",
    dtype="float32",
    device="cpu",
    tensor_parallel_size=1,
    engine="tests",
)


@contextlib.asynccontextmanager
async def running_planner(
    registry: Registry = BUILT_IN, **settings: Any
) -> AsyncIterator[planner_pb2_grpc.PlannerServiceAsyncStub]:
    """A stub of a planner that serves in this event loop, on a unix socket."""
    with tempfile.TemporaryDirectory(prefix="nj-planner-") as folder:
        address = f"unix:{Path(folder) / 's'}"
        config = PlannerConfig(
            listen=address, **{"drain_timeout_s": 1.0, "probe_share": 0, **settings}
        )
        serving = asyncio.create_task(serve(config, registry))
        try:
            async with dial(address) as channel:
                ready = asyncio.ensure_future(channel.channel_ready())
                await asyncio.wait({ready, serving}, return_when=asyncio.FIRST_COMPLETED)
                if serving.done():
                    ready.cancel()
                    await serving
                yield planner_pb2_grpc.PlannerServiceStub(channel)
        finally:
            serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await serving


@contextlib.asynccontextmanager
async def dialled(address: str) -> AsyncIterator[planner_pb2_grpc.PlannerServiceAsyncStub]:
    """A stub of a planner that runs elsewhere."""
    async with dial(address) as channel:
        yield planner_pb2_grpc.PlannerServiceStub(channel)


async def comes_true(holds: Callable[[], Awaitable[Any]], timeout_s: float = 20) -> Any:
    """Wait until `await holds()` is true; returns it."""
    async with asyncio.timeout(timeout_s):
        while not (value := await holds()):  # noqa: ASYNC110  # it changes in another process
            await asyncio.sleep(0.02)
        return value


class Worker:
    """One Plan stream."""

    def __init__(
        self,
        stub: Any,
        name: str = "worker-1",
        max_batch_size: int = 16,
        profile: pb.Profile = PROFILE,
    ) -> None:
        self.stream: grpc.aio.StreamStreamCall[Any, Any] = stub.Plan()
        self._hello = pb.PlanHello(
            worker_id=name, profile=profile, max_gamma=5, max_batch_size=max_batch_size
        )
        self.decision = pb.Decision()

    async def send(self, *, hello: bool = False, **fields: Any) -> None:
        """Send one message; the first of a stream says hello."""
        request = pb.PlanRequest(**fields)
        if hello:
            request.hello.CopyFrom(self._hello)
        await self.stream.write(request)

    async def ask(
        self, batch_size: int = 1, *reports: pb.StepReport, hello: bool = False, **fields: Any
    ) -> pb.Decision:
        """Report, ask and read the answer."""
        fields.setdefault("session", self.decision.session)
        await self.send(hello=hello, ask=context(batch_size), reports=reports, **fields)
        return await self.next()

    async def next(self) -> pb.Decision:
        """The next decision; a stream that failed raises its status."""
        async with asyncio.timeout(20):
            response = await self.stream.read()
        if not isinstance(response, pb.PlanResponse):
            raise EOFError("the planner ended the stream")
        self.decision = response.decision
        return self.decision

    @property
    def gamma(self) -> int:
        """Gamma of the bucket that was asked about."""
        return gamma_of(self.decision)


def gamma_of(decision: pb.Decision, bucket: int | None = None) -> int:
    """Gamma of a bucket, else of the one that was asked about."""
    table = {row.bucket: row.gamma for row in decision.table}
    return table[decision.bucket if bucket is None else bucket]


def context(batch_size: int = 1, feasible_max_gamma: int = 5, **fields: Any) -> pb.Context:
    """A context as a worker sends it."""
    return pb.Context(
        batch_size=batch_size,
        feasible_max_gamma=feasible_max_gamma,
        draft_resident=True,
        **fields,
    )


def report(gamma: int = 0, batch_size: int = 1, steps: int = 1, **fields: Any) -> pb.StepReport:
    """Steps that emitted half of their drafts, 10 ms each."""
    rows = steps * batch_size
    emitted = rows + rows * gamma // 2
    values: dict[str, Any] = {
        "context": context(batch_size),
        "gamma": gamma,
        "num_steps": steps,
        "num_timed_steps": steps,
        "step_us": steps * 10_000,
        "num_timed_emitted": emitted,
        "num_emitted": emitted,
        "num_timed_rows": rows,
        "reached": [rows] * gamma,
        "accepted": [rows // 2] * gamma,
    }
    return pb.StepReport(**{**values, **fields})


@contextlib.contextmanager
def planner(
    store: str, *flags: str, argv: Sequence[str] = ("-m", "nightjar", "planner")
) -> Iterator[tuple[Command, str]]:
    """A planner process and its address."""
    with Command(*argv, "--store", store, *flags) as command:
        command.shows("listening on ")
        yield command, command.stdout.split("listening on ")[1].split()[0]


async def state(stub: Any) -> pb.GetPolicyStateResponse:
    """What the planner says about itself."""
    answer: pb.GetPolicyStateResponse = await stub.GetPolicyState(pb.GetPolicyStateRequest())
    return answer


async def num_steps(stub: Any) -> int:
    """Steps that taught the only profile; 0 if there is none."""
    return sum(known.num_steps for known in (await state(stub)).profiles)


async def stored(stub: Any, steps: int) -> None:
    """Wait until all these steps are known and in the store."""

    async def holds() -> bool:
        answer = await state(stub)
        known = sum(profile.num_steps for profile in answer.profiles)
        return known == steps and answer.store_connected and answer.store_lag_ms == 0

    await comes_true(holds)


def in_store(url: str) -> int:
    """Steps that the store holds, over all profiles."""
    with redis.Redis.from_url(url, decode_responses=True) as raw:
        keys = list(raw.scan_iter("nightjar:*:sums"))
        return sum(round(float(raw.hget(key, "total:steps") or 0)) for key in keys)


class Chatter:
    """A worker that reports and asks all the time, with how long each answer took."""

    def __init__(self, stub: Any, name: str = "chatter") -> None:
        self._worker = Worker(stub, name)
        self._enough = False
        self.taught: list[tuple[float, int]] = []  # when, and steps so far
        self.times_s: list[float] = []

    @property
    def num_taught(self) -> int:
        """Steps that were reported."""
        return self.taught[-1][1] if self.taught else 0

    async def _chat(self) -> None:
        await self._worker.ask(2, hello=True)
        while not self._enough:
            started = time.monotonic()
            await self._worker.ask(2, report(1, 2, 3))
            ended = time.monotonic()
            self.times_s.append(ended - started)
            self.taught.append((ended, self.num_taught + 3))
            await asyncio.sleep(0.004)

    @contextlib.asynccontextmanager
    async def chatting(self) -> AsyncIterator[Chatter]:
        """Chat for the time of a block; no answer may have waited for the store.

        The store's time-outs are a second and more. A planner or a stream that fails raises.
        """
        task = asyncio.create_task(self._chat())
        try:
            yield self
        finally:
            self._enough = True
            await task
        assert len(self.times_s) > 10
        assert statistics.median(self.times_s) < 0.02
        assert max(self.times_s) < 0.8
