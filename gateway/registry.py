"""The configured workers: probed all the time, up or down, with their last status.

A worker leaves by failing probes, by draining, or by an engine that makes no progress;
it is back with the first good probe.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import grpc

from gateway.config import GatewayConfig
from gateway.routing.facts import WorkerLoad
from gateway.worker_client import Stream, WorkerClient, WorkerFailed
from nightjar import log, tls
from nightjar.v1 import worker_pb2
from nightjar.validation import Limits

Status = worker_pb2.GetWorkerStatusResponse
GAMMA_SMOOTHING = 0.3  # weight of the newest status; policies explore, so one alone misleads


def why_not_ready(status: Status, max_progress_age_ms: int) -> str:
    """Why a worker with this status must get no requests; empty if it may."""
    if not status.accepting:
        return "admits no requests: it starts, drains or stands still"
    if status.progress_age_ms > max_progress_age_ms:
        return f"its engine made no step for {status.progress_age_ms} ms"
    if not status.model.name or status.model.vocab_size < 1 or status.model.max_model_len < 1:
        return "reports no model"
    return ""


def smoothed_gamma(before: float | None, status: Status) -> float | None:
    """The mean gamma of a worker after one more status; None while it runs nothing."""
    if status.num_running == 0:
        return None  # its last step was one of a batch that is gone
    return status.gamma if before is None else before + GAMMA_SMOOTHING * (status.gamma - before)


class Worker:
    """One worker: client, last status, and what this gateway sent it since."""

    def __init__(self, address: str, credentials: grpc.ChannelCredentials | None = None) -> None:
        self.address = address
        self.client = WorkerClient(address, credentials)
        self.status = Status()
        self.not_ready = "has not answered yet"  # the reason; empty while it is ready
        self.num_failures = 0  # failed probes in a row
        self.silent = False  # answers no probes, or its engine makes no steps
        self._streams: set[Stream] = set()
        self._num_dispatched = 0
        self._gamma: float | None = None  # smoothed; None while idle

    @property
    def load(self) -> WorkerLoad:
        """The router's view."""
        return WorkerLoad(
            address=self.address,
            model=self.status.model.name,
            ready=not self.not_ready,
            num_waiting=self.status.num_waiting,
            num_running=self.status.num_running,
            num_dispatched=self._num_dispatched,
            num_free_blocks=self.status.num_free_blocks,
            num_total_blocks=self.status.num_total_blocks,
            max_gamma=self.status.model.max_gamma,
            gamma=self._gamma,
            acceptance_rate=self.status.acceptance_rate,
            planner_connected=self.status.planner_connected,
            fingerprint=self.status.arithmetic.fingerprint,
        )

    @property
    def limits(self) -> Limits:
        """What the validator must know of this worker."""
        model = self.status.model
        return Limits(
            model=model.name, vocab_size=model.vocab_size, max_model_len=model.max_model_len
        )

    @contextmanager
    def answering(self, stream: Stream, num_choices: int) -> Iterator[None]:
        """Count a call while it is open: no status shows it yet, and the last may show it after."""
        self._num_dispatched += num_choices
        self._streams.add(stream)
        try:
            yield
        finally:
            self._streams.discard(stream)
            self._num_dispatched -= num_choices

    def leave_stalled(self, stall_timeout_s: float) -> None:
        """If the worker stands still, end the calls that waited so long and may go on elsewhere."""
        for stream in list(self._streams) if self.silent else ():
            stream.leave_if_stalled(stall_timeout_s)

    async def probe(self, config: GatewayConfig) -> None:
        """Ask once and take over the answer."""
        # A status shows what was sent before it was asked for: only that is settled by it.
        settled = self._num_dispatched
        try:
            self.status = await self.client.probe(config.probe_timeout_ms / 1000)
        except WorkerFailed as failure:
            self.num_failures += 1
            if self.num_failures >= config.probe_failures:
                silent = failure.lost or failure.code is grpc.StatusCode.DEADLINE_EXCEEDED
                self.not_ready = "does not answer" if silent else str(failure)
                self.silent = True
            return
        self._num_dispatched -= settled
        self._gamma = smoothed_gamma(self._gamma, self.status)
        self.num_failures = 0
        self.silent = self.status.progress_age_ms > config.max_progress_age_ms
        self.not_ready = why_not_ready(self.status, config.max_progress_age_ms)


class Registry:
    """All workers, with one probe loop each.

    Args:
        config: Addresses, intervals and bounds.
        on_change: Called with "is any worker ready" whenever that changes.
    """

    def __init__(self, config: GatewayConfig, on_change: Callable[[bool], Awaitable[None]]) -> None:
        self._config = config
        self._on_change = on_change
        self._announced = False
        self._draining = False
        self._loops: list[asyncio.Task[None]] = []
        credentials = tls.client(
            "--worker-tls", config.worker_tls_ca, config.worker_tls_cert, config.worker_tls_key
        )
        self.workers = {address: Worker(address, credentials) for address in config.workers}

    @property
    def ready(self) -> bool:
        """Whether this gateway wants requests: a worker is ready, and it is not draining."""
        return not self._draining and bool(self.models)

    @property
    def models(self) -> dict[str, worker_pb2.ModelInfo]:
        """Models of the ready workers, by name."""
        ready = [worker for worker in self.workers.values() if not worker.not_ready]
        return {worker.status.model.name: worker.status.model for worker in ready}

    def loads(self) -> list[WorkerLoad]:
        """The router's view of all workers."""
        return [worker.load for worker in self.workers.values()]

    def start(self) -> None:
        """Begin to probe every worker, in the background."""
        self._loops = [asyncio.create_task(self._loop(w)) for w in self.workers.values()]

    async def stop(self) -> None:
        """End the probes and close the channels."""
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        await asyncio.gather(*(worker.client.close() for worker in self.workers.values()))

    async def drain(self) -> None:
        """Not ready from here on; admitted requests still find their workers."""
        self._draining = True
        await self._announce()

    async def suspect(self, worker: Worker) -> None:
        """Send nothing more to a worker that a request lost, until a probe succeeds."""
        if not worker.not_ready:
            log.get().warning("worker left", worker=worker.address, reason="lost during a request")
        worker.not_ready = "was lost during a request"
        await self._announce()

    async def _loop(self, worker: Worker) -> None:
        while True:
            await self._probe(worker)
            await asyncio.sleep(self._config.probe_interval_ms / 1000)

    async def _probe(self, worker: Worker) -> None:
        before = worker.not_ready
        try:
            await worker.probe(self._config)
        except Exception as error:  # one bad answer must not end the loop that sees the next
            worker.not_ready = "its status cannot be read"
            log.get().error("probe failed", worker=worker.address, exc_info=error)
        if bool(worker.not_ready) != bool(before):
            say = log.get().warning if worker.not_ready else log.get().info
            say(
                "worker left" if worker.not_ready else "worker ready",
                worker=worker.address,
                reason=worker.not_ready,
            )
        worker.leave_stalled(self._config.stall_timeout_ms / 1000)
        await self._announce()

    async def _announce(self) -> None:
        if self.ready != self._announced:
            self._announced = self.ready
            await self._on_change(self._announced)
