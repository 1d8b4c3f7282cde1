"""Addresses to serve on: gRPC would take some wrong ones for others."""

from __future__ import annotations

import pytest

from nightjar.errors import ConfigError
from nightjar.rpc import Server


@pytest.mark.parametrize(
    "listen", ["127.0.0.1:99999", "127.0.0.1:-5", "127.0.0.1", ":80", "127.0.0.1:", "x:y", ""]
)
async def test_an_address_that_is_none_is_refused(listen: str) -> None:
    """The sentence names the flag and the value; nothing is bound elsewhere instead."""
    with pytest.raises(ConfigError, match=r"--listen=.*HOST:PORT"):
        Server(listen, [])
    with pytest.raises(ConfigError, match=r"--grpc-listen=.*HOST:PORT"):
        Server(listen, [], flag="--grpc-listen")


async def test_port_0_takes_a_free_one() -> None:
    """Whoever serves says where."""
    server = Server("127.0.0.1:0", [])
    await server.start()
    assert 0 < int(server.address.rpartition(":")[2]) <= 65_535
    await server.stop(0)
