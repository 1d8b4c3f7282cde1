"""Certificates for tests, made by the openssl program: an authority and what it signs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

NEW_KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]


def openssl(*argv: str | Path) -> None:
    """Run the program; the test is skipped where there is none."""
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("makes certificates with the openssl program, which is not installed")
    subprocess.run([program, *map(str, argv)], check=True, capture_output=True, timeout=30)


class Authority:
    """A certificate authority with a folder of its own; `ca` is its certificate."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder, self.ca, self._key = folder, folder / "ca.pem", folder / "ca.key"
        files = ("-keyout", self._key, "-out", self.ca)
        openssl("req", "-x509", *NEW_KEY, "-days", "2", "-subj", "/CN=authority", *files)

    def sign(self, name: str) -> tuple[Path, Path]:
        """Certificate and key of `name`, good for localhost and 127.0.0.1."""
        cert, key, asks = (self._folder / f"{name}.{end}" for end in ("pem", "key", "csr"))
        extensions = self._folder / f"{name}.ext"
        extensions.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
        openssl("req", "-new", *NEW_KEY, "-subj", f"/CN={name}", "-keyout", key, "-out", asks)
        signer = ("-CA", self.ca, "-CAkey", self._key, "-CAcreateserial", "-days", "2")
        openssl("x509", "-req", "-in", asks, *signer, "-extfile", extensions, "-out", cert)
        return cert, key
