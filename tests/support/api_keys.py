"""API keys for tests, and a file of them."""

from __future__ import annotations

from pathlib import Path

from gateway.keys import digest_of

KEY, OTHER = "a-right-key", "another-right-key"


def line(name: str, key: str) -> str:
    """A line of the file."""
    return f"{name} {digest_of(key.encode()).hex()}\n"


def write_keys(folder: Path) -> Path:
    """A file with alice's KEY and bob's OTHER."""
    path = folder / "api-keys"
    path.write_text("# who may call\n\n" + line("alice", KEY) + line("bob", OTHER))
    return path


def bearer(*keys: str) -> tuple[tuple[str, str], ...]:
    """Metadata of gRPC, or headers, that send the keys."""
    return tuple(("authorization", f"Bearer {key}") for key in keys)
