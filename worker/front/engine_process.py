"""The engine's process: spawned with a private socket, watched, and cleaned up after."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from nightjar import log
from worker.channel import ChannelError, FrontChannel
from worker.messages import ToFront

STDERR = 2
DEATH_S = 0.5  # from the end of the socket to the end of the process, where that is why


class EngineProcess:
    """One spawned engine. Its socket lies in a folder of mode 0700 that goes once it has connected.

    The engine gets a session of its own, so that a terminal's Ctrl-C reaches the front alone,
    which drains it; an engine whose front dies sees its socket close, and ends.
    """

    def __init__(self, command: Sequence[str], on_message: Callable[[ToFront], None]) -> None:
        self._command = list(command)
        self._on_message = on_message
        self._folder: str | None = None
        self._server: asyncio.Server | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._watcher: asyncio.Task[None] | None = None
        self.channel: FrontChannel | None = None
        self.hung_up = False
        self.gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def pid(self) -> int:
        """Process id, 0 before `spawn`."""
        return 0 if self._process is None else self._process.pid

    async def spawn(self) -> None:
        """Listen, and start the process; `gone` resolves to a sentence when it has ended."""
        self._folder = tempfile.mkdtemp(prefix="nightjar-worker-")  # mode 0700
        path = str(Path(self._folder) / "engine.sock")
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(self._make_channel, path, backlog=1)
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            "--socket",
            path,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=STDERR,  # the front's own stdout holds one line alone
            start_new_session=True,
        )
        self._watcher = asyncio.create_task(self._watch(self._process))

    async def end(self, timeout_s: float) -> int | None:
        """Wait for the process to leave by itself, then make it; returns its exit status."""
        process = self._process
        try:
            if process is not None:
                await self._reap(process, timeout_s)
        finally:
            if self.channel is not None:
                self.channel.close()
            self._stop_listening()
        return None if process is None else process.returncode

    async def _reap(self, process: asyncio.subprocess.Process, timeout_s: float) -> None:
        for number, patience_s in ((None, timeout_s), (signal.SIGTERM, 2.0), (signal.SIGKILL, 5.0)):
            if number is not None and process.returncode is None:
                log.get().warning("the engine does not leave", signal=number.name)
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(number)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), patience_s)
                return

    def _make_channel(self) -> asyncio.Protocol:
        if self.channel is not None:
            return _Refused()
        self.channel = FrontChannel(
            lambda _: self._stop_listening(), self._on_message, self._channel_lost
        )
        return self.channel

    def _stop_listening(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _channel_lost(self, error: Exception | None) -> None:
        self.hung_up = True
        if isinstance(error, ChannelError):
            self._gone(f"the engine broke the protocol: {error}")
            return
        # A process that dies closes its socket first; how it died says more.
        asyncio.get_running_loop().call_later(DEATH_S, self._gone, "the engine hung up")

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        status = await process.wait()
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        self._gone(f"the engine {how}")

    def _gone(self, sentence: str) -> None:
        if not self.gone.done():
            self.gone.set_result(sentence)


class _Refused(asyncio.Protocol):
    """Hangs up on whoever connects after the engine."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


def remove_left_files(shm_dir: str, engine_pid: int) -> None:
    """Unlink the shared-memory files of an engine that was killed before it could."""
    for path in Path(shm_dir).glob(f"nightjar-{engine_pid}-*"):
        path.unlink(missing_ok=True)
        log.get().warning("removed what the engine left behind", path=str(path))


def engine_command(flags: Sequence[str]) -> list[str]:
    """Command line of the real engine; `EngineProcess` adds the socket."""
    return [sys.executable, "-m", "worker.engine.main", *flags]
