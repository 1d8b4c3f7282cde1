"""The memory agent's process: `nightjar memory-agent`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

from memory_agent.agent import Thresholds
from memory_agent.config import AgentConfig
from memory_agent.failpoint import check_failpoints
from memory_agent.server import MemoryServicer
from nightjar import log
from nightjar.config import parse
from nightjar.errors import ConfigError
from nightjar.rpc import Server, until_signalled
from nightjar.v1 import memory_pb2_grpc


def main(argv: Sequence[str]) -> int:
    """Serve until SIGTERM or SIGINT; returns 0 once the running grant is answered.

    A GPU that failed cannot be used again by the same process, which then returns 1.

    Raises:
        ConfigError: A flag or variable is wrong, or the address is taken.
    """
    config = parse(
        AgentConfig,
        argv,
        prog="nightjar memory-agent",
        description=(
            "Turns an idle draft's memory into KV blocks and back, one worker at a time.\n\n"
            "It asks the worker to expand when, for t-persist reports in a row, the policy's\n"
            "unexplored choice was gamma 0 and free blocks were below tau-low; to contract when,\n"
            "for as many and hold-s after the expansion, nothing waited and free blocks exceeded\n"
            "the tail's blocks + tau-high."
        ),
    )
    check_failpoints()
    if not os.path.isdir(config.shm_dir):
        raise ConfigError(f"--shm-dir={config.shm_dir!r}: is not a folder")
    log.configure("memory_agent")
    return asyncio.run(_serve(config))


async def _serve(config: AgentConfig) -> int:
    thresholds = Thresholds(
        tau_low=config.tau_low,
        tau_high=config.tau_high,
        t_persist=config.t_persist,
        hold_s=config.hold_s,
        backoff_s=config.backoff_s,
    )
    servicer = MemoryServicer(thresholds, config.shm_dir, config.reload_share)
    server = Server(config.listen, ["nightjar.v1.MemoryService"])
    memory_pb2_grpc.add_MemoryServiceServicer_to_server(servicer, server.grpc)
    await server.start()
    await server.set_ready(True)
    print(f"listening on {server.address}", flush=True)
    signalled = asyncio.create_task(until_signalled())
    both: set[asyncio.Future[Any]] = {signalled, servicer.failed}
    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    signalled.cancel()
    await server.set_ready(False)
    await servicer.stop()
    await server.stop(grace_s=1.0)
    if servicer.failed.done():
        log.get().error("the agent ends", reason=servicer.failed.result())
        return 1
    return 0
