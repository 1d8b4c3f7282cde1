"""The file of API keys, which holds their hashes alone, and `nightjar keygen`, which makes lines.

A line is `NAME SHA256`: the digest of the key in hex. `#` begins a comment line.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import hmac
import re
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from nightjar import log
from nightjar.errors import ConfigError

KEY_BYTES = 32  # as random as a key gets; so a plain, fast hash keeps it secret
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


def digest_of(key: bytes) -> bytes:
    """SHA-256 of a key."""
    return hashlib.sha256(key).digest()


def parse_keys(path: str, content: bytes) -> list[tuple[str, bytes]]:
    """Name and digest of each line.

    Raises:
        ConfigError: A line is none, or repeats a name or a key; says file and line number.
    """
    keys: dict[str, bytes] = {}
    for number, line in enumerate(content.decode(errors="replace").splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        problem = ""
        if len(words) != 2 or not _NAME.fullmatch(words[0]) or not _DIGEST.fullmatch(words[1]):
            problem = "must be a name (letters, digits, . _ @ -) and 64 hex digits, its key's hash"
        elif words[0] in keys:
            problem = f"the name {words[0]!r} stands above already"
        elif bytes.fromhex(words[1]) in keys.values():
            problem = "this key stands above already, under another name"
        if problem:
            raise ConfigError(f"--api-keys={path!r}: line {number}: {problem}")
        keys[words[0]] = bytes.fromhex(words[1])
    return list(keys.items())


class KeyFile:
    """The keys of a file, as it was when it was last good.

    A file without keys lets nobody in. One that turns bad or goes away changes nothing, but is
    complained about, once.
    """

    def __init__(self, path: str) -> None:
        """Read it.

        Raises:
            ConfigError: It cannot be read, or a line is wrong.
        """
        self._path = path
        self._seen: bytes | str = ""
        self._keys: list[tuple[str, bytes]] = []
        self._take(self._read())

    def name_of(self, key: bytes) -> str | None:
        """Whose key it is; the time taken depends on the number of keys alone."""
        digest, found = digest_of(key), None
        for name, known in self._keys:  # all of them, whichever matches
            if hmac.compare_digest(digest, known):
                found = name
        return found

    def reload(self) -> None:
        """Take over what the file says now, if that is new and good."""
        try:
            content: bytes | str = self._read()
        except ConfigError as error:
            content = str(error)
        if content == self._seen:
            return
        try:
            if isinstance(content, str):
                raise ConfigError(content)
            self._take(content)
        except ConfigError as error:
            log.get().error("the keys of before still count", why=str(error))
        self._seen = content

    async def watch(self, interval_s: float) -> None:
        """Reload every `interval_s` seconds, for ever."""
        while True:
            await asyncio.sleep(interval_s)
            await asyncio.to_thread(self.reload)

    def _read(self) -> bytes:
        try:
            return Path(self._path).read_bytes()
        except OSError as error:
            raise ConfigError(f"--api-keys={self._path!r}: {error.strerror}") from None

    def _take(self, content: bytes) -> None:
        self._keys, self._seen = parse_keys(self._path, content), content
        log.get().info("API keys", num_keys=len(self._keys))


def main(argv: Sequence[str]) -> int:
    """Make a key: its line for the file goes to standard output, the key to standard error."""
    parser = argparse.ArgumentParser(
        prog="nightjar keygen",
        description="Make an API key. Its line for the gateway's --api-keys file goes to standard "
        "output, the key itself to standard error: nightjar keygen alice >> api-keys",
    )
    parser.add_argument("name", help="whose key it is: letters, digits, . _ @ -")
    name = parser.parse_args(argv).name
    if not _NAME.fullmatch(name):
        raise ConfigError(f"name {name!r}: must be 1 to 64 letters, digits, . _ @ -")
    key = secrets.token_urlsafe(KEY_BYTES)
    print(f"{name} {digest_of(key.encode()).hex()}")
    print(f"The key, shown this once: {key}", file=sys.stderr)
    return 0
