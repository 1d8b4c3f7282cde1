"""`nightjar planner`: wires core, store and server together, until a signal."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import re
import secrets
import time
from collections.abc import Sequence

from nightjar import log
from nightjar.config import parse
from nightjar.errors import ConfigError, InvalidRequest
from nightjar.rpc import Server, until_signalled
from nightjar.v1 import planner_pb2_grpc
from planner_service.admin_server import wall_ms
from planner_service.audit import AuditLog
from planner_service.config import PlannerConfig
from planner_service.ledger import Ledger
from planner_service.planner import Planner
from planner_service.plugins.discovery import load_plugins
from planner_service.policies import BUILT_IN
from planner_service.policies.policy import Registry
from planner_service.server import PlannerServicer
from planner_service.store import RedisStore, connect
from planner_service.sync import Sync
from planner_service.versions import EVERYONE, Book

GC_THRESHOLD = 50_000  # allocations between collections; hardly any of them makes a cycle

_NEXT_PAIR = re.compile(r",(?=\s*[A-Za-z_]\w*\s*=)")

DESCRIPTION = """Run the planner: it learns how many draft tokens pay off and tells the workers.

  nightjar planner --listen 127.0.0.1:7001 --store redis://localhost:6379/0

It prints `listening on ADDRESS` once it serves."""


def main(argv: Sequence[str], registry: Registry = BUILT_IN) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status."""
    config = parse(PlannerConfig, argv, prog="nightjar planner", description=DESCRIPTION)
    log.configure("planner")
    asyncio.run(serve(config, registry))
    return 0


async def serve(config: PlannerConfig, registry: Registry = BUILT_IN) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        ConfigError: The store's URL, the first policy, the audit log or the address is wrong.
    """
    plugins, process = load_plugins(registry, config.plugin_timeout_ms / 1000)
    with contextlib.ExitStack() as stack:
        if process is not None:
            stack.callback(process.close)
        await _serve(config, {**registry, **plugins})


async def _serve(config: PlannerConfig, registry: Registry) -> None:
    def withdraw(version_id: str, because: str, at_ms: int) -> None:
        sync.withdraw(version_id, because, at_ms)

    incarnation = secrets.token_hex(6)
    store = RedisStore(connect(config.store), incarnation) if config.store else None
    planner = Planner(
        registry=registry,
        ledger=Ledger(stored=store is not None),
        incarnation=incarnation,
        rng=random.Random(),
        clock=time.monotonic,
        on_withdraw=withdraw,
        probe_share=config.probe_share,
        now_ms=wall_ms,
    )
    sync = Sync(planner, store, first=first_book(config, planner), clock=time.monotonic)
    # What stands now stays; and a full collection of what was learned would hold decisions up.
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    audit = None
    if config.audit_log:
        audit = AuditLog(config.audit_log, config.audit_max_mb * 1_000_000)
    servicer = PlannerServicer(planner, sync, audit)
    server = Server(config.listen, ["nightjar.v1.PlannerService"])
    planner_pb2_grpc.add_PlannerServiceServicer_to_server(servicer, server.grpc)
    try:
        await sync.start()
        await server.start()
        await _run(sync, servicer, server, config.drain_timeout_s)
    finally:
        await sync.finish()
        if audit is not None:
            await asyncio.to_thread(audit.close)


async def _run(
    sync: Sync, servicer: PlannerServicer, server: Server, drain_timeout_s: float
) -> None:
    """Serve, and keep memory and store together, until a signal."""
    background = asyncio.create_task(sync.run())
    signalled = asyncio.create_task(until_signalled())
    await server.set_ready(True)
    print(f"listening on {server.address}", flush=True)
    try:
        await asyncio.wait({signalled, background}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        servicer.close()
        await server.stop(drain_timeout_s)
        signalled.cancel()
        background.cancel()
        ended = await asyncio.gather(background, signalled, return_exceptions=True)
    for result in ended:
        if isinstance(result, Exception):
            raise result


def read_parameters(text: str) -> dict[str, str]:
    """NAME=VALUE,NAME=VALUE as a dictionary; commas that no NAME= follows are the value's.

    Raises:
        ConfigError: A part is no such pair, or a name comes twice.
    """
    given: dict[str, str] = {}
    for pair in _NEXT_PAIR.split(text) if text.strip() else ():
        name, separator, value = (part.strip() for part in pair.partition("="))
        if not separator or not name.isidentifier():
            raise ConfigError(
                f"--policy-parameters={text!r}: must be NAME=VALUE,NAME=VALUE, "
                "for example preset=custom,ranges=1-64:3,65-128:1"
            )
        if name in given:
            raise ConfigError(f"--policy-parameters={text!r}: {name} is given twice")
        given[name] = value
    return given


def first_book(config: PlannerConfig, planner: Planner) -> Book:
    """The versions of a store that has none yet.

    Raises:
        ConfigError: The policy or a parameter is wrong.
    """
    given = read_parameters(config.policy_parameters)
    spec = planner.registry.get(config.policy)
    if spec is not None and any(parameter.name == "gamma_max" for parameter in spec.parameters):
        given.setdefault("gamma_max", str(config.gamma_max))
    try:
        parameters = planner.prepare(config.policy, given, EVERYONE)
    except InvalidRequest as error:
        raise ConfigError(f"--policy={config.policy!r}: {error}") from None
    return Book().activate(config.policy, parameters, EVERYONE, int(time.time() * 1000), "default")
