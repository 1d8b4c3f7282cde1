"""Wiring of the gateway: registry, dispatcher, gRPC and HTTP in one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from gateway.access import Access, check_exposure
from gateway.admission import Admission
from gateway.attempts import Bounds
from gateway.config import GatewayConfig
from gateway.dispatch import Dispatcher
from gateway.grpc_gate import GrpcGate
from gateway.http.app import make_app
from gateway.http.gate import Gate
from gateway.http.server import HttpServer, bind
from gateway.keys import KeyFile
from gateway.registry import Registry
from gateway.router import make_policy
from gateway.server import SERVICE_NAME, GenerationServicer
from nightjar import config as configuration
from nightjar import log, rpc, tls
from nightjar.errors import ConfigError
from nightjar.v1 import generation_pb2_grpc

KEYS_INTERVAL_S = 1.0


class Gateway:
    """The running gateway; addresses are known after `start`."""

    def __init__(self, config: GatewayConfig) -> None:
        """Bind the HTTP port; nothing runs yet.

        Raises:
            ConfigError: The port is taken, no worker is configured, a file of keys or of TLS is
                wrong, or anybody could call from elsewhere.
        """
        if not config.workers:
            raise ConfigError("--workers: needs the address of one worker or more")
        self._config = config
        if not config.api_keys and not config.allow_anonymous:
            listens = {"--grpc-listen": config.grpc_listen, "--http-listen": config.http_listen}
            check_exposure(listens)
        self._keys = KeyFile(config.api_keys) if config.api_keys else None
        self._watch: asyncio.Task[None] | None = None
        identity = tls.server(config.tls_cert, config.tls_key, config.tls_client_ca)
        access = Access(self._keys)
        self._grpc = rpc.Server(
            config.grpc_listen,
            [SERVICE_NAME],
            identity and identity.grpc,
            [GrpcGate(access)],
            flag="--grpc-listen",
        )
        self.registry = Registry(config, self._grpc.set_ready)
        policy = make_policy(config.routing, config.routing_load_factor)
        dispatcher = Dispatcher(
            self.registry,
            policy,
            Admission(config.max_open_requests, config.max_queued_tokens),
            Bounds(max_attempts=config.max_attempts, resume_timeout_s=config.resume_timeout_s),
        )
        app = make_app(dispatcher, self.registry, config.max_body_bytes)
        self._http = HttpServer(
            Gate(app, access),
            bind(config.http_listen),
            config.drain_timeout_s,
            identity and identity.context,
        )
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(
            GenerationServicer(dispatcher), self._grpc.grpc
        )

    @property
    def grpc_address(self) -> str:
        """Where GenerationService is served."""
        return self._grpc.address

    @property
    def http_address(self) -> str:
        """Where the HTTP routes are served, host:port."""
        return self._http.address

    async def start(self) -> None:
        """Serve both protocols and begin to look for workers.

        Raises:
            ConfigError: The gRPC port is taken.
        """
        try:
            await self._grpc.start()
        except ConfigError:
            await self._http.stop()
            raise
        await self._http.start()
        self.registry.start()
        if self._keys is not None:
            self._watch = asyncio.create_task(self._keys.watch(KEYS_INTERVAL_S))

    async def stop(self) -> None:
        """Drain: not ready, nothing new, open requests get their time, then the rest is cut."""
        await self.registry.drain()
        await asyncio.gather(self._http.stop(), self._grpc.stop(self._config.drain_timeout_s))
        await self.registry.stop()
        if self._watch is not None:
            self._watch.cancel()


async def serve(config: GatewayConfig) -> None:
    """Run until SIGTERM or SIGINT, then drain."""
    gateway = Gateway(config)
    await gateway.start()
    try:
        print(f"grpc listening on {gateway.grpc_address}", flush=True)
        print(f"http listening on {gateway.http_address}", flush=True)
        await rpc.until_signalled()
        log.get().info("draining", drain_timeout_s=config.drain_timeout_s)
    finally:
        await gateway.stop()


def main(argv: Sequence[str]) -> int:
    """Run the gateway; returns the exit status.

    Raises:
        ConfigError: A flag is wrong, or a port is taken.
    """
    config = configuration.parse(
        GatewayConfig,
        argv,
        prog="nightjar gateway",
        description="Serve gRPC and OpenAI-compatible HTTP in front of workers.",
    )
    log.configure("gateway")
    asyncio.run(serve(config))
    return 0
