"""`nightjar worker`: wires the front together, and takes it down in order."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Coroutine, Sequence
from types import ModuleType
from typing import Any

from nightjar import log, rpc, tls
from nightjar.config import parse, to_argv
from nightjar.v1 import generation_pb2_grpc, worker_pb2_grpc
from worker.config import WorkerConfig
from worker.front.checks import check_flags
from worker.front.engine_client import EngineClient
from worker.front.engine_process import engine_command, remove_left_files
from worker.front.reconnect import first_of
from worker.front.state import WorkerState
from worker.memory_client import MemoryClient
from worker.messages import (
    Grant,
    PoolMap,
    Pressure,
    Ready,
    Reports,
    RequestRefused,
    TransitionDone,
)
from worker.model.fetch import cache_folder, resolve_model
from worker.planner_client import PlannerClient
from worker.server import GenerationServicer
from worker.status_server import WorkerServicer
from worker.text.tokenizer import Tokenizer

SERVICES = ("nightjar.v1.GenerationService", "nightjar.v1.WorkerService")
READINESS_INTERVAL_S = 0.2
ENGINE_EXIT_S = 10.0
CALL_EXIT_S = 1.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run a worker until a signal or the end of its engine; returns the exit status.

    Raises:
        ConfigError: A flag, a variable or a file is wrong.
        ModelRefused: The model cannot be served.
    """
    config = parse(
        WorkerConfig,
        sys.argv[1:] if argv is None else argv,
        prog="nightjar worker",
        description="Serve one model: a front for gRPC and an engine process for the step loop.",
    )
    check_flags(config)
    log.configure("worker")
    return asyncio.run(serve(config, engine_command(to_argv(config))))


async def serve(config: WorkerConfig, command: Sequence[str]) -> int:
    """Serve with the engine that `command` starts; 0 after a drain, 1 if the engine is lost.

    Raises:
        NightjarError: The address cannot be bound, or the engine cannot serve.
    """
    identity = tls.server(config.tls_cert, config.tls_key, config.tls_client_ca)
    engine = EngineClient(
        command,
        stream_interval_ms=config.stream_interval_ms,
        progress_timeout_s=config.progress_timeout_s,
    )
    state = WorkerState(config, engine)
    vllm = _vllm()
    names = SERVICES if vllm is None else (*SERVICES, vllm.SERVICE)
    server = rpc.Server(config.listen, names, identity and identity.grpc)
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(
        GenerationServicer(state), server.grpc
    )
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(WorkerServicer(state), server.grpc)
    if vllm is not None:
        vllm.add_to(server.grpc, state)
    await server.start()
    print(f"listening on {server.address}", flush=True)
    background: list[asyncio.Task[None]] = []
    try:
        signalled = asyncio.create_task(rpc.until_signalled())
        starting = asyncio.create_task(_start(state, background))
        background += [signalled, starting]
        await asyncio.wait({signalled, starting}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            background.append(asyncio.create_task(_keep_readiness(state, server)))
            await first_of(engine.wait_gone(), asyncio.wait({signalled}))
        if engine.gone:
            return 1
        await _drain(state, server)
        return 1 if engine.gone else 0
    finally:
        state.admission.draining = True
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        await server.set_ready(False)
        await engine.stop(ENGINE_EXIT_S)
        remove_left_files(config.shm_dir, engine.pid)
        await server.stop(CALL_EXIT_S)


def _vllm() -> ModuleType | None:
    """What serves `vllm.grpc.engine`, where the package with its messages is installed."""
    if importlib.util.find_spec("smg_grpc_proto") is None:
        return None
    from worker.vllm import server

    return server


async def _start(state: WorkerState, background: list[asyncio.Task[None]]) -> None:
    """Bring the engine up, then what depends on its facts."""
    config, engine = state.config, state.engine
    ready = await engine.start()
    # The engine has fetched the model by now, so this only finds it again.
    tokenizer = await asyncio.to_thread(_load_tokenizer, config)
    background += [asyncio.create_task(coroutine) for coroutine in _peers(state, ready)]
    state.set_tokenizer(tokenizer)
    log.get().info(
        "ready",
        model=state.model_name,
        device=ready.device,
        dtype=ready.dtype,
        arithmetic=ready.arithmetic,
        build=ready.build,
        proposer=ready.proposer,
        engine_pid=ready.engine_pid,
    )


def _load_tokenizer(config: WorkerConfig) -> Tokenizer:
    folder = resolve_model(
        config.model,
        cache_folder(config.cache_dir),
        lambda *_: None,
        needs_weights=config.load_format != "dummy",
    )
    return Tokenizer.load(folder)


def _peers(state: WorkerState, ready: Ready) -> list[Coroutine[Any, Any, None]]:
    """Clients of the planner and of the memory agent, where they are configured."""
    config, engine = state.config, state.engine
    peers: list[Coroutine[Any, Any, None]] = []
    if config.planner:
        planner = PlannerClient(config.planner, state.worker_id, ready, engine.send)
        engine.on(Reports, planner.report)
        state.planner_connected = lambda: planner.connected
        state.planner_reason = lambda: planner.reason
        peers.append(planner.run())
    if config.memory_agent and ready.pool is not None:
        agent = MemoryClient(config.memory_agent, state.worker_id, ready.pool, engine.send)
        for kind in (Pressure, Grant, RequestRefused, TransitionDone, PoolMap):
            engine.on(kind, agent.forward)
        state.agent_attached = lambda: agent.attached
        state.agent_reason = lambda: agent.reason
        peers.append(agent.run())
    elif config.memory_agent:
        reason = "there is no draft model to move"
        state.agent_reason = lambda: reason
        log.get().info("no memory agent is used", reason=reason)
    return peers


async def _keep_readiness(state: WorkerState, server: rpc.Server) -> None:
    """Health follows the engine's progress."""
    was = False
    while True:
        now = state.serving
        if now != was:
            was = now
            await server.set_ready(now)
            log.get().info(
                "health", serving=now, progress_age_s=round(state.engine.progress_age_s, 1)
            )
        await asyncio.sleep(READINESS_INTERVAL_S)


async def _drain(state: WorkerState, server: rpc.Server) -> None:
    """Stop admission, and let the calls inside finish; a second signal cuts that short."""
    state.admission.draining = True
    await server.set_ready(False)
    log.get().info("draining", num_open=state.admission.num_open)
    await first_of(
        rpc.until_signalled(),
        state.admission.wait_idle(state.config.drain_timeout_s),
        state.engine.wait_gone(),
    )


if __name__ == "__main__":
    from nightjar.cli import main as command_line

    sys.exit(command_line(["worker", *sys.argv[1:]]))
