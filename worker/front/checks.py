"""What can be held against a worker's flags before it opens a port and starts an engine."""

from __future__ import annotations

import tempfile

from memory_agent.arena import no_file_in
from memory_agent.failpoint import check_failpoints
from nightjar.rpc import check_address
from worker.config import WorkerConfig, check_shm_dir
from worker.engine.limits import check_config
from worker.model.folders import check_folders


def check_flags(config: WorkerConfig) -> None:
    """Refuse flags that are wrong whatever torch, the GPU and the network say.

    Raises:
        ConfigError: Names the flag, its value and what would do.
    """
    check_config(config)
    for flag, address in (("--planner", config.planner), ("--memory-agent", config.memory_agent)):
        if address:
            check_address(address, flag)
    check_failpoints()
    check_shm_dir(config.shm_dir)
    if config.proposer == "draft_model":  # then the pool lies there
        _check_room(config.shm_dir)
    check_folders(config)


def _check_room(shm_dir: str) -> None:
    try:
        tempfile.TemporaryFile(dir=shm_dir).close()
    except OSError as error:
        raise no_file_in(shm_dir, error) from None
