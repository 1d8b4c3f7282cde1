"""The memory agent's process: `nightjar memory-agent`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

from memory_agent.agent import Thresholds
from memory_agent.config import AgentConfig
from memory_agent.server import MemoryServicer
from nightjar import log
from nightjar.config import parse
from nightjar.errors import ConfigError
from nightjar.rpc import Server, until_signalled
from nightjar.v1 import memory_pb2_grpc


def main(argv: Sequence[str]) -> int:
    """Serve until SIGTERM or SIGINT; returns 0 once the running grant is answered.

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
            "for as many, nothing waited and free blocks exceeded the tail's blocks + tau-low."
        ),
    )
    if not os.path.isdir(config.shm_dir):
        raise ConfigError(f"--shm-dir={config.shm_dir!r}: is not a folder")
    log.configure("memory_agent")
    asyncio.run(_serve(config))
    return 0


async def _serve(config: AgentConfig) -> None:
    thresholds = Thresholds(
        tau_low=config.tau_low, t_persist=config.t_persist, backoff_s=config.backoff_s
    )
    servicer = MemoryServicer(thresholds, config.shm_dir)
    server = Server(config.listen, ["nightjar.v1.MemoryService"])
    memory_pb2_grpc.add_MemoryServiceServicer_to_server(servicer, server.grpc)
    await server.start()
    await server.set_ready(True)
    print(f"listening on {server.address}", flush=True)
    await until_signalled()
    await server.set_ready(False)
    await servicer.stop()
    await server.stop(grace_s=1.0)
