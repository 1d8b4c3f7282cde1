"""Who may call what: the one table of the public doors' HTTP routes and gRPC methods.

Default deny: what the table does not name is refused even where a router knows it, and
everything but `public` needs a key once there are keys.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from nightjar.errors import ConfigError

# public: anybody. key: whoever has a key. admin: nobody, at these doors.
Rule = Literal["public", "key", "admin"]

# By method and path as the router spells it; HEAD goes with GET.
HTTP_RULES: Mapping[tuple[str, str], Rule] = {
    ("POST", "/v1/chat/completions"): "key",
    ("POST", "/v1/completions"): "key",
    ("POST", "/v1/embeddings"): "key",
    ("GET", "/v1/models"): "key",
    ("GET", "/v1/models/{name:path}"): "key",
    ("GET", "/health/live"): "public",
    ("GET", "/health/ready"): "public",
    ("GET", "/health"): "public",
    ("GET", "/openapi.json"): "key",
}

# The gateway has no admin calls of its own, so it has no admin port. Those of the other
# services are listed to say that they are never handed on from here.
GRPC_RULES: Mapping[str, Rule] = {
    "/nightjar.v1.GenerationService/Generate": "key",
    "/grpc.health.v1.Health/Check": "public",
    "/grpc.health.v1.Health/Watch": "public",
    "/grpc.health.v1.Health/List": "public",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": "key",
    "/nightjar.v1.WorkerService/GetWorkerStatus": "admin",
    "/nightjar.v1.WorkerService/Drain": "admin",
    "/nightjar.v1.PlannerService/ActivatePolicy": "admin",
    "/nightjar.v1.PlannerService/RollbackPolicy": "admin",
    "/grpc.channelz.v1.Channelz/GetServers": "admin",
}

NO_KEY = "no API key was given: send one as `Authorization: Bearer KEY`"
WRONG_KEY = "the API key is not known here"


class Keys(Protocol):
    """The keys that count now."""

    def name_of(self, key: bytes) -> str | None:
        """Whose key it is, or None."""
        ...


class Access:
    """Decides by the table; without `keys`, anybody may do what needs a key."""

    def __init__(self, keys: Keys | None) -> None:
        self._keys = keys

    def refusal(self, rule: Rule | None, authorization: Sequence[bytes]) -> str:
        """Why a caller is not let in; empty where it is.

        A call that no rule names, and an admin call, need a key to be told that they are not
        served, so that nobody learns without one what is.

        Args:
            rule: The rule of what is called, None if the table does not name it.
            authorization: Every `authorization` header of the call.
        """
        if self._keys is None or rule == "public":
            return ""
        if not authorization:
            return NO_KEY
        scheme, _, key = authorization[0].partition(b" ")
        if len(authorization) > 1 or scheme.lower() != b"bearer":
            return NO_KEY
        return WRONG_KEY if self._keys.name_of(key.strip()) is None else ""


def check_exposure(listens: Mapping[str, str]) -> None:
    """Refuse addresses that other machines reach; for a gateway that asks nobody for a key.

    Args:
        listens: Flag -> address, HOST:PORT or unix:PATH.

    Raises:
        ConfigError: An address is neither loopback nor a unix socket.
    """
    for flag, listen in listens.items():
        if not _is_local(listen):
            raise ConfigError(
                f"{flag}={listen!r}: other machines may reach this, and without --api-keys anybody "
                f"would be served; give --api-keys, or --allow-anonymous=true if that is meant"
            )


def _is_local(listen: str) -> bool:
    if listen.startswith("unix:"):
        return True
    host = listen.rpartition(":")[0].strip("[]")
    if not host:
        return True  # no address at all; whoever binds it says so
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
