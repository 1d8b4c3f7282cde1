"""TLS from PEM files, checked at the start: a wrong one is refused by flag, path and reason."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import NamedTuple

import grpc

from nightjar.errors import ConfigError


class ServerTls(NamedTuple):
    """One identity for both kinds of server."""

    grpc: grpc.ServerCredentials
    context: ssl.SSLContext


def server(cert: str, key: str, client_ca: str) -> ServerTls | None:
    """What `--tls-cert`, `--tls-key` and `--tls-client-ca` ask for; None without a certificate.

    With `client_ca`, clients must show a certificate that it signed.

    Raises:
        ConfigError: A file is missing, is no PEM, or does not belong to the other.
    """
    if client_ca and not cert:
        raise ConfigError(f"--tls-client-ca={client_ca!r}: needs --tls-cert and --tls-key as well")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    identity = _identity(context, "--tls", cert, key)
    if identity is None:
        return None
    context.set_alpn_protocols(["http/1.1"])
    authority = _authority(context, "--tls-client-ca", client_ca) if client_ca else None
    if authority is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    credentials = grpc.ssl_server_credentials([identity], authority, bool(client_ca))
    return ServerTls(credentials, context)


def client(prefix: str, ca: str, cert: str, key: str) -> grpc.ChannelCredentials | None:
    """What `PREFIX-ca`, `PREFIX-cert` and `PREFIX-key` ask for; None, which is plain, without a CA.

    Raises:
        ConfigError: As for `server`.
    """
    if (cert or key) and not ca:
        flag, path = (f"{prefix}-cert", cert) if cert else (f"{prefix}-key", key)
        raise ConfigError(f"{flag}={path!r}: needs {prefix}-ca as well")
    if not ca:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority = _authority(context, f"{prefix}-ca", ca)
    private_key, chain = _identity(context, prefix, cert, key) or (None, None)
    return grpc.ssl_channel_credentials(authority, private_key, chain)


def open_channel(address: str, credentials: grpc.ChannelCredentials | None) -> grpc.Channel:
    """Dial for a command of few calls, plainly without `credentials`."""
    options = [("grpc.max_reconnect_backoff_ms", 1000)]
    if credentials is None:
        return grpc.insecure_channel(address, options)
    return grpc.secure_channel(address, credentials, options)


def _identity(
    context: ssl.SSLContext, prefix: str, cert: str, key: str
) -> tuple[bytes, bytes] | None:
    """Key and certificates, once the TLS library takes them as a pair."""
    if bool(cert) != bool(key):
        have, lack = ("cert", "key") if cert else ("key", "cert")
        raise ConfigError(f"{prefix}-{have}={cert or key!r}: needs {prefix}-{lack} as well")
    if not cert:
        return None
    chain = _read(f"{prefix}-cert", cert, b"-----BEGIN CERTIFICATE-----", "certificate")
    private_key = _read(f"{prefix}-key", key, b"PRIVATE KEY-----", "private key")
    try:
        # Without a password here, an encrypted key would have the library ask at the terminal.
        context.load_cert_chain(cert, key, password="")
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"{prefix}-cert={cert!r}, {prefix}-key={key!r}: {_why(error)}; they must be a "
            f"certificate and its own key, and the key without a password"
        ) from None
    return private_key, chain


def _authority(context: ssl.SSLContext, flag: str, path: str) -> bytes:
    content = _read(flag, path, b"-----BEGIN CERTIFICATE-----", "certificate")
    try:
        context.load_verify_locations(path)
    except ssl.SSLError as error:
        raise ConfigError(f"{flag}={path!r}: {_why(error)}") from None
    return content


def _read(flag: str, path: str, marker: bytes, what: str) -> bytes:
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag}={path!r}: {error.strerror}") from None
    if marker not in content:
        raise ConfigError(f"{flag}={path!r}: holds no {what} in PEM form")
    return content


def _why(error: Exception) -> str:
    reason = getattr(error, "reason", None)
    return reason.replace("_", " ").lower() if isinstance(reason, str) else str(error)
