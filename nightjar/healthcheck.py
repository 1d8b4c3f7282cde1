"""`nightjar healthcheck ADDRESS...`: exit 0 if every service says SERVING; for containers."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from nightjar import tls
from nightjar.rpc import check_address

POLL_S, CALL_TIMEOUT_S = 0.2, 2.0


def is_serving(channel: grpc.Channel) -> bool:
    """Ask once; no answer within CALL_TIMEOUT_S counts as not serving."""
    stub = health_pb2_grpc.HealthStub(channel)
    try:
        answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=CALL_TIMEOUT_S)
    except grpc.RpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def main(argv: Sequence[str]) -> int:
    """Exit status 0 if all serve, 1 if one does not.

    Raises:
        ConfigError: What was given is no address.
    """
    parser = argparse.ArgumentParser(prog="nightjar healthcheck", description=__doc__)
    parser.add_argument("address", nargs="+", help="host:port or unix:path of a service")
    parser.add_argument("--tls-ca", default="", help="PEM file of who signed its certificate")
    parser.add_argument("--tls-cert", default="", help="PEM file of a certificate to show")
    parser.add_argument("--tls-key", default="", help="PEM file of that certificate's key")
    parser.add_argument("--wait", type=float, default=0, help="seconds to go on asking [0]")
    arguments = parser.parse_args(argv)
    for address in arguments.address:
        check_address(address)
    credentials = tls.client("--tls", arguments.tls_ca, arguments.tls_cert, arguments.tls_key)
    deadline = time.monotonic() + arguments.wait
    for address in arguments.address:
        with tls.open_channel(address, credentials) as channel:
            while not is_serving(channel):
                if time.monotonic() >= deadline:
                    print(f"nightjar healthcheck: {address} does not serve", file=sys.stderr)
                    return 1
                time.sleep(POLL_S)
    return 0
