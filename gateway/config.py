"""Configuration of the gateway; flags and variables derive from the fields."""

from __future__ import annotations

import dataclasses
from typing import Literal

from nightjar.config import at_least, option
from nightjar.rpc import is_address


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatewayConfig:
    """Everything a gateway can be told."""

    grpc_listen: str = option(
        "127.0.0.1:8001", "address of the gRPC service; port 0 takes a free one"
    )
    http_listen: str = option(
        "127.0.0.1:8000", "host:port of the OpenAI-compatible HTTP routes; port 0 takes a free one"
    )
    workers: tuple[str, ...] = option(
        (),
        "addresses of the workers, separated by commas",
        check=lambda given: 0 < len(given) == len(set(given)) and all(map(is_address, given)),
        limit="one address or more, each once: HOST:PORT or unix:PATH",
    )
    routing: Literal["least_loaded", "prefix_affinity", "speculation_aware"] = option(
        "prefix_affinity",
        "how a worker is chosen: prefix_affinity sends prompts that begin alike to one worker, "
        "least_loaded spreads them evenly, speculation_aware fills the workers that draft nothing",
    )
    routing_load_factor: float = option(
        1.25,
        "most requests of a worker, over its share of all, that affinity or filling may lead to",
        check=lambda given: 1 <= given <= 100,
        limit="1 to 100",
    )
    probe_interval_ms: int = at_least(10, 200, "milliseconds between two probes of a worker")
    probe_timeout_ms: int = at_least(10, 1000, "milliseconds that a worker has to answer a probe")
    probe_failures: int = at_least(1, 2, "failed probes in a row after which a worker is down")
    max_progress_age_ms: int = at_least(
        100, 10_000, "a worker whose engine made no step for this long is not ready"
    )
    stall_timeout_ms: int = at_least(
        100,
        2000,
        "an answer that brought nothing for this long goes on at another worker, if its own "
        "answers no probes or its engine makes no steps",
    )
    max_attempts: int = at_least(
        1, 3, "most calls for one answer, the first and those that go on with it included"
    )
    resume_timeout_s: float = at_least(
        0, 10, "seconds that an answer that broke off may wait for workers that are full"
    )
    max_open_requests: int = at_least(
        1, 1024, "answers open at once, each of a request's n counted; more are refused (429)"
    )
    max_queued_tokens: int = at_least(
        1,
        1_048_576,
        "tokens, about, of prompts that wait for their first token; more are refused (429), "
        "but for one that finds none waiting",
    )
    max_body_bytes: int = at_least(1024, 4 * 1024 * 1024, "most bytes of an HTTP request's body")
    api_keys: str = option(
        "",
        "file with a line for each API key, made by `nightjar keygen`; read again when it changes; "
        "empty asks nobody for a key",
    )
    allow_anonymous: bool = option(
        False, "without --api-keys, listen even where other machines may reach it"
    )
    tls_cert: str = option(
        "", "PEM file of the certificate chain for both protocols; empty speaks without TLS"
    )
    tls_key: str = option("", "PEM file of its private key, without a password")
    tls_client_ca: str = option(
        "", "PEM file of the authorities whose certificates clients must show (mTLS)"
    )
    worker_tls_ca: str = option(
        "", "PEM file of the authorities that signed the workers' certificates; empty dials plainly"
    )
    worker_tls_cert: str = option("", "PEM file of the certificate to show to workers (mTLS)")
    worker_tls_key: str = option("", "PEM file of its private key, without a password")
    drain_timeout_s: float = at_least(0, 30, "seconds that open requests get at SIGTERM")
